"""How much one token may use: the decision, without I/O and without a clock.

Guarantee: what is admitted never exceeds a quota; a sandbox without a limit of its own counts as unlimited, so a token
with a quota on that resource cannot make one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from sandbox.container.cgroup import parse_bytes
from sandbox.messages import Limits
from sandbox.messages.tokens import TokenQuota as Quota

__all__ = ["Bucket", "Quota", "QuotaUsage", "burst", "excess", "take", "usage"]


class QuotaUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What the sandboxes of one owner may take by their limits. Infinity where one has no limit."""

    sandboxes: int = 0
    cpus: float = 0.0
    memory: float = 0.0
    disk: float = 0.0


def usage(limits: Iterable[Limits], inherited: int = 0) -> QuotaUsage:
    """What sandboxes with these limits count as. `inherited`: bytes that other sandboxes wrote and forks are based
    on."""
    count, cpus, memory, disk = 0, 0.0, 0.0, float(inherited)
    for item in limits:
        count += 1
        cpus += math.inf if item.cpus is None else item.cpus
        memory += math.inf if item.memory is None else parse_bytes(item.memory)
        disk += math.inf if item.disk is None else parse_bytes(item.disk)
    return QuotaUsage(sandboxes=count, cpus=cpus, memory=memory, disk=disk)


def excess(quota: Quota, used: QuotaUsage) -> str:
    """Which quota `used` exceeds, in words; "" when none."""
    for name in ("sandboxes", "cpus", "memory", "disk"):
        limit, value = getattr(quota, name), getattr(used, name)
        if limit is not None and value > limit:
            return f"{name}: {_said(value)} of {_said(limit)}"
    return ""


def _said(value: float) -> str:
    return "no limit" if math.isinf(value) else f"{value:g}"


class Bucket(msgspec.Struct, frozen=True):
    """A token bucket. `level` requests may be made at `at` (seconds)."""

    level: float
    at: float


def burst(rate: float) -> float:
    """Requests that may come at once after a pause: those of one second, one at least."""
    return max(1.0, rate)


def take(bucket: Bucket | None, rate: float, now: float) -> tuple[Bucket, float]:
    """One request at `now`: the bucket after it, and the seconds to wait first (0: it is admitted)."""
    if bucket is None:
        level = burst(rate)
    else:
        level = min(burst(rate), bucket.level + max(0.0, now - bucket.at) * rate)
    if level >= 1:
        return Bucket(level - 1, now), 0.0
    return Bucket(level, now), (1 - level) / rate
