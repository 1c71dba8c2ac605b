"""A composition moves to another host and back in the middle of its traffic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.messages.cluster import HostInfo, MoveRequest, MoveResult
from tests.conformance.compose.test_compositions import FILES, about, begin, composed, more
from tests.support.cluster import Cluster, apart
from tests.support.daemon_host import Daemon, missing


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
        names = [info.name for info in await client.call("GET", "/v1/cluster/hosts", list[HostInfo])]
        paused = []
        for target in (*names, names[0]):
            request = MoveRequest(sandbox=sb.id, host=target)
            paused.append((await client.call("POST", "/v1/cluster/moves", MoveResult, request)).pause_ms)
            await more(sb, check["service"], traffic.id)
        assert sum(pause > 0 for pause in paused) >= 2  # it was at one of them already
