"""Other people's tools as they come from PyPI: each runs a task of its own in sandboxes, by its plug-in."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sandbox import Client
from tests.support.daemon_host import Daemon
from tests.support.gateway_upstream import Upstream
from tests.support.scripted_model import Step, script
from tests.support.tools import ROOT, environment, ran, record, tool

pytestmark = pytest.mark.long
CODE = "Thoughts.\n<code>\ncount = 2\nfinal_answer(shells(count))\n</code>"
COUNT = "grep -c x /srv/shells.txt > /srv/answer.txt; cat /srv/answer.txt"
STEPS: dict[str, tuple[Step, ...]] = {
    "deepagents": (
        ("write_file", {"file_path": "/srv/shells.txt", "content": "x\nx\nx\n"}),
        ("execute", {"command": COUNT}),
        "three",
    ),
    "smolagents": (CODE,),
}
RESULT: dict[str, dict[str, Any]] = {
    "swe_rex": {
        "alive": True,
        "session": "hermit\nempty",
        "failed": True,
        "broken": True,
        "slow": True,
        "after": "/srv",
        "executed": "6 /srv/shell.txt\n",
        "read": "empty\n",
    },
    "nemo_gym": {
        "out": "hermit\nshell\n",
        "err": "no\n",
        "code": 3,
        "status": "running",
        "slow": "timeout",
        "down": "up\n",
    },
    "openenv": {"said": ["1", "2"], "restored": "3"},
    "tinker": {
        "protocol": True,
        "ran": ["shells\n", "no\n", 3],
        "slow": 124,
        "tool": "tool\n",
        "read": "she",
        "missing": -1,
        "gone": "pagurus/not_found",
    },
    "openai_agents": {
        "running": True,
        "ran": ["hermit\n", "no\n", 3],
        "read": "made",
        "listed": ["made.txt", "shell.txt"],
        "slow": "ExecTimeoutError",
        "stopped": False,
        "resumed": "made0\n",
        "gone": False,
    },
    "smolagents": {"answer": "shell shell ", "slow": True, "kept": "1", "shell": "hermit\n"},
    "openhands": {
        "moved": [True, True, "shell\n", False],
        "ran": [3, "/srv/work\nshell\n"],
        "slow": True,
        "alive": [0, "before\n"],
    },
}


async def task(name: str, host: Client, daemon: Daemon, place: Path) -> dict[str, Any]:
    """What a tool's task prints. It leaves no sandbox."""
    program = [tool(name.replace("_", "-")) / "bin/python", ROOT / f"tests/support/tool_tasks/{name}_task.py"]
    async with Upstream(script(*STEPS.get(name, ("done",)))) as model:
        env = environment(daemon, place, OPENAI_BASE_URL=f"{model.url}/v1", OPENAI_API_KEY="none")
        said = await asyncio.to_thread(ran, program, env, place)
    assert await host.sandboxes() == []
    result: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize("name", RESULT)
async def test_a_task_of(name: str, host: Client, daemon: Daemon, tmp_path: Path) -> None:
    made = await task(name, host, daemon, tmp_path)
    place = name.replace("_", "-")
    record(place, {key: "passed" if made.get(key) == value else "failed" for key, value in RESULT[name].items()})
    assert made == RESULT[name]


async def test_an_agent_of_deepagents(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    result = await task("deepagents", host, daemon, tmp_path)
    assert result["answer"] == "3\n"
    assert result["results"][1].startswith("3\n")
    assert result["errors"] == ["file_not_found", "is_directory"]
    record("deepagents", dict.fromkeys(("write_file", "execute", "download_files", "errors"), "passed"))


async def test_an_agent_of_mini_swe_agent(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    steps = [("bash", {"command": command}) for command in ("echo x > /srv/a", "cat /srv/a; exit 3")]
    last = ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat /srv/a"})
    async with Upstream(script(*steps, last)) as model:
        env = environment(
            daemon,
            tmp_path,
            OPENAI_BASE_URL=f"{model.url}/v1",
            OPENAI_API_BASE=f"{model.url}/v1",
            OPENAI_API_KEY="none",
            MSWEA_CONFIGURED="true",
            MSWEA_COST_TRACKING="ignore_errors",
        )
        words = ["-y", "--exit-immediately", "-t", "look", "-m", "openai/scripted", "-o", tmp_path / "out.json"]
        kind = "pagurus.integrations.mini_swe_agent.PagurusEnvironment"
        settings = ["--environment-class", kind, "-c", "mini.yaml", "-c", "environment.cwd=/srv"]
        program = [tool("mini-swe-agent") / "bin/mini", *words, *settings]
        await asyncio.to_thread(ran, program, env, tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["info"]["exit_status"], result["info"]["submission"]) == ("Submitted", "x\n")
    assert result["info"]["pagurus"]["checkpoint"].startswith("c-")
    record("mini-swe-agent", dict.fromkeys(("execute", "submission", "serialize", "cleanup"), "passed"))
    assert await host.sandboxes() == []
