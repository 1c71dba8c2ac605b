"""Compose files of the shapes that real projects have: up, tested, captured in the middle of traffic, killed, restored
with verification, forked. No client sees an error.

`x-check` of a file names its traffic (see programs/app.py) and the service from which it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox import Client, Limits, NotFound, Process, Sandbox

HERE = Path(__file__).parent
FILES = sorted(path for path in (HERE / "files").iterdir())
DONE = "/rounds"  # in the service of the traffic: how many it has made
PROGRAM = ["python3", "/programs/app.py", "client"]
TIMEOUT = 120.0  # seconds


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def about(file: Path) -> dict[str, Any]:
    text = (file / "compose.yaml" if file.is_dir() else file).read_text()
    described: dict[str, Any] = yaml.load(text, yaml.BaseLoader)
    return described


@contextlib.asynccontextmanager
async def composed(host: Client, file: Path) -> AsyncIterator[Sandbox]:
    limits = Limits(memory="2GiB", processes=1000)
    async with host.compose(file, env={}, limits=limits, copy_binds=True, timeout=TIMEOUT) as sb:
        yield sb


async def rounds(sb: Sandbox, service: str) -> int:
    try:
        return int(await sb.files.read(DONE, service=service))
    except NotFound:
        return 0


async def more(sb: Sandbox, service: str, traffic: str, count: int = 20) -> int:
    """Wait until the traffic has made so many more rounds. It must be at work."""
    first = await rounds(sb, service)
    async with asyncio.timeout(TIMEOUT):
        while (now := await rounds(sb, service)) < first + count:
            process = await sb.processes.get(traffic)
            assert process.info.exit_code is None, (await process.logs()).stderr.decode()
            await asyncio.sleep(0.05)
    return now


async def begin(sb: Sandbox, check: dict[str, str]) -> Process:
    command = [*PROGRAM, check["kind"], check["target"], DONE]
    return await sb.processes.start(command, service=check["service"], user=0)


async def test_a_composition(host: Client, file: Path) -> None:
    described = about(file)
    check, service = described["x-check"], described["x-check"]["service"]
    async with composed(host, file) as sb:
        once = await sb.exec([*PROGRAM, check["kind"], check["target"]], service=service, timeout=TIMEOUT)
        assert once.exit_code == 0, once.stderr.decode()
        traffic = await begin(sb, check)
        await more(sb, service, traffic.id)

        saved = await sb.checkpoint("in the middle of traffic")
        await more(sb, service, traffic.id)
        await sb.kill()
        assert (await sb.restore(saved, verify=True)).verified
        await more(sb, service, traffic.id)

        forks = [fork.sandbox for fork in await sb.fork(3)]
        try:
            counts = await asyncio.gather(*(more(fork, service, traffic.id) for fork in forks))
            assert all(count > 0 for count in counts)
            await (await forks[0].processes.get(traffic.id)).kill()
            for other in (*forks[1:], sb):  # its end is seen by none of the others
                await more(other, service, traffic.id)
        finally:
            for fork in forks:
                await fork.remove()
        states = {info.name: (info.state, info.exit_code) for info in await sb.services.list()}
        assert all(state == "running" or code == 0 for state, code in states.values()), states


async def test_services_of_different_networks_cannot_reach_each_other(host: Client) -> None:
    file = next(path for path in FILES if "front-and-back" in path.name)
    target = about(file)["x-isolated"]
    async with composed(host, file) as sb:
        addresses = {info.name: info.address for info in await sb.services.list()}
        for name in (target["target"], addresses[target["target"]]):
            script = f"import socket; socket.create_connection(({name!r}, {target['port']}), 3)"
            result = await sb.exec(["python3", "-c", script], service=target["service"])
            assert result.exit_code != 0 and b"rror: " in result.stderr
        script = f"import socket; socket.create_connection(('database', {target['port']}), 3)"
        assert (await sb.exec(["python3", "-c", script], service="web")).exit_code == 0


def test_there_are_twenty() -> None:
    assert len(FILES) == 20
