"""Which sandboxes continue elsewhere when hosts are lost, and where.

A sandbox continues from the newest state of it that was copied, and from no older one: what it reported since would be
undone. It goes where that copy is, of two such hosts to the one that suits it better; if only the store has it, to the
host that suits it best. Where its restore began it stays, for it may run there; where that was prepared it goes, if
that host has the copy. Those come first for which a caller waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from coordinator.decide import place
from coordinator.decide.place import HostView, PlacementRequest
from coordinator.decide.replicate import STORE


@dataclass(frozen=True)
class CheckpointCopy:
    """A state of a sandbox, and who holds it."""

    checkpoint: str
    holder: str
    number: int = 0  # newer ones have larger ones


@dataclass(frozen=True)
class LostSandbox:
    """A sandbox whose host's lease is over."""

    sandbox: str
    host: str
    copies: Sequence[CheckpointCopy]
    home: str = ""  # where it belongs by what was decided before; "": where it was
    images: frozenset[str] = frozenset()
    waited: bool = False  # a caller waits for it
    prepared: str = ""  # the host where its coming was prepared


@dataclass(frozen=True)
class Revive:
    """Continue the sandbox from this checkpoint there. `stored`: it comes from the store."""

    sandbox: str
    checkpoint: str
    source: str
    target: str
    stored: bool = False


def decide(lost: Iterable[LostSandbox], hosts: Iterable[HostView], over: Set[str]) -> list[Revive]:
    """In this order. `over`: hosts that surely act no more. A copy on a host that does not answer waits for it."""
    views = {host.name: host for host in hosts}
    revived = []
    for item in sorted(lost, key=lambda item: (not item.waited, item.sandbox)):
        if item.host not in over or (item.host in views and views[item.host].alive):
            continue
        newest = max(item.copies, key=lambda copy: copy.number).checkpoint
        holders = [copy.holder for copy in item.copies if copy.checkpoint == newest]
        if (target := _target(item, holders, views, over)) is not None:
            views[target] = replace(views[target], coming=views[target].coming + 1)
            revived.append(Revive(item.sandbox, newest, item.host, target, stored=target not in holders))
    return revived


def _target(lost: LostSandbox, holders: Sequence[str], views: dict[str, HostView], over: Set[str]) -> str | None:
    able = [host for name, host in views.items() if host.alive and name != lost.host]
    if lost.home not in ("", lost.host) and lost.home not in over:
        able = [host for host in able if host.name == lost.home]
    if peers := [host for host in able if host.name in holders]:
        if any(host.name == lost.prepared for host in peers):
            return lost.prepared
        return min(
            peers, key=lambda host: (place.cost(host, PlacementRequest()), host.name)
        ).name  # it has nowhere else to go
    if STORE not in holders:
        return None
    return next(iter(place.ranked(able, PlacementRequest(images=lost.images))), None)
