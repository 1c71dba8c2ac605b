"""The processes of a run: started again when killed, adopted when their supervisor was, never supervised twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator import local
from rollout.store.lock import own
from sandbox.errors import Conflict, NotFound
from sandbox.paths import CHECKOUT

# Dies by SIGKILL as often as its folder says, then waits for a file, then ends with the status that is in it.
RUN = """
import os, sys, time
from pathlib import Path
run = Path(sys.argv[1])
starts = run / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
print("start", len(starts.read_text()), flush=True)
if len(starts.read_text()) <= int((run / "deaths").read_text()):
    os.kill(os.getpid(), 9)
while not (run / "end").exists():
    time.sleep(0.01)
sys.exit(int((run / "end").read_text()))
"""


def argv(run: Path) -> list[str]:
    return [sys.executable, "-c", RUN, str(run)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local, "PAUSE", 0.0)
    (tmp_path / "deaths").write_text("0")
    return tmp_path


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def starts(run: Path) -> int:
    return len((run / "starts").read_text()) if (run / "starts").exists() else 0


@pytest.mark.parametrize("status", local.SAID)
def test_a_run_that_is_killed_is_started_again_and_one_that_ends_is_not(run: Path, status: int) -> None:
    (run / "deaths").write_text("3")
    (run / "end").write_text(str(status))
    assert local.supervise(run, argv(run)) == status
    assert starts(run) == 4
    assert [(state.name, state.alive) for state in local.states(run)] == [("supervisor", True), ("run", False)]
    assert {state.name: state.generation for state in local.states(run)}["run"] == 4


def test_a_run_that_dies_again_and_again_is_left_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "DEATHS_MOST", 2)
    (run / "deaths").write_text("100")
    assert local.supervise(run, argv(run)) == -9
    assert starts(run) == 3


def test_a_run_folder_has_one_supervisor(run: Path) -> None:
    with own(run, "supervisor.lock"), pytest.raises(Conflict, match=str(os.getpid())):
        local.supervise(run, argv(run))


def test_the_run_outlives_its_supervisor_and_the_next_one_waits_for_it(run: Path) -> None:
    program = [sys.executable, "-m", "coordinator.local", str(run), *argv(run)]
    first = subprocess.Popen(program, cwd=CHECKOUT)
    until(lambda: starts(run) == 1)
    first.kill()
    first.wait()
    roles = {state.name: state for state in local.states(run)}
    assert not roles["supervisor"].alive and roles["run"].alive
    second = subprocess.Popen(program, cwd=CHECKOUT)
    until(lambda: {s.name: s for s in local.states(run)}["supervisor"].generation == 2)
    (run / "summary.json").write_text("{}")
    (run / "end").write_text("0")
    assert second.wait(120) == 0 and starts(run) == 1


def test_a_detached_run_is_looked_at(run: Path) -> None:
    local.detach(run, argv(run))
    until(lambda: starts(run) == 1)
    assert local.restart(run, "run")
    until(lambda: starts(run) == 2)
    (run / "end").write_text("0")
    said = b"".join(local.follow(run))
    assert b"start 1" in said and b"is started again" in said and b"start 2" in said
    assert not local.restart(run, "run")


def test_where_nothing_ran_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        local.states(tmp_path)
    with pytest.raises(NotFound):
        next(local.follow(tmp_path))
