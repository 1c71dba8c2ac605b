"""Which sandboxes move from one host to another, so that hosts have equal shares and those to be emptied become empty.

A host's share is its sandboxes for each processor. One moves when afterwards its host still has a larger share than the
other one, by a margin: so no move is ever undone by the next, and small differences stay. Those that were idle longest
move first, and to a host with a copy of them before another. A sandbox that is in use, that came a moment ago, or that
a move would cost something stays where it is. A host that is back gets some only after a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.decide import place
from coordinator.decide.place import HostView, PlacementRequest

AT_ONCE = 2  # moves that a host takes part in at a time
MARGIN = 0.1  # part of the mean share by which a host must still have more after a move; one sandbox at least
STEADY = 2.0  # seconds for which a host must have answered before it gets some
FINALIZED = 10.0  # seconds for which a sandbox must have been at its host
OFFERED = 64  # sandboxes of one host among which is chosen
LOOKED_AT = 8  # of the emptiest hosts, whether one should get some


@dataclass(frozen=True)
class MovableSandbox:
    """A sandbox that may move."""

    sandbox: str
    host: str
    images: frozenset[str]  # names that its image goes by
    idle: float  # seconds for which it was not used
    labels: Mapping[str, str] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()  # hosts with copies of it


@dataclass(frozen=True)
class Move:
    """Continue the sandbox at another host."""

    sandbox: str
    source: str
    target: str


def givers(hosts: Iterable[HostView], under_way: Iterable[Move], steady: Mapping[str, float]) -> list[str]:
    """Hosts from which one should move, if one can: those to be emptied, then those with the largest share."""
    views = _afterwards(hosts, under_way)
    return _givers(views, _takers(views, steady), _margin(views))


def offered(residents: Iterable[MovableSandbox]) -> list[MovableSandbox]:
    """Of each host those that were idle longest, among which :func:`decide` chooses."""
    result: list[MovableSandbox] = []
    counts: Counter[str] = Counter()
    for item in sorted(residents, key=lambda item: (-item.idle, item.sandbox)):
        counts[item.host] += 1
        if counts[item.host] <= OFFERED:
            result.append(item)
    return result


def decide(
    hosts: Sequence[HostView],
    residents: Sequence[MovableSandbox],
    under_way: Sequence[Move],
    steady: Mapping[str, float],
) -> list[Move]:
    """What to begin now. `steady`: seconds for which each host has answered without a break."""
    views = _afterwards(hosts, under_way)
    busy = Counter(name for move in under_way for name in (move.source, move.target))
    left = {item.sandbox: item for item in residents}
    begun: list[Move] = []
    while (move := _next(views, left, busy, steady)) is not None:
        begun.append(move)
        del left[move.sandbox]
        busy.update((move.source, move.target))
        views = _afterwards(views.values(), [move])
    return begun


def _next(
    views: Mapping[str, HostView],
    left: Mapping[str, MovableSandbox],
    busy: Mapping[str, int],
    steady: Mapping[str, float],
) -> Move | None:
    free = {name: host for name, host in views.items() if busy.get(name, 0) < AT_ONCE}
    takers, margin = _takers(free, steady), _margin(views)
    for name in _givers(free, takers, margin):
        mine = [item for item in left.values() if item.host == name]
        for target in takers:
            if not _gains(views[name], target, margin):
                continue
            able = [item for item in mine if not place.refusal(target, _target(item))]
            if able:
                chosen = min(able, key=lambda item: (target.name not in item.copies, -item.idle, item.sandbox))
                return Move(chosen.sandbox, name, target.name)
    return None


def _givers(views: Mapping[str, HostView], takers: Sequence[HostView], margin: float) -> list[str]:
    result = [host for host in views.values() if host.alive and host.sandboxes > 0]
    result = [host for host in result if any(_gains(host, taker, margin) for taker in takers[:LOOKED_AT])]
    return [host.name for host in sorted(result, key=lambda host: (not host.draining, -_share(host), host.name))]


def _takers(views: Mapping[str, HostView], steady: Mapping[str, float]) -> list[HostView]:
    """Hosts that may get some, the emptiest first."""
    able = [host for host in views.values() if not place.refusal(host, PlacementRequest())]
    able = [host for host in able if steady.get(host.name, 0.0) >= STEADY]
    return sorted(able, key=lambda host: (_share(host), host.name))


def _gains(source: HostView, target: HostView, margin: float) -> bool:
    """Whether a move from one to the other makes the cluster more even, or empties a host that is to be emptied."""
    if source.name == target.name:
        return False
    if source.draining:
        return True
    minimum = max(margin, 1 / max(source.cpus, target.cpus))
    return (source.sandboxes - 1) / source.cpus - (target.sandboxes + 1) / target.cpus >= minimum


def _margin(views: Mapping[str, HostView]) -> float:
    living = [host for host in views.values() if host.alive]
    return MARGIN * sum(host.sandboxes for host in living) / max(1.0, sum(host.cpus for host in living))


def _share(host: HostView) -> float:
    return host.sandboxes / host.cpus


def _target(resident: MovableSandbox) -> PlacementRequest:
    return PlacementRequest(images=resident.images, labels=resident.labels)


def _afterwards(hosts: Iterable[HostView], moves: Iterable[Move]) -> dict[str, HostView]:
    """The hosts as they are when these moves are over."""
    views = {host.name: host for host in hosts}
    for move in moves:
        for name, change in ((move.source, -1), (move.target, 1)):
            if name in views:
                views[name] = replace(views[name], sandboxes=views[name].sandboxes + change)
    return views
