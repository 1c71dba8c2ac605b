"""When a run's processes were down, and when they waited for their turn on shared machines: by their stages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.gantt.drawing import Bar
from rollout.store import stages
from rollout.store.stages import RoleStage

DOWN, TURN = "is down, or starts", "waits for its turn on shared machines"
BEGINS = {stages.NOTICED: DOWN, stages.BEGUN: DOWN, stages.REQUESTS: TURN}
ENDS = {stages.READY: DOWN, stages.TURN: TURN}


def of_role(noted: Iterable[RoleStage], role: str) -> list[Bar]:
    """Of the process that a run has by this name. What has not ended is left out."""
    since: dict[str, float] = {}
    bars = []
    for item in noted:
        if item.role == role and item.stage in BEGINS:
            since.setdefault(BEGINS[item.stage], item.at)
        elif item.role == role and (kind := ENDS.get(item.stage)) in since:
            bars.append(Bar(kind, since.pop(kind), item.at, role))
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
