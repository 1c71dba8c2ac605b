"""``pagurus mcp`` with the protocol's own client, as it comes from PyPI."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sandbox import Client
from tests.support.daemon_host import Daemon
from tests.support.tools import ROOT, environment, ran, tool

pytestmark = pytest.mark.long


async def test_an_agent_undoes_and_branches_by_itself(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    python = tool("mcp") / "bin/python"
    program = [python, ROOT / "tests/support/mcp_calls.py", str(python)]
    said = await asyncio.to_thread(ran, program, environment(daemon, tmp_path), tmp_path)
    result = json.loads(said)
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
    assert await host.sandboxes() == []  # they ended with the server
