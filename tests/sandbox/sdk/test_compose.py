"""Compositions through the SDK, against the fake host: what is provided, copied, started, and removed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import Client, ImageNotFound, Invalid, Limits, NotFound
from sandbox.messages import Composition, CreateRequest, SandboxInfo, Service
from sandbox.messages.services import ServiceHealth, ServiceState
from sandbox.sdk.compose import hidden, limits_of
from sandbox.testing import FakeHost
from tests.support.compose_files import project

TWO = """
name: shop
services:
  web:
    image: debian
    depends_on: [db]
    volumes: ["./web.conf:/etc/web.conf"]
    secrets: [key]
    ports: ["8080:80"]
  db:
    image: postgres
    healthcheck: {test: pg_isready}
  tool: {image: debian, profiles: [tools]}
secrets: {key: {environment: KEY}}
"""


@pytest.fixture
async def fake() -> AsyncIterator[FakeHost]:
    async with FakeHost(images=("debian", "postgres")) as host:
        host.on(r"cat (\S+)", effect=lambda files, match: files.read(match[1]))
        yield host


@pytest.fixture
async def host(fake: FakeHost) -> AsyncIterator[Client]:
    async with fake.client() as client:
        yield client


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "web.conf").write_text("listen 80\n")
    (tmp_path / "compose.yaml").write_text(TWO)
    return tmp_path / "compose.yaml"


async def test_a_composition_is_made_and_removed(host: Client, file: Path) -> None:
    said: list[str] = []
    async with host.compose(file, env={"KEY": "k"}, name="box", labels={"a": "b"}, output=said.append) as sb:
        assert (sb.info.name, sb.info.labels) == ("box", {"a": "b", "compose.project": "shop"})
        assert said == [f"{file}:7: services.web.volumes[0]: {file.parent}/web.conf is copied: what the service writes "
                        "there stays in the sandbox"]  # fmt: skip
        infos = await sb.services.list()
        assert [(info.name, info.state) for info in infos] == [("web", "running"), ("db", "running")]
        assert await sb.files.read("/etc/web.conf") == b"listen 80\n"  # web is the main one
        assert await sb.files.read("/run/secrets/key", service="web") == b"k"
        with pytest.raises(NotFound):
            await sb.files.read("/etc/web.conf", service="db")
        assert (await sb.exec("cat /etc/web.conf", service="web")).text == "listen 80\n"
    assert await host.sandboxes() == []


async def test_the_services_of_a_sandbox(host: Client, file: Path) -> None:
    async with host.compose(file, env={"KEY": "k"}, up=False) as sb:
        db = await sb.services.get("db")
        assert (db.info.state, (await db.logs()).stdout) == (ServiceState.CREATED, b"")
        assert [chunk async for chunk in db.stream()] == []
        await sb.services.up("db")
        assert [info.state for info in await sb.services.list()] == [ServiceState.CREATED, ServiceState.RUNNING]
        assert (await db.refresh()).health is ServiceHealth.HEALTHY
        await sb.files.write("/x", "y", service="db")
        assert (await db.exec("cat /x")).text == "y"
        assert (await db.stop(timeout=1)).exit_code == 143
        assert (await db.restart()).restarts == 1
        with pytest.raises(NotFound, match=r"no service no .*web, db"):
            await sb.services.get("no")
        with pytest.raises(NotFound):
            await sb.exec("cat /x", service="no")


async def test_a_sandbox_of_one_image_has_no_services(host: Client) -> None:
    async with host.create("debian") as sb:
        for call in (
            sb.services.list(),
            sb.services.up(),
            sb.exec("cat /x", service="web"),
            sb.files.list(service="web"),
        ):
            with pytest.raises(Invalid, match="it has no services"):
                await call


async def test_forks_have_the_services_of_their_origin(host: Client, file: Path) -> None:
    async with host.compose(file, env={"KEY": "k"}) as sb:
        for fork in await sb.fork(2):
            assert [info.state for info in await fork.sandbox.services.list()] == [ServiceState.RUNNING] * 2
            assert await fork.sandbox.files.read("/run/secrets/key") == b"k"


async def test_what_fails_leaves_no_sandbox(host: Client, file: Path, tmp_path: Path) -> None:
    (tmp_path / "web.conf").unlink()
    (tmp_path / "web.conf").mkdir()
    with pytest.raises(Invalid, match=r"compose.yaml:7: services.web.volumes\[0\]"):
        await host.compose(file, env={"KEY": "k"})
    (tmp_path / "other.yaml").write_text("services: {web: {image: missing}}")
    with pytest.raises(ImageNotFound, match="no image 'missing'"):
        await host.compose(tmp_path / "other.yaml", pull="never")
    assert await host.sandboxes() == []


async def test_a_composition_that_does_not_come_up_is_removed(
    host: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = host.call

    async def failing(method: str, path: str, *arguments: Any, **options: Any) -> Any:
        if path.endswith("/up"):
            raise Invalid("db is unhealthy")
        return await call(method, path, *arguments, **options)

    monkeypatch.setattr(host, "call", failing)
    with pytest.raises(Invalid, match="db is unhealthy"):
        await host.compose(file, env={"KEY": "k"})
    assert await host.sandboxes() == []


async def test_images_are_provided_by_their_policies(
    host: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def pulled(self: object, name: str) -> None:
        done.append(f"pull {name}")

    async def built(self: object, name: str, context: str, **options: Any) -> None:
        done.append(f"build {name} {options['arguments']} {await asyncio.to_thread(Path(options['file']).read_text)}")

    monkeypatch.setattr("sandbox.sdk.images.Images.pull", pulled)
    monkeypatch.setattr("sandbox.sdk.images.Images.build", built)
    text = """
        services:
          a: {image: debian, pull_policy: never}
          b: {image: postgres, pull_policy: always}
          c: {build: {dockerfile_inline: FROM debian, args: {A: 1}}, image: postgres}
        """
    project(tmp_path, text)
    async with host.compose(tmp_path / "compose.yaml") as sb:
        assert done == ["build postgres {'A': '1'} FROM debian", "pull postgres"]
        assert len(await sb.services.list()) == 3


def test_the_sandbox_may_use_what_its_services_may(tmp_path: Path) -> None:
    made = project(
        tmp_path,
        """
        services:
          a: {image: x, mem_limit: 512m, cpus: 0.5, pids_limit: 10, ulimits: {nofile: 9999}}
          b: {image: x, mem_limit: 256m, cpus: 1}
        """,
    )
    assert limits_of(made) == Limits(cpus=1.5, memory=768 << 20, processes=266, open_files=9999)
    alone = project(tmp_path, "services: {a: {image: x}, b: {image: x, cpus: 1}}")
    assert limits_of(alone) == Limits(cpus=None, memory=2 << 30, processes=512)


async def test_a_composition_is_made_without_a_file(host: Client) -> None:
    composition = Composition(services={"db": Service(image="postgres")}, main="db")
    info = await host.call("POST", "/v1/sandboxes", SandboxInfo, CreateRequest(image="", composition=composition))
    assert [service.name for service in await (await host.get(info.id)).services.list()] == ["db"]


async def test_what_lies_in_a_copied_directory_stays_what_it_is(host: Client, tmp_path: Path) -> None:
    """As in Docker: a volume of node_modules in a bind of the sources, and directories that are not there yet."""
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules/of-the-host").touch()
    (tmp_path / "index.js").touch()
    text = """
        services:
          web: {image: debian, volumes: [".:/app", "/app/node_modules", "./data/new:/data"]}
    """
    made = project(tmp_path, text, copy_binds=True)
    sources = {tree.target: tree for tree in made.directories}
    assert sources["/data"].source == "" and hidden(made, sources["/app"]) == ["node_modules"]
    async with host.compose(tmp_path / "compose.yaml", env={}, copy_binds=True, up=False) as sb:
        assert await sb.files.read("/app/index.js", service="web") == b""
        with pytest.raises(NotFound):
            await sb.files.read("/app/node_modules/of-the-host", service="web")
