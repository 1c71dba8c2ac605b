"""``pagurus mcp`` with the protocol's own client, as it comes from PyPI."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sandbox import Client
from tests.support.daemon_host import Daemon, free_port, until
from tests.support.tools import ROOT, environment, ran, record, tool

pytestmark = pytest.mark.long


async def test_an_agent_undoes_and_branches_by_itself(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    python = tool("mcp") / "bin/python"
    program = [python, ROOT / "tests/support/mcp_calls.py", str(python)]
    said = await asyncio.to_thread(ran, program, environment(daemon, tmp_path), tmp_path)
    judged(json.loads(said))
    assert await host.sandboxes() == []  # they ended with the server


async def test_a_server_that_listens(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    python, port, env = tool("mcp") / "bin/python", free_port(), environment(daemon, tmp_path)
    words = ["-m", "pagurus", "mcp", "--listen", f"127.0.0.1:{port}"]
    server = await asyncio.create_subprocess_exec(python, *words, env=env, cwd=tmp_path)
    try:
        await until(lambda: listens(port), "the server listens", 240)
        address = f"http://127.0.0.1:{port}/mcp"
        program: list[str | Path] = [python, ROOT / "tests/support/mcp_calls.py", str(python), address]
        judged(json.loads(await asyncio.to_thread(ran, program, env, tmp_path)))
    finally:
        server.terminate()
        await server.wait()
    assert await host.sandboxes() == []


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def judged(result: dict[str, Any]) -> None:
    assert result["tools"] == sorted(
        ["create", "run", "write_file", "read_file", "checkpoint", "checkpoints", "restore", "fork", "diff", "remove"]
    )
    assert result["content"] == "port 8080\n"
    assert (result["edited"]["exit_code"], result["edited"]["changed"]) == (0, "files")
    assert result["diff"] == [{"kind": "modified", "path": "/srv/app.conf"}]
    assert result["restored"] == "port 8080\n"
    assert result["forks"] == ["port 9090\n", "port 9090\n"]
    assert result["labels"].count("before") == 1
    assert "pagurus/not_found: " in result["failure"]
    record("mcp", dict.fromkeys(result["tools"], "passed"))
