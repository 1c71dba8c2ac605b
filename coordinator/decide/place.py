"""Where a sandbox goes: the hosts that can take it, the best first.

What a host must have (it answers, is not being drained, carries the requested labels, holds the image) decides
whether it can. Among those, the order is by cost: how pressed a host is, how many sandboxes it has for its processors,
and whether the content is there already. Content that is not costs as much as a certain pressure, so a host that holds
it is left only when it is much busier than another.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sandbox.messages.cluster import SOLE

AWAY = 0.35  # what it costs that the content must be fetched first
DENSE = 16.0  # sandboxes for each processor that count as much as a busy host
FULL = 0.97  # part of the memory or the disk in use from which a host takes no more
REPORTED = 5  # hosts named for each reason


@dataclass(frozen=True)
class HostView:
    """One host, as the decision sees it."""

    name: str
    cpus: float
    memory_bytes: float
    memory_free: float
    disk_bytes: float = 1.0
    disk_free: float = 1.0
    load: float = 0.0
    sandboxes: int = 0  # there now
    coming: int = 0  # on their way there, which no report counts yet
    labels: Mapping[str, str] = field(default_factory=dict)
    images: Collection[str] = frozenset()  # names
    alive: bool = True
    silent: float = 0.0  # seconds since its last report, of one that does not answer
    doubted: bool = False  # it has been silent for a while: it may be lost
    draining: bool = False


@dataclass(frozen=True)
class PlacementRequest:
    """What is to be placed. `holders`: hosts with the content (a checkpoint) that it continues from."""

    images: frozenset[str] = frozenset()  # names that its image goes by; none: it continues from a checkpoint
    labels: Mapping[str, str] = field(default_factory=dict)
    holders: frozenset[str] = frozenset()
    movable: bool = False  # whether the content can be fetched where it is not
    memory: float = 0.0  # bytes that it will probably use


def required(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that a host must have for a sandbox with these.

    >>> required({"on.zone": "a", "task": "7"})
    {'zone': 'a'}
    """
    return {name.removeprefix(SOLE): value for name, value in labels.items() if name.startswith(SOLE)}


def refusal(host: HostView, target: PlacementRequest) -> str:
    """Why `host` cannot take it; "": it can."""
    if not host.alive:
        return "does not answer"
    if host.draining:
        return "is being drained"
    if any(host.labels.get(name) != value for name, value in required(target.labels).items()):
        return "has other labels"
    if target.images and target.images.isdisjoint(host.images):
        return "does not have the image"
    if target.holders and not target.movable and host.name not in target.holders:
        return "does not have the checkpoint"
    if host.memory_free - target.memory < (1 - FULL) * host.memory_bytes:
        return "has no memory left"
    if host.disk_free < (1 - FULL) * host.disk_bytes:
        return "has no disk left"
    return ""


def cost(host: HostView, target: PlacementRequest) -> float:
    """Lower is better. Only the order counts."""
    pressed = max(
        host.load / (host.load + host.cpus),
        1 - (host.memory_free - target.memory) / host.memory_bytes,
        1 - host.disk_free / host.disk_bytes,
    )
    density = (host.sandboxes + 4 * host.coming) / host.cpus / DENSE
    away = AWAY if target.holders and host.name not in target.holders else 0.0
    return pressed + density + away


def ranked(hosts: Iterable[HostView], target: PlacementRequest) -> list[str]:
    """The hosts that can take it, the best first. Equal ones in the order of their names."""
    able = [host for host in hosts if not refusal(host, target)]
    return [host.name for host in sorted(able, key=lambda host: (cost(host, target), host.name))]


def refusals(hosts: Iterable[HostView], target: PlacementRequest) -> str:
    """Why none can, for people: each reason with the hosts that have it."""
    reasons: dict[str, list[str]] = {}
    for host in hosts:
        if why := refusal(host, target):
            reasons.setdefault(why, []).append(host.name)
    reported = [f"{', '.join(sorted(names)[:REPORTED])} {why}" for why, names in reasons.items()]
    return "; ".join(reported) or "there is no host"


def spread(hosts: Iterable[HostView], target: PlacementRequest, count: int) -> dict[str, int]:
    """How many of `count` equal sandboxes each host gets: one after another, each where it is cheapest then."""
    able = {host.name: host for host in hosts if not refusal(host, target)}
    shares: dict[str, int] = {}
    heap = [(cost(host, target), name) for name, host in able.items()]
    heapq.heapify(heap)
    for _ in range(count if heap else 0):
        _, name = heapq.heappop(heap)
        shares[name] = shares.get(name, 0) + 1
        able[name] = replace(able[name], coming=able[name].coming + 1)
        heapq.heappush(heap, (cost(able[name], target), name))
    return shares
