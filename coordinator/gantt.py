"""The page of machines that jobs take turns on: a lane for each, coloured by job, and why it stood still. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from rollout.gantt.drawing import Bar, Lane, LaneGroup, page, spent
from sandbox.messages.cluster import PastPhase, PhaseKind

NOBODY = "no request"
RETAINED = "kept for a job that does not ask yet"
OTHER = "the requesting job needs another machine too, which is busy"
SILENT = "its job was silent"
COLOURS = {NOBODY: "#e2e2e2", RETAINED: "#f0c8a0", OTHER: "#d8c6e8", SILENT: "#e8a9a7"}
NAMES: dict[PhaseKind, str] = {"rollout": "rollout machine", "train": "training machine"}


class GroupMoment(msgspec.Struct, frozen=True, kw_only=True):
    """Phases of one group, of machines of one kind. `there`: some job of the group is."""

    works: Collection[PastPhase] = ()
    silent: Collection[PastPhase] = ()
    waits: Collection[PastPhase] = ()
    there: bool = True


def doing(machine: int, moment: GroupMoment) -> str:
    """For which job it works, or why for none. Empty: no job is there."""
    for phase in moment.works:
        if machine in phase.machines:
            return phase.job
    if any(machine in phase.machines for phase in moment.silent):
        return SILENT
    requested = [set(phase.machines) for phase in moment.waits if machine in phase.machines]
    if not requested:
        return NOBODY if moment.there else ""
    busy = {other for phase in moment.works for other in phase.machines}
    return OTHER if any(machines & busy for machines in requested) else RETAINED


def chart(phases: Iterable[PastPhase], now: float, seconds: float) -> str:
    """HTML of the newest `seconds`."""
    existing = list(phases)
    until = max((now if item.ended is None else item.ended for item in existing), default=now)
    since = max(until - seconds, min((item.requested for item in existing), default=until))
    parts = [
        _part(group, kind, [item for item in existing if item.group == group], since, until)
        for group in sorted({item.group for item in existing})
        for kind in NAMES
    ]
    return page("Machines that jobs take turns on", parts, since, until, COLOURS)


def _part(group: int, kind: PhaseKind, phases: Sequence[PastPhase], since: float, until: float) -> LaneGroup:
    machines = sorted({machine for item in phases if item.kind == kind for machine in item.machines})
    lanes = {machine: list[Bar]() for machine in machines}
    for begin, end, moment in moments(phases, kind, until):
        for machine, bars in lanes.items():
            if end > since and (what := doing(machine, moment)):
                _append(bars, what, begin, end, f"{NAMES[kind]} {machine}")
    return LaneGroup(
        title=f"Group {group}: {NAMES[kind]}s",
        lanes=[Lane(f"{NAMES[kind]} {machine}", bars) for machine, bars in lanes.items()],
        spent=spent((bar for bars in lanes.values() for bar in bars), since, until),
        rest="no job was there",
        height=18,
    )


def _append(bars: list[Bar], kind: str, begin: float, end: float, who: str) -> None:
    if bars and bars[-1].kind == kind and bars[-1].end == begin:
        begin = bars.pop().begin
    bars.append(Bar(kind, begin, end, who))


def moments(phases: Iterable[PastPhase], kind: PhaseKind, until: float) -> Iterator[tuple[float, float, GroupMoment]]:
    """What went on of one group on machines of one kind, from change to change."""
    events: list[tuple[float, int, str, PastPhase]] = []

    def lasts(what: str, begin: float, end: float, phase: PastPhase) -> None:
        if begin < end:
            events.extend([(begin, 1, what, phase), (end, -1, what, phase)])

    for item in phases:
        ended = until if item.ended is None else item.ended
        lasts("there", item.requested, ended, item)
        if item.kind == kind and item.begun is None:
            lasts("waits", item.requested, until, item)
        elif item.kind == kind and item.begun is not None:
            last_seen = max(item.begun, ended - item.silent)
            lasts("waits", item.requested, item.begun, item)
            lasts("works", item.begun, last_seen, item)
            lasts("silent", last_seen, ended, item)
    now: dict[str, list[PastPhase]] = {"there": [], "waits": [], "works": [], "silent": []}
    at = 0.0
    for when, step, what, phase in sorted(events, key=lambda item: item[:2]):
        if when > at and any(now.values()):
            yield (
                at,
                when,
                GroupMoment(
                    works=tuple(now["works"]),
                    silent=tuple(now["silent"]),
                    waits=tuple(now["waits"]),
                    there=bool(now["there"]),
                ),
            )
        at = when
        if step > 0:
            now[what].append(phase)
        else:
            now[what].remove(phase)
