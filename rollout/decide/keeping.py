"""Which finished trajectories keep their sandboxes' checkpoints, to be visited later. Pure.

Guarantee: the newest stay; what goes is what is over the number or the disk that the plan allows, oldest first. What a
group still needs to branch from never goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec

from rollout.decide.ranges import Count, Natural

MEGABYTE = 1_000_000


class KeepPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``[visit]`` of a run. Example: ``KeepPlan(trajectories=200, disk_mb=20_000)``"""

    trajectories: Natural = 0  # the newest scored ones; 0: none
    disk_mb: Count = 2000  # for their own checkpoints
    days: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 7.0  # until the daemon removes one, after its last use


class RetainedRow(msgspec.Struct, frozen=True, array_like=True):
    """One kept trajectory."""

    prompt: str
    member: int
    start: int
    sandbox: str  # holds the checkpoints; nothing runs in it
    at: float  # when it ended
    bytes: int  # of its own checkpoints


def surplus(rows: Sequence[RetainedRow], plan: KeepPlan, needed: Collection[str]) -> list[RetainedRow]:
    """What goes now. `needed`: prompts whose groups are on their way."""
    stays, used, gone = 0, 0, []
    for row in sorted(rows, key=lambda row: (-row.at, row.prompt, row.member)):
        if row.prompt in needed:
            continue
        if stays < plan.trajectories and used + row.bytes <= plan.disk_mb * MEGABYTE:
            stays, used = stays + 1, used + row.bytes
        else:
            gone.append(row)
    return gone
