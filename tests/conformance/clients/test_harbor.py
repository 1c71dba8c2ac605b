"""Harbor as it comes from PyPI runs our folders of tasks in sandboxes."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import Client
from tests.support.daemon_host import Daemon
from tests.support.tools import ROOT, environment, ran, record, tool

pytestmark = pytest.mark.long
TASKS = ROOT / "examples/harbor_tasks"
CLASS = "pagurus.integrations.harbor:PagurusEnvironment"


def harbor(daemon: Daemon, place: Path, *words: str | Path) -> Path:
    """Run a job; its directory."""
    program = [tool("harbor") / "bin/harbor", "run", "-y", "-q", "--env", CLASS, "-o", place / "jobs"]
    ran([*program, "--job-name", "job", *words], environment(daemon, place), place, timeout=1500)
    return place / "jobs/job"


def rewards(job: Path) -> dict[str, list[float]]:
    collected: dict[str, list[float]] = {}
    for file in sorted(job.glob("*/result.json")):
        result: dict[str, Any] = json.loads(file.read_text())
        assert result["exception_info"] is None, result["exception_info"]
        collected.setdefault(result["task_name"], []).append(result["verifier_result"]["rewards"]["reward"])
    return collected


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_every_task_of_ours(daemon: Daemon, tmp_path: Path, agent: str, reward: float) -> None:
    result = rewards(harbor(daemon, tmp_path, "-p", TASKS, "-a", agent, "-n", "2"))
    assert len(result) == 12
    record("harbor", {f"{agent}: {name}": "passed" if made == [reward] else "failed" for name, made in result.items()})
    assert set(map(tuple, result.values())) == {(reward,)}


COMPOSE = """
services:
  main:
    depends_on: {db: {condition: service_healthy}}
    environment: [DB=http://db:8000/answer]
  db:
    image: debian
    command: sh -c 'mkdir /data && echo 42 > /data/answer && exec python3 -m http.server -d /data 8000'
    healthcheck: {test: test -e /data/answer, interval: 200ms, retries: 50}
"""
FETCH = "python3 -c 'import os, urllib.request as u; print(u.urlopen(os.environ[\"DB\"]).read().decode())'"


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_a_task_of_several_services(daemon: Daemon, tmp_path: Path, agent: str, reward: float) -> None:
    task = shutil.copytree(TASKS / "greeting", tmp_path / "answer")
    (task / "environment/docker-compose.yaml").write_text(COMPOSE)
    (task / "solution/solve.sh").write_text(f"#!/bin/bash\n{FETCH} > /app/answer\n")
    (task / "tests/test.sh").write_text(
        "#!/bin/bash\nmkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt\n"
        f'test "$(cat /app/answer)" = "$({FETCH})" && echo 1 > /logs/verifier/reward.txt; true\n'
    )
    assert list(rewards(harbor(daemon, tmp_path, "-p", task, "-a", agent, "-k", "2")).values()) == [[reward] * 2]


async def test_trials_are_forks_and_leave_their_final_state(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    job = harbor(daemon, tmp_path, "-p", TASKS / "greeting", "-a", "oracle", "-k", "3", "-n", "3")
    assert list(rewards(job).values()) == [[1.0] * 3]
    assert await host.sandboxes() == []  # each trial ends its own
    for trial in job.glob("greeting*"):
        record = json.loads((trial / "pagurus.json").read_text())

        saved = (trial / record["file"]).read_bytes()

        async def stream(saved: bytes = saved) -> AsyncIterator[bytes]:
            yield saved

        taken = await host.store.receive(stream())
        (fork,) = await host.fork(taken.checkpoint.id)
        async with fork.sandbox as box:
            assert (await box.exec("cat /app/greeting.txt; ls /tests")).text == "Hello, sandbox!\n"
