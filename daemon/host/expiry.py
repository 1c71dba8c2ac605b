"""When the time of a sandbox is over. Pure: no I/O, no clock.

Guarantee: a sandbox in use is never over; the answer always says when to look again, never later than the moment at
which it could be over.

==========================  =====================================================================
seen                        then
==========================  =====================================================================
a call is under way         not over; look again soon (the call may end any moment)
older than `lifetime`       over: its lifetime has passed
unused for `idle_timeout`   over: it was not used
neither                     look again when the first of the two could be true
==========================  =====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

SOON = 1.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Life:
    """What is known of a sandbox. Times in seconds of one clock."""

    created: float
    used: float  # when the last call began or ended
    busy: bool  # a call, a terminal or a connection is open
    lifetime: float | None = None
    idle_timeout: float | None = None


@dataclass(frozen=True)
class ExpiryCheck:
    over: str | None  # why
    again: float | None  # seconds until it must be looked at again; None: never


def judge(life: Life, now: float) -> ExpiryCheck:
    """Whether its time is over. Example: ``judge(Life(created=0, used=5, busy=False, lifetime=10), 10).over``."""
    limits = [
        (life.created + life.lifetime, f"its lifetime of {life.lifetime:g} s has passed")
        if life.lifetime is not None
        else None,
        (max(life.created, life.used) + life.idle_timeout, f"it was not used for {life.idle_timeout:g} s")
        if life.idle_timeout is not None
        else None,
    ]
    existing = [limit for limit in limits if limit is not None]
    if not existing:
        return ExpiryCheck(None, None)
    if life.busy:
        return ExpiryCheck(None, SOON)
    for end, why in existing:
        if now >= end:
            return ExpiryCheck(why, None)
    return ExpiryCheck(None, max(min(end for end, _ in existing) - now, 0.0))
