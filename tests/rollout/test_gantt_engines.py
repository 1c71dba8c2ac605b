"""Lanes of engines and why their slots were empty: tables, and servers that note what they do."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from rollout.decide.view import GroupView, PartView, RolloutView, SchedulingRules, TrajectoryView
from rollout.gantt import engines, roles
from rollout.gantt.drawing import Bar
from rollout.gantt.engines import ANSWERS, STATES, EngineMoment, RunningCount, bubbles
from rollout.store import lines, servers
from rollout.store.servers import Doing, ServerLog

RULES = SchedulingRules(groups=2, size=2, concurrency=3, staleness=1)


def server(load: int, *, state: str = "serving", slots: int = 4, name: str = "a", at: float = 0.0) -> Doing:
    return Doing(at, name, state, load, slots)


def members(*states: str) -> list[GroupView]:
    return [GroupView("p", 0, [TrajectoryView(n, state) for n, state in enumerate(states)])]  # type: ignore[arg-type]


COMMAND, HELD = engines.IN["command"], engines.IN["held for a checkpoint"]


@pytest.mark.parametrize(
    ("doing", "running", "did", "reported"),
    [
        ([server(4)], 4, {}, {ANSWERS: 1}),
        ([server(9)], 9, {}, {ANSWERS: 1}),  # what is beyond its slots waits in it
        ([server(1)], 1, {}, {ANSWERS: 0.25, "so": 0.75}),
        ([server(1)], 4, {"command": 3}, {ANSWERS: 0.25, COMMAND: 0.75}),
        ([server(2)], 4, {"command": 1, "held for a checkpoint": 1}, {ANSWERS: 0.5, COMMAND: 0.25, HELD: 0.25}),
        ([server(2)], 3, {"command": 4}, {ANSWERS: 0.5, COMMAND: 0.25, "so": 0.25}),  # of some it is told late
        ([server(2)], 4, {"command": 1}, {ANSWERS: 0.5, COMMAND: 0.25, engines.UNTOLD: 0.25}),
        ([server(1)], 3, {"samples": 3}, {ANSWERS: 0.25, engines.IN["samples"]: 0.5, "so": 0.25}),
        ([server(0)], 4, {"scored": 4}, {engines.UNTOLD: 1}),
        ([server(0)], 2, {"command": 2, roles.TURN: 1}, {COMMAND: 0.5, engines.OTHERS: 0.5}),
        ([server(3, state="updating")], 3, {}, {STATES["updating"]: 1}),
        ([server(0, slots=0)], 3, {}, {engines.USERS: 1}),
        ([server(0), server(0, name="b", state="resting")], 0, {}, {"so": 1, STATES["resting"]: 1}),
        ([server(2), server(1, name="b", slots=1)], 4, {"command": 1}, {ANSWERS: 1.5, COMMAND: 0.25, "so": 0.25}),
    ],
)  # fmt: skip
def test_an_empty_slot_has_a_cause(
    doing: list[Doing], running: int, did: dict[str, int], reported: dict[str, float]
) -> None:
    result = bubbles(EngineMoment(servers=doing, observed=RunningCount(0, running, "so"), did=did))
    assert result == pytest.approx(reported) and sum(result.values()) == pytest.approx(len(doing))


@pytest.mark.parametrize(
    ("existing", "staleness", "reported"),
    [
        ({"draining": True}, 1, engines.ENDS),
        ({"parts": [PartView("create", 1, 0, 0, "full")]}, 1, engines.REFUSED),
        ({"running": members("running", "running", "running", "waiting")}, 1, engines.AT_CONCURRENCY),
        ({"running": members("running", "waiting")}, 1, engines.BEGIN),
        ({"more": False}, 1, engines.NO_PROMPTS),
        ({"more": False, "queued": 1}, 1, engines.AHEAD),
        ({"training": True}, 1, engines.AHEAD),
        ({"training": True}, 0, engines.TURN),
        ({"training": True, "bound": 0}, 1, engines.TURN),
        ({"requested": True}, 0, engines.AHEAD),  # the last of a batch are under way
    ],
)
def test_why_no_more_trajectories_go_on(existing: dict[str, object], staleness: int, reported: str) -> None:
    plain = {
        "version": 3,
        "requested": False,
        "training": False,
        "running": [],
        "buffered": [],
        "queued": 0,
        "more": True,
    }
    view = RolloutView(**{**plain, **existing})  # type: ignore[arg-type]
    assert engines.why(msgspec.structs.replace(RULES, staleness=staleness), view) == reported


def test_bubbles_over_time_are_of_what_was_known_at_each_moment() -> None:
    doing = [server(2, at=1), server(4, at=3), server(0, state="updating", at=5), server(0, at=6)]
    observed = [RunningCount(0, 4, "so"), RunningCount(5.5, 0, "other")]
    played = [Bar("command", 0, 2, ""), Bar("command", 0, 2, ""), Bar("scored", 2, 9, "")]
    reported = {ANSWERS: 3, COMMAND: 0.5, engines.UNTOLD: 0.5, STATES["updating"]: 1, "other": 2}
    assert engines.spent(doing, observed, played, 0, 8) == pytest.approx(reported)
    assert engines.spent(doing, observed, played, 4, 6) == pytest.approx({ANSWERS: 1, STATES["updating"]: 1})


def test_a_lane_is_as_high_as_its_server_was_full() -> None:
    doing = [server(0, at=0), server(1, at=2), server(2, state="updating", at=4), server(4, at=6), server(9, at=7)]
    (lane,) = engines.lanes(doing, 0, 8)
    states = [(bar.kind, bar.begin, bar.end) for bar in lane.bars if bar.kind != ANSWERS]
    assert (lane.name, states) == ("a", [(STATES["updating"], 4, 6)])
    fill = [bar for bar in lane.bars if bar.kind == ANSWERS]
    assert sum(bar.full * (bar.end - bar.begin) for bar in fill) == pytest.approx(2 * 0.25 + 2)
    assert {round(bar.full, 6) for bar in fill} == {0.25, 1.0} and fill[0].who == "a: 1.0 of 4 at once"


def test_a_log_tells_each_change_and_who_was_left(tmp_path: Path) -> None:
    logs = [ServerLog(tmp_path) for _ in range(2)]
    for log in logs:
        log.note("a", "serving", 3, 4)
        log.note("b", "resting", 0, 4)
    result = [(item.server, item.state, item.load) for item in servers.read(tmp_path)]
    alive = [("a", "serving", 3), ("b", "resting", 0)]
    assert result == [*alive, ("a", servers.LEFT, 0), ("b", servers.LEFT, 0), *alive]  # as a killed process leaves it
    for log in logs:
        log.close()


def test_a_full_disk_costs_the_log_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ServerLog(tmp_path)
    log.note("a", "serving", 1, 4)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(lines.Lines, "append", full)
        log.note("a", "serving", 2, 4)
    log.note("a", "serving", 3, 4)
    assert [item.load for item in servers.read(tmp_path)] == [1]
