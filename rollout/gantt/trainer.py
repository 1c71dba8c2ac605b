"""What a run's trainer did when, and why it waited, by the log of the rollout's decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.decide.view import Decision, RolloutView, SchedulingRules, WaitReason
from rollout.gantt import roles
from rollout.gantt.drawing import Bar, Lane, LaneGroup, spent

TRAINS = "trains"
PLAYED, SCORED = "waits: groups are played", "waits: groups are scored"
STRAGGLERS, REFUSED = "waits: stragglers would be over-stale", "waits: a part of the platform refuses"
NONE = "waits: no group is on its way"
ELSEWHERE = "elsewhere: it evaluates, or waits for a version to be served"  # nothing says that it does
COLOURS = {
    TRAINS: "#3b6fb6",
    PLAYED: "#d9d9d9",
    SCORED: "#e5d5bd",
    STRAGGLERS: "#f0c8a0",
    REFUSED: "#e8a9a7",
    NONE: "#ccc",
    roles.TURN: "#d8c6e8",
    roles.DOWN: "#c0504d",
}


def doing(rules: SchedulingRules, view: RolloutView) -> str:
    """What the trainer does; why it waits, if it does. Empty: neither."""
    if view.training:
        return TRAINS
    if not view.requested:
        return ""
    if len(view.buffered) >= rules.groups:
        return STRAGGLERS
    if view.parts:
        return REFUSED
    states = {member.state for group in view.running for member in group.members}
    if states & {"running", "waiting"}:
        return PLAYED
    return SCORED if "scoring" in states else NONE


def of_trainer(logged: Iterable[tuple[SchedulingRules, Decision]]) -> list[Bar]:
    """When it trained, and when it waited for a batch, for what. Each reason to wait is a bar of its own."""
    bars: list[Bar] = []
    before: tuple[str, float, str] | None = None
    for rules, item in logged:
        kind = doing(rules, item.view)
        reasons = (
            action.reason for action in item.actions if isinstance(action, WaitReason) and action.who == "trainer"
        )
        why = next(reasons, f"version {item.view.version}")
        if before is not None and (before[0] != kind or kind != TRAINS):
            if before[0] and item.now > before[1]:
                bars.append(Bar(before[0], before[1], item.now, before[2]))
            before = None
        before = before or (kind, item.now, why)
    return bars


def part(bars: Sequence[Bar], since: float, until: float) -> LaneGroup:
    return LaneGroup(title="Trainer", lanes=[Lane("", bars)], spent=spent(bars, since, until), rest=ELSEWHERE)
