"""Leases of hosts: until when a host may act, and when others may act for it.

A host's lease ends at a moment of its own clock. The coordinator asks a host for a report; the report carries the
host's clock, and the next request grants a lease up to that clock plus the time to live. So a request that lingers in
the network extends nothing: what it grants was counted from before it was sent.

What the host's clock shows now is bounded from below by each report: it shows at least what it showed when it was read,
and the least that may have passed since the report came (Marzullo's algorithm uses such bounds). The best of these
bounds counts, as a rule that of a report that travelled fast, so a slow one does not delay what follows the end of a
lease. A host's own lease is always over before the coordinator believes it is, however long messages travel; `DRIFT`
is for clocks that run at different speeds. A bound that the next report contradicts is dropped: the host was started
again, or was frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

DRIFT = 0.005  # by which clocks may differ over a time: ten times what a kernel slews its clock by, at most


@dataclass(frozen=True)
class HostLease:
    """What the coordinator knows of one host's lease. Times are the coordinator's, but for `clock`."""

    ttl: float
    last_seen_at: float | None = None  # when the last report came
    ends_at: float | None = None  # when the host's lease is surely over; None: it never had one
    refused: bool = False  # since its last report a request did not reach it, and nothing listens there
    clock: float = -inf  # what the host's clock showed at `last_seen_at`, at least


def last_seen(lease: HostLease, now: float, *, requested_at: float, clock: float) -> HostLease:
    """A report came, which was requested at `requested_at`. `clock` is the host's, of some moment between."""
    minimum = clock
    if lease.last_seen_at is not None:
        existing = lease.clock + (now - lease.last_seen_at) / (1 + DRIFT)
        if existing <= clock + (now - requested_at) * (1 + DRIFT):
            minimum = max(clock, existing)
    return HostLease(lease.ttl, now, lease.ends_at, clock=minimum)


def requested(lease: HostLease, *, clock: float) -> tuple[HostLease, float | None]:
    """(the lease, what to grant) as the next request goes out. `clock` is the host's, of its last report.

    From now on the host may have the grant, whether its answer comes or not.
    """
    if lease.last_seen_at is None:
        return lease, None
    until = clock + lease.ttl
    ends = lease.last_seen_at + (until - lease.clock) * (1 + DRIFT)
    return replace(lease, ends_at=max(lease.ends_at or lease.last_seen_at, ends)), until


def refused(lease: HostLease, before: HostLease) -> HostLease:
    """The request did not go out, for nothing listens there: its grant is none. `before`: as it was before the request.

    So of a host whose daemon is dead the lease is known to end when it ends, and not a request later.
    """
    return replace(lease, ends_at=before.ends_at, refused=True)


def unknown(lease: HostLease, now: float) -> HostLease:
    """A former coordinator may have granted a lease until just now: it is waited for."""
    return replace(lease, ends_at=now + lease.ttl * (1 + DRIFT))


def alive(lease: HostLease, now: float) -> bool:
    """Whether the host answered lately enough to be given work, and did not die since, with its lease."""
    dead = lease.refused and lease.ends_at is not None and now >= lease.ends_at
    return lease.last_seen_at is not None and now < lease.last_seen_at + lease.ttl and not dead


def doubted(lease: HostLease, now: float) -> bool:
    """Whether a host that has a lease has been silent for so long that others prepare to act for it."""
    if lease.ends_at is None or lease.last_seen_at is None:
        return False
    return lease.refused or now >= lease.last_seen_at + lease.ttl / 2


def over(lease: HostLease, now: float) -> bool:
    """Whether the host surely acts no more, so that others may act for it. One without a lease acts for ever."""
    return lease.ends_at is not None and now >= lease.ends_at and not alive(lease, now)
