"""When a run's processes were down, and when they waited for their turn on shared machines: by their stages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.gantt.drawing import Bar
from rollout.store import stages
from rollout.store.stages import RoleStage

DOWN, TURN = "is down, or starts", "waits for its turn on shared machines"
BEGINS = {stages.NOTICED: DOWN, stages.BEGUN: DOWN, stages.ASKS: TURN}
ENDS = {stages.READY: DOWN, stages.TURN: TURN}


def of_role(noted: Iterable[RoleStage], role: str) -> list[Bar]:
    """Of the process that a run has by this name. What has not ended is not told."""
    since: dict[str, float] = {}
    bars = []
    for each in noted:
        if each.role == role and each.stage in BEGINS:
            since.setdefault(BEGINS[each.stage], each.at)
        elif each.role == role and (kind := ENDS.get(each.stage)) in since:
            bars.append(Bar(kind, since.pop(kind), each.at, role))
    return bars


def above(bars: Iterable[Bar], others: Sequence[Bar]) -> list[Bar]:
    """Bars, but where others lie above them."""
    left = list(bars)
    for other in others:
        left = [
            Bar(bar.kind, begin, end, bar.who, bar.full)
            for bar in left
            for begin, end in ((bar.begin, min(bar.end, other.begin)), (max(bar.begin, other.end), bar.end))
            if begin < end
        ]
    return [*left, *others]
