"""Which bytes bring a reader to a version, and which versions a store must keep.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class VersionSizes:
    """A published version: what its changes and its whole image weigh, in bytes (None: there is none)."""

    version: int
    digest: str
    base: str | None
    step_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class Hop:
    digest: str
    kind: Literal["step", "complete"]


def route(existing: Sequence[VersionSizes], have: str | None, want: str) -> list[Hop] | None:
    """The cheapest way from `have` to `want`, both digests of manifests; None when there is none.

    Walks from `want` back along its bases: at each version one may begin with its whole image, or stand there already.
    """
    by_digest = {item.digest: item for item in existing}
    best: tuple[int, list[Hop]] | None = None
    steps: list[Hop] = []
    spent = 0
    at: str | None = want
    while at is not None:
        if at == have and (best is None or spent <= best[0]):
            return steps[::-1]
        here = by_digest.get(at)
        if here is None or len(steps) > len(existing):
            break
        if here.total_bytes is not None and (best is None or spent + here.total_bytes < best[0]):
            best = (spent + here.total_bytes, [*steps, Hop(at, "complete")])
        if here.step_bytes is None:
            break
        spent += here.step_bytes
        steps.append(Hop(at, "step"))
        at = here.base
    return best[1][::-1] if best is not None else None


def retained(existing: Sequence[VersionSizes], *, keep: int, leased: Collection[str] = ()) -> set[Hop]:
    """What a store must not remove: the last `keep` versions and the leased ones, each reachable from nothing, and the
    steps between what a reader is based on and the newest version.

    `leased` are digests of manifests that readers are based on or fetch.
    """
    by_digest = {item.digest: item for item in existing}
    ordered = sorted(existing, key=lambda item: item.version)
    needed: set[Hop] = set()
    for item in ordered[-keep:] if keep else []:
        needed |= _ways(by_digest, item.digest)
    for name in leased:
        needed |= _ways(by_digest, name)
    for name in {item.digest for item in ordered[-1:]}:
        needed |= set(_chain(by_digest, name, leased))
    return needed


def _ways(by_digest: dict[str, VersionSizes], want: str) -> set[Hop]:
    """The steps back to the nearest whole image, that image, and the version's own."""
    result: set[Hop] = set()
    at: str | None = want
    while at is not None and at in by_digest:
        here = by_digest[at]
        if here.step_bytes is not None and at == want:
            result.add(Hop(at, "step"))
        if here.total_bytes is not None:
            result.add(Hop(at, "complete"))
            break
        if here.step_bytes is None:
            break
        result.add(Hop(at, "step"))
        at = here.base
    return result


def _chain(by_digest: dict[str, VersionSizes], newest: str, leased: Collection[str]) -> list[Hop]:
    """Steps from the oldest version that a reader is based on to the newest, where they are all there."""
    steps: list[Hop] = []
    reach = 0
    at: str | None = newest
    while at is not None and at in by_digest and by_digest[at].step_bytes is not None:
        if at in leased:
            reach = len(steps)
        steps.append(Hop(at, "step"))
        at = by_digest[at].base
    if at in leased:
        reach = len(steps)
    return steps[:reach]
