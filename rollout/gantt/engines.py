"""How full a run's engine servers were, and why their slots were empty. Pure.

A slot without an answer waits for a trajectory. Of those that run, the ones without a request explain as many empty
slots as they are: by what their turns say that they did. The slots beyond them are empty because no more trajectories
had begun: the rollout's decisions say why.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from rollout.decide.view import Decision, RolloutView, SchedulingRules
from rollout.gantt import roles, trajectories
from rollout.gantt.drawing import Bar, Lane, LaneGroup
from rollout.store.servers import LEFT, Doing

ANSWERS = "answers"
STATES = {
    "updating": "takes weights",
    "resting": "rests until the next version",
    "starting": roles.DOWN,
    "down": roles.DOWN,
    "draining": "is being taken out",
    LEFT: "no rollout was there to ask",
}
USERS = "its users need all of it"
IN = {
    trajectories.PREPARED: "trajectories were being prepared",
    trajectories.COMMAND: "trajectories were in commands",
    trajectories.HELD: "trajectories were held for checkpoints",
    trajectories.SAMPLES: "answers were held back (`pace`), or sent to other servers",
}
UNTOLD = "trajectories were elsewhere: between these, or not ended yet"
TURN, OTHERS = "the trainer had the turn", "another job had the turn on shared machines"
AHEAD = "the rollout was as far ahead as staleness allows"
AT_CONCURRENCY, BEGIN = "no more trajectories may run at once (`concurrency`)", "trajectories were about to begin"
REFUSED, ENDS, NO_PROMPTS = "a part of the platform refused", "the rollout was ending", "no prompts were left"
UNDECIDED = "the rollout had decided nothing yet"
COLUMNS = 800  # steps in which a lane is drawn
COLOURS = {
    ANSWERS: "#e0912f",
    STATES["updating"]: "#7d5ba6",
    STATES["resting"]: "#2a9d8f",
    STATES["down"]: "#c0504d",
    STATES[LEFT]: "#c0c0c0",
}


class RunningCount(msgspec.Struct, frozen=True):
    """From `at` on so many trajectories went on; why no more had begun."""

    at: float
    running: int
    why: str


def why(rules: SchedulingRules, view: RolloutView) -> str:
    """Why no more trajectories went on than did."""
    states = Counter(member.state for group in view.running for member in group.members)
    bound = rules.staleness if view.bound is None else view.bound
    if view.draining:
        return ENDS
    if view.parts:
        return REFUSED
    if states["running"] >= rules.concurrency:
        return AT_CONCURRENCY
    if states["waiting"]:
        return BEGIN
    if not view.more and not view.queued and not view.deferred:
        return NO_PROMPTS
    return TURN if bound == 0 and not view.requested else AHEAD


def of_decisions(logged: Iterable[tuple[SchedulingRules, Decision]]) -> list[RunningCount]:
    return [
        RunningCount(
            item.now,
            sum(member.state == "running" for group in item.view.running for member in group.members),
            why(rules, item.view),
        )
        for rules, item in logged
    ]


class EngineMoment(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one moment. `did`: so many of the trajectories whose records are there were in that; also
    whether the rollout waited for its turn."""

    servers: Sequence[Doing]
    observed: RunningCount
    did: Mapping[str, int]


def bubbles(moment: EngineMoment) -> dict[str, float]:
    """Of the servers' time at this moment, in servers, what it went to. Example: {"answers": 0.5}"""
    result: defaultdict[str, float] = defaultdict(float)
    idle = empty = 0.0  # servers, slots
    for item in moment.servers:
        if item.state != "serving":
            result[STATES.get(item.state, item.state)] += 1
        elif item.slots <= 0:
            result[USERS] += 1
        else:
            busy = min(item.load, item.slots)
            result[ANSWERS] += busy / item.slots
            idle += 1 - busy / item.slots
            empty += item.slots - busy
    if empty:
        for cause, slots in _causes(moment, empty).items():
            result[cause] += idle * slots / empty
    return {cause: part for cause, part in result.items() if part > 0}


def _causes(moment: EngineMoment, empty: float) -> dict[str, float]:
    """Empty slots by why they are."""
    requested = sum(item.load for item in moment.servers)
    away = min(empty, max(0, moment.observed.running - requested))
    did = {IN[kind]: count for kind, count in moment.did.items() if kind in IN}
    did[IN[trajectories.SAMPLES]] = max(0, moment.did.get(trajectories.SAMPLES, 0) - requested)
    existing = sum(did.values())
    reported = min(away, existing)
    result = {cause: reported * count / existing for cause, count in did.items() if count}
    return result | {
        UNTOLD: away - reported,
        OTHERS if moment.did.get(roles.TURN) else moment.observed.why: empty - away,
    }


