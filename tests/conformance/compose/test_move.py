"""Compositions, and containers that a sandbox has made, go on on another host: moved to it and back, or imported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from daemon.docker.service import PORT
from sandbox import Client, Sandbox
from sandbox.messages.cluster import HostInfo, MoveRequest, MoveResult
from tests.conformance.compose.test_compositions import FILES, about, begin, composed, more
from tests.support.cluster import Cluster, apart
from tests.support.daemon_host import Daemon, missing
from tests.support.docker_command import COMMAND, MISSING, TRAFFIC, more_rounds, says, with_docker


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator over two hosts that share nothing but the kernel."""
    if reason := missing():
        pytest.skip(reason)
    daemons = {name: apart(Daemon(tmp_path_factory.mktemp(name))) for name in ("one", "two")}
    made = Cluster(tmp_path_factory.mktemp("cluster"), "--lease", "15")
    try:
        for daemon in daemons.values():
            daemon.start()
        made.start()
        for name, daemon in daemons.items():
            made.add(name, daemon)
        yield made
    finally:
        made.clean()
        for daemon in daemons.values():
            (daemon.run / "lease").unlink(missing_ok=True)
            daemon.clean()


@pytest.mark.parametrize("name", ["03-web-database-cache", "18-pool-of-connections"])
async def test_a_composition_moves_to_another_host(pair: Cluster, name: str) -> None:
    file: Path = next(path for path in FILES if path.stem == name)
    check = about(file)["x-check"]
    async with pair.client() as client, composed(client, file) as sb:
        traffic = await begin(sb, check)
        await more(sb, check["service"], traffic.id)
        for _ in range(2):
            await move(client, sb)
            await more(sb, check["service"], traffic.id)


async def move(client: Client, sb: Sandbox) -> None:
    """To the host where it is not."""
    names = [info.name for info in await client.call("GET", "/v1/cluster/hosts", list[HostInfo])]
    paused = []
    for name in names:
        request = MoveRequest(sandbox=sb.id, host=name)
        paused.append((await client.call("POST", "/v1/cluster/moves", MoveResult, request)).pause_ms)
        if paused[-1] > 0:
            break
    assert paused[-1] > 0


async def test_containers_of_a_sandbox_move_with_it(pair: Cluster) -> None:
    async with pair.client() as client, client.create("debian", docker=True) as sb:
        for turn in range(3):
            async with sb.ports.forward(PORT) as address:
                await asyncio.to_thread(use_containers, f"tcp://{address}", turn)
            if turn < 2:
                await move(client, sb)


def use_containers(address: str, turn: int) -> None:
    """Those of the turns before run, and can be used; one more is made."""
    engine = docker.DockerClient(base_url=address, version="auto", timeout=100)
    assert {web.name: web.status for web in engine.containers.list()} == {f"web{n}": "running" for n in range(turn)}
    for web in engine.containers.list():
        assert web.exec_run(["sh", "-c", "echo once more >> /turns; cat /turns"]).exit_code == 0
    engine.containers.run("debian", "sleep 100000", name=f"web{turn}", detach=True)


async def test_services_go_on_where_their_checkpoint_is_imported(pair: Cluster) -> None:
    one, two = pair.daemons.values()
    file: Path = next(path for path in FILES if path.stem == "03-web-database-cache")
    check = about(file)["x-check"]
    async with one.client() as here, two.client() as there, composed(here, file) as sb:
        traffic = await begin(sb, check)
        await more(sb, check["service"], traffic.id)
        before = {item.name: (item.program, item.state, item.health) for item in await sb.services.list()}
        point = await sb.checkpoint()
        await here.store.verify(point)  # it is durable by then
        await there.store.receive(here.store.stream(point))
        async with (await there.fork(point.id, verify=True))[0].sandbox as taken:
            after = {item.name: (item.program, item.state, item.health) for item in await taken.services.list()}
            assert after == before and all(program for program, _, _ in after.values())
            await more(taken, check["service"], traffic.id)


@pytest.mark.skipif(COMMAND is None, reason=MISSING)
async def test_a_composition_moves_with_its_containers(pair: Cluster, tmp_path: Path) -> None:
    """With the connection between a container and a service open."""
    async with pair.client() as client, with_docker(client, tmp_path, copied=True) as sb:
        await says(sb, TRAFFIC)
        await more_rounds(sb)
        for turn in range(2):
            await move(client, sb)
            await more_rounds(sb)
            assert await says(sb, f"docker run --rm debian echo {turn}") == str(turn)
