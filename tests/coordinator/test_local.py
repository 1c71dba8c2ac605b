"""The processes of a run: started again when killed, adopted when their supervisor was, never supervised twice."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from coordinator import local
from rollout.store import stages
from rollout.store.lock import own
from sandbox.errors import Conflict, NotFound
from sandbox.paths import CHECKOUT
from tests.support.programs import END_TIMEOUT, Program, in_background

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


# Is ready at once, may be held ready, writes down who began, waits for a file.
READY = """
import os, sys, time
from pathlib import Path
from rollout.store import stages
run = Path(sys.argv[1])
if "--wait" in sys.argv:
    (run / f"spare-{os.getpid()}").touch()
    if not sys.stdin.readline():
        sys.exit(0)
stages.note(run / "roles", "trainer", stages.READY)
(run / f"began-{os.getpid()}").touch()
while not (run / "end").exists():
    time.sleep(0.01)
"""
OTHER = "import time; time.sleep(600)"  # a rollout that does nothing
WATCH = """
import json, sys
from pathlib import Path
from coordinator import local
local.PAUSE = 0.0
sys.exit(local.supervise(Path(sys.argv[1]), json.loads(sys.argv[2])))
"""


def programs(run: Path) -> dict[str, list[str]]:
    return {"rollout": [sys.executable, "-c", OTHER], "trainer": [sys.executable, "-c", RUN, str(run)]}


def watch(run: Path, started: Callable[[Sequence[str]], list[str]] = list) -> Program:
    return Program(started([sys.executable, "-c", WATCH, str(run), json.dumps(programs(run))]), cwd=CHECKOUT)


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


def written_down(run: Path) -> set[str]:
    """Whom a supervisor that dies now leaves to the next one: a process may be at work before its name is written."""
    return set(local.written(run))


def living(run: Path) -> dict[str, bool]:
    return {state.name: state.alive for state in local.states(run)}


@pytest.mark.parametrize("status", [local.DONE, local.SAID])
def test_a_role_that_is_killed_is_started_again_and_one_that_ends_ends_the_run(run: Path, status: int) -> None:
    (run / "deaths").write_text("3")
    (run / "end").write_text(str(status))
    assert local.supervise(run, programs(run)) == status
    assert starts(run) == 4
    assert living(run) == {"supervisor": True, "rollout": False, "trainer": False}
    assert {state.name: state.generation for state in local.states(run)}["trainer"] == 4


def test_a_role_that_dies_again_and_again_is_left_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_DEATHS", 2)
    (run / "deaths").write_text("100")
    assert local.supervise(run, programs(run)) == local.SAID
    assert starts(run) == 3


def test_the_last_words_of_a_rollout_that_cannot_go_on_are_shown(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = [sys.executable, "-c", "import sys; print('first'); print('no image'); sys.exit(1)"]
    assert local.supervise(run, {**programs(run), "rollout": said}) == local.SAID
    assert "the rollout stopped: no image" in capfd.readouterr().err
    assert not living(run)["trainer"]


def test_who_was_ready_is_started_again_at_once_and_for_ever_only_if_it_works(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PAUSE", 600.0)
    monkeypatch.setattr(local, "MAX_PAUSE", 600.0)
    monkeypatch.setattr(local, "MAX_FRUITLESS", 3)
    dies = "import os, sys; from pathlib import Path; from rollout.store import stages; run = Path(sys.argv[1])\n"
    dies += "stages.note(run / 'roles', 'trainer', stages.READY); starts = run / 'starts'\n"
    dies += "starts.write_text(starts.read_text() + 'x' if starts.exists() else 'x'); os.kill(os.getpid(), 9)"
    assert local.supervise(run, {"trainer": [sys.executable, "-c", dies, str(run)]}) == local.SAID
    assert starts(run) == 4
    noted = [item.stage for item in stages.read(local.roles_of(run), role="trainer")]
    assert noted == [stages.BEGUN, stages.READY, stages.NOTICED] * 4


def test_a_spare_takes_over_and_another_is_made_ready(run: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", READY, str(run)]
    program = "import json, sys; from pathlib import Path; from coordinator import local; local.POLL_INTERVAL = 0.01\n"
    program += "roles = {'trainer': json.loads(sys.argv[2])}\n"
    program += "sys.exit(local.supervise(Path(sys.argv[1]), roles, standbys=['trainer']))"
    watching = Program([sys.executable, "-c", program, str(run), json.dumps(argv)], cwd=CHECKOUT)

    def pids(kind: str) -> set[str]:
        return {path.name.partition("-")[2] for path in run.glob(f"{kind}-*")}

    until(lambda: len(pids("began")) == 1 and len(pids("spare")) == 1)
    (standby,) = pids("spare")
    until(lambda: local.restart(run, "trainer"))
    until(lambda: standby in pids("began") and len(pids("spare")) == 2)
    (new,) = pids("spare") - {standby}
    held = os.pidfd_open(int(new))
    try:
        watching.destroy()  # nobody is left who could need the spare
        assert select.select([held], [], [], 120)[0]
        assert new not in pids("began")
    finally:
        os.close(held)
        local.restart(run, "trainer")


def test_a_process_that_finds_the_role_taken_is_tried_again(run: Path) -> None:
    first = f"from pathlib import Path; r = Path({str(run)!r}) / 'tries'; n = len(r.read_text()) if r.exists() else 0"
    then = f"; r.write_text('x' * (n + 1)); import sys; sys.exit({local.OWNED} if n < 2 else 0)"
    taken = [sys.executable, "-c", first + then]
    assert local.supervise(run, {**programs(run), "trainer": taken}) == local.DONE
    assert len((run / "tries").read_text()) == 3


def test_a_run_folder_has_one_supervisor(run: Path) -> None:
    with own(run, "supervisor.lock"), pytest.raises(Conflict, match=str(os.getpid())):
        local.supervise(run, programs(run))


def test_the_roles_outlive_their_supervisor_and_the_next_one_adopts_them(run: Path) -> None:
    with watch(run) as first:
        until(lambda: starts(run) == 1 and written_down(run) == {"supervisor", "rollout", "trainer"})
        first.destroy()
    assert living(run) == {"supervisor": False, "rollout": True, "trainer": True}
    with watch(run) as second:
        until(lambda: {s.name: s for s in local.states(run)}["supervisor"].generation == 2)
        until(lambda: local.restart(run, "rollout"))
        until(lambda: {s.name: s for s in local.states(run)}["rollout"].generation == 2)
        (run / "summary.json").write_text("{}")
        (run / "end").write_text("0")
        assert second.wait(120) == 0 and starts(run) == 1
    assert not any(living(run).values())


def test_a_trainer_of_another_plan_is_not_adopted(run: Path) -> None:
    """It would end after the steps that it began with."""
    (run / "plan.json").write_text("{}")
    with watch(run) as first:
        until(lambda: starts(run) == 1 and written_down(run) == {"supervisor", "rollout", "trainer"})
        first.destroy()
    (run / "plan.json").write_text('{"steps": 8}')
    with watch(run) as second:
        until(lambda: starts(run) == 2)
        begun = {"supervisor": 2, "rollout": 1, "trainer": 2}
        until(lambda: {s.name: s.generation for s in local.states(run)} == begun)
        (run / "end").write_text("0")
        assert second.wait(120) == 0


def test_a_supervisor_in_the_background_ends_its_roles(run: Path) -> None:
    """They have SIGINT ignored as well, so that it could not end them."""
    with watch(run, in_background) as supervisor:
        until(lambda: starts(run) == 1 and written_down(run) == {"supervisor", "rollout", "trainer"})
        supervisor.terminate()
        assert supervisor.wait(END_TIMEOUT) == local.SAID
    assert not any(living(run).values())


def test_who_is_asked_to_end_ends_what_it_adopted_too(run: Path) -> None:
    with watch(run) as first:
        until(lambda: starts(run) == 1 and written_down(run) == {"supervisor", "rollout", "trainer"})
        first.destroy()
    with watch(run) as second:
        until(lambda: {s.name: s for s in local.states(run)}["supervisor"].generation == 2)
        second.terminate()
        assert second.wait(120) == local.SAID and starts(run) == 1
    assert not any(living(run).values())


def test_a_detached_run_is_looked_at(run: Path) -> None:
    with pytest.raises(NotFound):
        next(local.follow(run))
    local.detach(run)  # of a folder that is no run: both roles say so
    until(lambda: (run / "roles" / "trainer.json").exists() and not any(living(run).values()))
    assert b"stopped" in b"".join(local.follow(run))
    assert not local.restart(run, "trainer")


def test_where_nothing_ran_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        local.states(tmp_path)
    with pytest.raises(NotFound):
        next(local.follow(tmp_path))