def moments(
    doing: Iterable[Doing], observed: Iterable[RunningCount], played: Iterable[Bar], since: float, until: float
) -> Iterator[tuple[float, EngineMoment]]:
    """From the first word of a server on: how many seconds each lasted."""
    events: list[tuple[float, int, Doing | RunningCount | Bar]] = [(item.at, 0, item) for item in doing]
    events += [(item.at, 1, item) for item in observed]
    for bar in played:
        events += [(bar.begin, 2, bar), (bar.end, 3, bar)]
    servers: dict[str, Doing] = {}
    now, did, at = RunningCount(0.0, 0, UNDECIDED), Counter[str](), since
    for when, kind, event in [*sorted(events, key=lambda item: item[:2]), (until, 0, None)]:
        lasted = min(when, until) - at
        if lasted > 0 and servers:
            yield lasted, EngineMoment(servers=list(servers.values()), observed=now, did=dict(did))
        at = max(at, min(when, until))
        if isinstance(event, Doing):
            servers[event.server] = event
        elif isinstance(event, RunningCount):
            now = event
        elif event is not None:
            did[event.kind] += 1 if kind == 2 else -1


def spent(
    doing: Iterable[Doing], observed: Iterable[RunningCount], played: Iterable[Bar], since: float, until: float
) -> dict[str, float]:
    """Seconds of all servers together by what they went to."""
    result: defaultdict[str, float] = defaultdict(float)
    for lasted, moment in moments(doing, observed, played, since, until):
        for cause, part in bubbles(moment).items():
            result[cause] += part * lasted
    return dict(result)


def part(
    doing: Sequence[Doing], observed: Sequence[RunningCount], played: Sequence[Bar], since: float, until: float
) -> LaneGroup:
    return LaneGroup(
        title="Engines",
        lanes=lanes(doing, since, until),
        spent=spent(doing, observed, played, since, until),
        rest="not begun yet",
        said="The higher a lane, the more of its slots had an answer on its way.",
        height=24,
    )


def lanes(doing: Iterable[Doing], since: float, until: float) -> list[Lane]:
    """One for each server: as high as it was full; other colours where it did not serve."""
    by_server: dict[str, list[Doing]] = {}
    for item in doing:
        by_server.setdefault(item.server, []).append(item)
    return [Lane(name, [*_states(steps, until), *_fill(steps, since, until)]) for name, steps in by_server.items()]


def _spans(steps: Sequence[Doing], until: float) -> Iterator[tuple[float, float, Doing]]:
    """From when until when it was so."""
    ends = [*(step.at for step in steps[1:]), max(until, steps[-1].at)]
    for step, end in zip(steps, ends, strict=True):
        yield step.at, end, step


def _states(steps: Sequence[Doing], until: float) -> Iterator[Bar]:
    bars: list[Bar] = []
    for begin, end, step in _spans(steps, until):
        kind = STATES.get(step.state, step.state)
        if step.state == "serving" or end <= begin:
            continue
        if bars and bars[-1].kind == kind and bars[-1].end == begin:
            begin = bars.pop().begin
        bars.append(Bar(kind, begin, end, step.server))
    yield from bars


def _fill(steps: Sequence[Doing], since: float, until: float) -> Iterator[Bar]:
    """Its answers, as the mean of each of `COLUMNS` pieces of the time."""
    width = (until - since) / COLUMNS
    if width <= 0:
        return
    used = [0.0] * COLUMNS  # seconds of slots, as parts of all slots
    for begin, end, step in _spans(steps, until):
        part = min(step.load, step.slots) / step.slots if step.state == "serving" and step.slots > 0 else 0.0
        first, last = (int((moment - since) / width) for moment in (max(begin, since), min(end, until)))
        for column in range(first, min(COLUMNS - 1, last) + 1) if part else ():
            left = since + column * width
            used[column] += part * max(0.0, min(end, left + width) - max(begin, left))
    slots = max(step.slots for step in steps)
    for column, seconds in enumerate(used):
        if seconds:
            full = min(1.0, seconds / width)
            begin = since + column * width
            yield Bar(ANSWERS, begin, begin + width, f"{steps[0].server}: {full * slots:.1f} of {slots} at once", full)
