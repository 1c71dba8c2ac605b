"""What is copied where, so that a sandbox outlives its host.

Each sandbox has one newest copy on another host, and one in the store where there is one. A newer durable checkpoint is
copied to the host that has the former copy, since only the difference travels then; to another one when that host is
gone or is being drained. Of two sandboxes the one comes first whose answer waits for it, then what waits longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.decide import place
from coordinator.decide.place import HostView, Wanted

STORE = "(store)"  # a holder of copies that is no host: no host may be called so
STREAMS = 8  # copies to the store at a time
LINKS = 64  # streams that make up a state in the store, at most
ROUNDS = 5  # copies of a sandbox that is about to move, at most, while it runs
SHORT = 0.1  # seconds of a copy after which the rest is small enough to be waited for
GAIN = 0.7  # part of the time of the copy before that the next one must have taken to be worth another


@dataclass(frozen=True)
class Subject:
    """A sandbox to be copied to another host, or to the store."""

    sandbox: str
    host: str  # where it runs
    durable: str  # its newest durable checkpoint there
    images: frozenset[str]
    copied: str = ""  # checkpoint of the newest copy
    holder: str = ""  # host of the newest copy
    waited: bool = False  # an answer waits for it
    since: float = 0.0  # when the copy became older than the sandbox
    store: bool = False  # the store is where it goes


@dataclass(frozen=True)
class Copy:
    """Copy this checkpoint. `base`: one that both hosts have; "": everything travels."""

    sandbox: str
    checkpoint: str
    source: str
    target: str
    base: str = ""


def decide(hosts: Iterable[HostView], subjects: Iterable[Subject], busy: Mapping[str, int], most: int) -> list[Copy]:
    """What to begin now. `busy`: copies under way at each host, of which it may have `most`."""
    views = {host.name: host for host in hosts}
    left = {name: most - busy.get(name, 0) for name in views} | {STORE: STREAMS - busy.get(STORE, 0)}
    begun = []
    for subject in sorted(subjects, key=lambda each: (not each.waited, each.since, each.store, each.sandbox)):
        source = views.get(subject.host)
        if not subject.durable or subject.durable == subject.copied or source is None or not source.alive:
            continue
        target = STORE if subject.store else _target(views, subject)
        if target is None or left[subject.host] <= 0 or left[target] <= 0:
            continue
        base = subject.copied if target == subject.holder else ""
        begun.append(Copy(subject.sandbox, subject.durable, subject.host, target, base))
        left[subject.host] -= 1
        left[target] -= 1
    return begun


def _target(views: Mapping[str, HostView], subject: Subject) -> str | None:
    wanted = Wanted(images=subject.images)
    holder = views.get(subject.holder)
    if holder is not None and holder.name != subject.host and not place.refusal(holder, wanted):
        return holder.name
    others = [host for name, host in views.items() if name != subject.host]
    return next(iter(place.ranked(others, wanted)), None)


def again(took: Sequence[float]) -> bool:
    """Whether a sandbox that is about to move is copied once more while it runs. `took`: seconds of each copy."""
    if not took:
        return True
    shrinks = len(took) == 1 or took[-1] < GAIN * took[-2]
    return len(took) < ROUNDS and took[-1] > SHORT and shrinks


def join(sizes: Sequence[int]) -> bool:
    """Whether the streams that make up a state in the store become one. `sizes`: theirs, the whole one first."""
    return len(sizes) > LINKS or sum(sizes[1:]) > sum(sizes[:1])
