"""Inspect as it comes from PyPI: its own checks of a provider, and an evaluation whose model has a shell."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from sandbox import Client
from tests.support.daemon_host import Daemon
from tests.support.gateway_upstream import Upstream
from tests.support.scripted_model import script
from tests.support.tools import ROOT, environment, ran, record, tool

pytestmark = pytest.mark.long
COMPOSE = """
services:
  default:
    image: debian
    command: tail -f /dev/null
    network_mode: none
    working_dir: /work
    mem_limit: 512m
"""


async def test_its_checks_of_a_provider(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    checks = tmp_path / "test_checks.py"
    checks.write_text((ROOT / "tests/support/inspect_checks.py").read_text())
    program = [tool("inspect") / "bin/python", "-m", "pytest", "-v", "-o", "asyncio_mode=auto", checks]
    said = await asyncio.to_thread(ran, program, environment(daemon, tmp_path), tmp_path, timeout=1500)
    record("inspect", {name: verdict.lower() for name, verdict in re.findall(r"::(\S+) (PASSED|FAILED|SKIPPED)", said)})
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 44
    assert not re.findall(r"(\d+) (failed|xfailed|skipped)", said.splitlines()[-1])
    assert await host.sandboxes() == []


async def test_an_evaluation(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(COMPOSE)
    (tmp_path / "task.py").write_text((ROOT / "tests/support/inspect_task.py").read_text())
    async with Upstream(script(("bash", {"command": "grep -c x shells.txt > answer.txt"}), "done")) as model:
        env = environment(daemon, tmp_path, OPENAI_BASE_URL=f"{model.url}/v1", OPENAI_API_KEY="none")
        words = ["eval", "task.py", "--model", "openai/gpt-4o", "--log-dir", "logs", "--log-format", "json"]
        program = [tool("inspect") / "bin/inspect", *words, "--display", "plain"]
        await asyncio.to_thread(ran, program, env, tmp_path)
    (log,) = (tmp_path / "logs").glob("*.json")
    result = json.loads(log.read_text())
    assert result["status"] == "success"
    assert [sample["scores"]["repaired"]["value"] for sample in result["samples"]] == [1.0, 1.0]
    assert await host.sandboxes() == []
