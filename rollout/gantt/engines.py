"""How full a run's engine servers were, and why their slots were empty. Pure.

Owns: lanes of servers, bubbles by cause. Does not own: what servers noted (rollout.store.servers), decisions.

A slot without an answer waits for a trajectory. Of those that go on, the ones without a request explain as many empty
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
    trajectories.SAMPLES: "answers were held back (`pace`), or asked of other servers",
}
UNTOLD = "trajectories were elsewhere: between these, or not ended yet"
TURN, OTHERS = "the trainer had the turn", "another job had the turn on shared machines"
AHEAD = "the rollout was as far ahead as staleness allows"
AT_CONCURRENCY, BEGIN = "no more trajectories may go on at once (`concurrency`)", "trajectories were about to begin"
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
    return TURN if bound == 0 and not view.asked else AHEAD


def of_decisions(logged: Iterable[tuple[SchedulingRules, Decision]]) -> list[RunningCount]:
    return [
        RunningCount(
            each.now,
            sum(member.state == "running" for group in each.view.running for member in group.members),
            why(rules, each.view),
        )
        for rules, each in logged
    ]


class EngineMoment(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one moment. `did`: so many of the trajectories whose records are there were in that; also
    whether the rollout waited for its turn."""

    servers: Sequence[Doing]
    seen: RunningCount
    did: Mapping[str, int]


def bubbles(moment: EngineMoment) -> dict[str, float]:
    """Of the servers' time at this moment, in servers, what it went to. Example: {"answers": 0.5}"""
    found: defaultdict[str, float] = defaultdict(float)
    idle = empty = 0.0  # servers, slots
    for each in moment.servers:
        if each.state != "serving":
            found[STATES.get(each.state, each.state)] += 1
        elif each.slots <= 0:
            found[USERS] += 1
        else:
            busy = min(each.load, each.slots)
            found[ANSWERS] += busy / each.slots
            idle += 1 - busy / each.slots
            empty += each.slots - busy
    if empty:
        for cause, slots in _causes(moment, empty).items():
            found[cause] += idle * slots / empty
    return {cause: part for cause, part in found.items() if part > 0}


def _causes(moment: EngineMoment, empty: float) -> dict[str, float]:
    """Empty slots by why they are."""
    asked = sum(each.load for each in moment.servers)
    away = min(empty, max(0, moment.seen.running - asked))
    did = {IN[kind]: count for kind, count in moment.did.items() if kind in IN}
    did[IN[trajectories.SAMPLES]] = max(0, moment.did.get(trajectories.SAMPLES, 0) - asked)
    known = sum(did.values())
    told = min(away, known)
    found = {cause: told * count / known for cause, count in did.items() if count}
    return found | {UNTOLD: away - told, OTHERS if moment.did.get(roles.TURN) else moment.seen.why: empty - away}


def moments(
    doing: Iterable[Doing], seen: Iterable[RunningCount], played: Iterable[Bar], since: float, until: float
) -> Iterator[tuple[float, EngineMoment]]:
    """From the first word of a server on: how many seconds each lasted."""
    events: list[tuple[float, int, Doing | RunningCount | Bar]] = [(each.at, 0, each) for each in doing]
    events += [(each.at, 1, each) for each in seen]
    for bar in played:
        events += [(bar.begin, 2, bar), (bar.end, 3, bar)]
    servers: dict[str, Doing] = {}
    now, did, at = RunningCount(0.0, 0, UNDECIDED), Counter[str](), since
    for when, kind, event in [*sorted(events, key=lambda each: each[:2]), (until, 0, None)]:
        lasted = min(when, until) - at
        if lasted > 0 and servers:
            yield lasted, EngineMoment(servers=list(servers.values()), seen=now, did=dict(did))
        at = max(at, min(when, until))
        if isinstance(event, Doing):
            servers[event.server] = event
        elif isinstance(event, RunningCount):
            now = event
        elif event is not None:
            did[event.kind] += 1 if kind == 2 else -1


def spent(
    doing: Iterable[Doing], seen: Iterable[RunningCount], played: Iterable[Bar], since: float, until: float
) -> dict[str, float]:
    """Seconds of all servers together by what they went to."""
    found: defaultdict[str, float] = defaultdict(float)
    for lasted, moment in moments(doing, seen, played, since, until):
        for cause, part in bubbles(moment).items():
            found[cause] += part * lasted
    return dict(found)


def part(
    doing: Sequence[Doing], seen: Sequence[RunningCount], played: Sequence[Bar], since: float, until: float
) -> LaneGroup:
    return LaneGroup(
        title="Engines",
        lanes=lanes(doing, since, until),
        spent=spent(doing, seen, played, since, until),
        rest="not begun yet",
        said="The higher a lane, the more of its slots had an answer on its way.",
        height=24,
    )


def lanes(doing: Iterable[Doing], since: float, until: float) -> list[Lane]:
    """One for each server: as high as it was full; other colours where it did not serve."""
    by_server: dict[str, list[Doing]] = {}
    for each in doing:
        by_server.setdefault(each.server, []).append(each)
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
