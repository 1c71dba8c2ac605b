"""How many processes the sandboxes of a host may have together, and how much memory checkpoints may hold: the decision.

Without I/O.

All sandboxes together never have more processes and threads than the budget: the kernel holds that. So that a few of
them cannot take all of it from the others, what one may have beyond SMALL is reserved for it when it is made, and half
of the budget can be reserved. The other half is for the small ones, which are many and rarely full.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sandbox.container.cgroup import parse_bytes
from sandbox.messages import Limits

SMALL = 256  # tasks; what Limits gives who says nothing
UNSAID = 1024  # tasks of a sandbox that asks for no limit


def bounded(limits: Limits) -> Limits:
    """These limits, with a number of processes.

    >>> bounded(Limits(processes=None)).processes
    1024
    """
    return limits if limits.processes is not None else msgspec.structs.replace(limits, processes=UNSAID)


def reserved(limits: Limits) -> int:
    """Tasks that are reserved for a sandbox with these limits."""
    return max(0, (bounded(limits).processes or 0) - SMALL)


def overfull(limits: Limits, mine: int, owners: int, capacity: int) -> str:
    """Why a sandbox may not put more memory into checkpoints, in words; "" when it may.

    `mine`: bytes that its checkpoints hold, `owners`: those of all sandboxes of its owner, `capacity`: bytes that the
    disk
    has for all checkpoints of the host, the taken ones included. No owner takes more than half of that room from
    others.

    >>> overfull(Limits(checkpoints="1GiB"), 2 << 30, 2 << 30, 100 << 30)
    'its checkpoints hold 2048 MiB of memory, and its limit is 1024 MiB'
    """
    if limits.checkpoints is not None and mine >= (limit := parse_bytes(limits.checkpoints)):
        return f"its checkpoints hold {mine >> 20} MiB of memory, and its limit is {limit >> 20} MiB"
    if owners > capacity // 2:
        return f"checkpoints of this owner hold {owners >> 20} MiB of memory, half of what the host's disk has for all"
    return ""


def crowds(held: int, target: int, capacity: int) -> bool:
    """Whether a capture of `target` bytes has to wait until others of its owner, `held` bytes, are stored.

    `capacity`: bytes of the memory for captures. No owner takes more than half of it from others, but for a single
    capture.
    """
    return held > 0 and held + target > capacity // 2


def excess(target: Limits, others: Iterable[Limits], budget: int) -> str:
    """Why a sandbox with the limits `target` has no room next to `others`, in words; "" when it has."""
    taken = sum(map(reserved, others))
    if reserved(target) == 0 or taken + reserved(target) <= budget // 2:
        return ""
    return (
        f"{bounded(target).processes} processes are too many: sandboxes with more than {SMALL} have {taken} reserved "
        f"of {budget // 2}, which is half of what this host has for all"
    )
