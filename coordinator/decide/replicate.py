"""What is copied where, so that a sandbox outlives its host.

Two other hosts have copies of each sandbox, and the store where there is one. The newest durable checkpoint goes to one
of the two, in turn, since only the difference to the copy there travels; to another host when they are gone or are to
be emptied. When the host of the sandbox is lost, it continues at the one that has the newest copy, and the next copy
goes to the other, again as a difference. Of two sandboxes the one comes first whose answer waits for it, then what
waits longest. The first copy to a second host is whole. It waits until the sandbox has been at its host for a while and
both hosts have nothing else to copy: when a host was lost, others need the processors first. For the same reason the
state that a sandbox came with is not copied at once: who waits for an answer of it needs the next one. A host that does
not answer may return with the copies that it has, and is waited for likewise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from coordinator.decide import place
from coordinator.decide.place import HostView, PlacementRequest

STORE = "(store)"  # a holder of copies that is no host: no host may be called so
NEW = 15.0  # seconds for which a sandbox is new at a host
FRESH = 3.0  # seconds for which it has just come there
AWAY = 60.0  # seconds for which a host that does not answer may return with its copies
HOLDERS = 2  # hosts with copies of a sandbox
STREAMS = 8  # copies to the store at a time
LINKS = 64  # streams that make up a state in the store, at most
ROUNDS = 5  # copies of a sandbox that is about to move, at most, while it runs
SHORT = 0.1  # seconds of a copy after which the rest is small enough to be waited for
GAIN = 0.7  # part of the time of the copy before that the next one must have taken to be worth another


@dataclass(frozen=True)
class ReplicaCopy:
    """A copy. `old`: older than what the sandbox reported; only the next copy builds upon it."""

    checkpoint: str
    holder: str
    old: bool = False


@dataclass(frozen=True)
class Subject:
    """A sandbox to be copied to another host, or to the store."""

    sandbox: str
    host: str  # where it runs
    durable: str  # its newest durable checkpoint there
    images: frozenset[str]
    retained: tuple[ReplicaCopy, ...] = ()  # the newest first
    waited: bool = False  # an answer waits for it
    since: float = 0.0  # when the copy became older than the sandbox
    store: bool = False  # the store is where it goes
    new: bool = False  # it came to its host a moment ago
    fresh: bool = False  # just now

    @property
    def copied(self) -> bool:
        """Whether there is a copy of the newest checkpoint."""
        return any(item.checkpoint == self.durable and not item.old for item in self.retained)


@dataclass(frozen=True)
class CopyAction:
    """Copy this checkpoint. `base`: one that both hosts have; "": the target reports none."""

    sandbox: str
    checkpoint: str
    source: str
    target: str
    base: str = ""


def decide(
    hosts: Iterable[HostView], subjects: Iterable[Subject], busy: Mapping[str, int], limit: int
) -> list[CopyAction]:
    """What to begin now. `busy`: copies under way at each host, of which it may have `limit`."""
    views = {host.name: host for host in hosts}
    left = {name: limit - busy.get(name, 0) for name in views} | {STORE: STREAMS - busy.get(STORE, 0)}
    begun = []
    every = list(subjects)
    for holder, count in Counter(item.holder for subject in every for item in subject.retained).items():
        if holder in views:
            views[holder] = _with_more(views[holder], count)
    usable = {name for name, host in views.items() if not host.draining and (host.alive or host.silent < AWAY)}
    lacking = [item for item in every if not item.copied or _wants_second(item, usable)]
    lacking.sort(key=lambda item: (item.copied, not item.waited, item.since, item.store, item.sandbox))
    for subject in lacking:
        source = views.get(subject.host)
        if not subject.durable or source is None or not source.alive or source.doubted or left[subject.host] <= 0:
            continue
        if subject.fresh and not subject.waited:
            continue
        target = _target(views, subject, left, limit)
        if target is None:
            continue
        base = next((item.checkpoint for item in subject.retained if item.holder == target and not item.old), "")
        begun.append(CopyAction(subject.sandbox, subject.durable, subject.host, target, base))
        left[subject.host] -= 1
        left[target] -= 1
        if target in views and not any(item.holder == target for item in subject.retained):
            views[target] = _with_more(views[target], 1)
    return begun


def _wants_second(subject: Subject, usable: Set[str]) -> bool:
    """Of one whose newest state is copied: whether another host should have a copy as well."""
    return not subject.store and not subject.new and sum(item.holder in usable for item in subject.retained) < HOLDERS


def _target(views: Mapping[str, HostView], subject: Subject, left: Mapping[str, int], limit: int) -> str | None:
    """The holder whose copy is the oldest, of those that have room for a stream; where there is none, another host.

    A holder that may be lost gets nothing until that is known: answers would wait for it.
    """
    if subject.store:
        return STORE if left[STORE] > 0 else None
    target = PlacementRequest(images=subject.images)
    holders = [item.holder for item in subject.retained if item.holder in views and item.holder != subject.host]
    holders = [name for name in holders if not place.refusal(views[name], target)]
    others = [host for name, host in views.items() if name not in (subject.host, *holders) and not host.doubted]
    if subject.copied:  # a second one
        idle = [host for host in others if left[host.name] == left[subject.host] == limit]
        return next(iter(place.ranked(idle, target)), None) if len(holders) < HOLDERS else None
    if holders:
        return next((name for name in reversed(holders) if left[name] > 0 and not views[name].doubted), None)
    return next(iter(place.ranked([host for host in others if left[host.name] > 0], target)), None)


def _with_more(host: HostView, copies: int) -> HostView:
    """A copy may become a sandbox there."""
    return replace(host, sandboxes=host.sandboxes + copies)


def again(took: Sequence[float]) -> bool:
    """Whether a sandbox that is about to move is copied once more while it runs. `took`: seconds of each copy."""
    if not took:
        return True
    shrinks = len(took) == 1 or took[-1] < GAIN * took[-2]
    return len(took) < ROUNDS and took[-1] > SHORT and shrinks


def join(sizes: Sequence[int]) -> bool:
    """Whether the streams that make up a state in the store become one. `sizes`: theirs, the whole one first."""
    return len(sizes) > LINKS or sum(sizes[1:]) > sum(sizes[:1])
