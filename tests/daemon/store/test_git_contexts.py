"""Builds whose context is a git repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import Client
from sandbox.errors import Invalid, NotFound
from tests.support.git_server import GitServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitServer]:
    with GitServer(tmp_path_factory.mktemp("git")) as made:
        yield made


async def listed(host: Client) -> list[str]:
    async with host.create("built") as sb:
        return (await sb.exec("cd / && find c* o -type f,l | sort", ends_turn=False)).text.split()


async def test_a_repository_is_a_context(host: Client, server: GitServer, tmp_path: Path) -> None:
    lines: list[str] = []
    for fragment, number in (("#main:sub", 2), ("#v1:sub", 1), (f"#{server.commits[0]}:sub", 1)):
        await host.images.build("built", server.address + fragment, replace=True, output=lines.append)
        assert await listed(host) == [f"c{number}/Dockerfile", f"c{number}/deep/run"]
    assert lines[-1].startswith("nothing was run")
    await host.images.build("built", server.address, file="sub/Dockerfile", replace=True)
    assert await listed(host) == ["c2/file", "c2/link", "c2/sub/Dockerfile", "c2/sub/deep/run"]
    (tmp_path / "Dockerfile").write_text("FROM debian\nCOPY --from=other deep /o/\n")
    await host.images.build("built", tmp_path, contexts={"other": f"{server.address}#old:sub"}, replace=True)
    assert await listed(host) == ["o/run"]


async def test_what_a_repository_lacks(host: Client, server: GitServer) -> None:
    with pytest.raises(NotFound, match="Dockerfile"):
        await host.images.build("built", server.address, replace=True)
    with pytest.raises(Invalid, match="git: "):
        await host.images.build("built", f"{server.address}#nosuch", replace=True)
    with pytest.raises(Invalid, match="there is no directory nosuch"):
        await host.images.build("built", f"{server.address}#main:nosuch", replace=True)
    with pytest.raises(NotFound, match="Dockerfile"):
        await host.images.build("built", "/nowhere", replace=True)
