"""Volumes and directories of the host that services have inside of one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import Client
from sandbox.container import services
from sandbox.errors import Invalid
from sandbox.messages import Composition, Service
from sandbox.messages.services import HostMount, TreeMount, Volume
from tests.support.compositions import composed, shell
from tests.support.daemon_host import IMAGE

SLEEP = shell("exec sleep 100000")


def service(**more: object) -> Service:
    return Service(image=IMAGE, command=SLEEP, **more)  # type: ignore[arg-type]


def test_where_a_mount_has_its_place() -> None:
    made = service(
        volumes=[Volume(name="v", target="/data"), Volume(name="w", target="/data/sub")],
        trees=[TreeMount(source="/src", target="/data/sub/tree")],
        mounts=[HostMount(source="/srv/x", target="/given")],
    )
    assert services.mount_point(made, "/data") == ("", "/data")
    assert services.mount_point(made, "/data/sub") == ("/volumes/v", "/sub")
    assert services.mount_point(made, "/data/sub/tree") == ("/volumes/w", "/tree")
    assert services.mount_point(made, "/data/sub/tree/a/b") == ("/src", "/a/b")
    assert services.mount_point(made, "/given/v") == ("/srv/x", "/v")
    places = [join.target for join in services.joins_of(Composition(services={"a": made}, main="a"), "a")]
    assert places[-3:] == ["/services/a/data", "/services/a/data/sub", "/services/a/data/sub/tree"]


@pytest.mark.parametrize(
    ("made", "pair"),
    [
        (service(volumes=[Volume(name="v", target="/v"), Volume(name="w", target="/v/w")]), None),
        (service(volumes=[Volume(name="v", target="/v"), Volume(name="w", target="/v")]), ("/v", "/v")),
        (service(volumes=[Volume(name="v", target="/v")], tmpfs=["/v/t"]), ("/v", "/v/t")),
        (service(volumes=[Volume(name="v", target="/t/v")], tmpfs=["/t"]), ("/t", "/t/v")),
        (service(volumes=[Volume(name="v", target="/proc/v")]), ("/proc", "/proc/v")),
        (service(volumes=[Volume(name="v", target="/process")], tmpfs=["/v"]), None),
    ],
)
def test_what_has_no_place(made: Service, pair: tuple[str, str] | None) -> None:
    assert services.overlap(made, reserved=services.SHARED) == pair


async def test_they_lie_in_one_another_after_a_restore_too(host: Client, tmp_path: Path) -> None:
    (given := tmp_path / "given").mkdir()
    (given / "v").mkdir()
    (given / "file").write_text("of the host")
    mounts = [HostMount(source=str(given), target="/given"), HostMount(source=str(given), target="/v/w/host")]
    volumes = [
        Volume(name="deep", target="/given/v/deep/er"),  # listed before what it lies in
        Volume(name="w", target="/v/w"),
        Volume(name="v", target="/v"),
        Volume(name="x", target="/given/v"),
    ]
    made = {"a": service(volumes=volumes, mounts=mounts), "b": service(volumes=[Volume(name="v", target="/only")])}
    tree = "echo {0} > /v/at; echo {0} > /v/w/at; echo {0} > /given/v/at; echo {0} > /given/v/deep/er/at"
    look = "cat /v/at /v/w/at /given/v/at /given/v/deep/er/at /given/file /v/w/host/file; ! touch /given/x"
    async with composed(host, Composition(services=made, main="a")) as sandbox:
        await sandbox.up()
        await sandbox.says(tree.format("one"))
        said = await sandbox.says(look)
        assert said.startswith("one\none\none\none\nof the hostof the host") and "Read-only" in said
        assert await sandbox.says("find /only -type f", "b") == "/only/at"
        assert (await sandbox.run("rmdir /only/w", "b")).exit_code == 1  # something is mounted there
        assert (await sandbox.restore()).verified
        assert await sandbox.says(look) == said
        (fork,) = await sandbox.fork(1)
        try:
            await fork.says(tree.format("two"))
            assert (await fork.says(look)).startswith("two\ntwo\ntwo\ntwo\n")
            assert await sandbox.says(look) == said
        finally:
            await fork.remove()


async def test_a_mount_in_a_directory_of_the_host_needs_one_there(host: Client, tmp_path: Path) -> None:
    made = service(
        mounts=[HostMount(source=str(tmp_path), target="/given")], volumes=[Volume(name="v", target="/given/v")]
    )
    with pytest.raises(Invalid, match="the host has no directory"):
        async with composed(host, Composition(services={"a": made}, main="a")):
            pass
