"""The list of a checkpoint's pages, written as what changed in the list of one before.

Pure. Guarantee: what :func:`changed` returned for two lists, :func:`PageListDelta.over` makes the second of the first.
Where the first is another one, :func:`PageListDelta.need` raises Conflict; places that make no list raise Protocol,
before more memory is spent than for what came and what was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from sandbox.content.page_hashes import HASH
from sandbox.content.transfer import PageList
from sandbox.errors import Conflict, Protocol


def changed(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Places in `now` whose hash is not the one at this place in `before`, both [n, 32] uint8."""
    both = min(len(before), len(now))
    differ = np.ones(len(now), dtype=bool)
    differ[:both] = (before[:both] != now[:both]).any(axis=1)
    return np.flatnonzero(differ)


def digest(hashes: np.ndarray) -> bytes:
    """Of a list [n, 32] uint8."""
    return blake3(hashes.tobytes()).digest()


@dataclass(frozen=True)
class PageListDelta:
    """A list as its frames contain it: `hashes` [n, 32] uint8 at `places` [n] of its `count` pages, the rest as
    before."""

    count: int
    places: np.ndarray
    hashes: np.ndarray
    before: bytes | None  # hash of the list before; None: this is the whole one

    @classmethod
    def reported(cls, frames: Sequence[PageList]) -> PageListDelta:
        """Of all frames of one list. Raises Protocol."""
        hashes = np.frombuffer(b"".join(frame.hashes for frame in frames), np.uint8).reshape(-1, HASH)
        ((count, before), *others) = {(frame.count, frame.before) for frame in frames}
        if others:
            raise Protocol("a list of memory pages has two lengths, or follows two others")
        if count < 0:
            return cls(len(hashes), np.arange(len(hashes)), hashes, None)
        places = np.frombuffer(b"".join(frame.places for frame in frames), "<u4").astype(np.int64)
        return cls(count, places, hashes, before)

    def need(self, before: np.ndarray) -> None:
        """Raise Conflict unless these hashes are the list that it changes."""
        if self.before is not None and self.before != digest(before):
            raise Conflict("the checkpoint before has other memory pages here", hint="export this one in full")

    def over(self, before: np.ndarray, values: np.ndarray) -> np.ndarray:
        """`before` [n, ...] with `values` at the places. Raises Protocol where something is at no place, or missing."""
        retained = 0 if self.before is None else min(len(before), self.count)
        beyond = np.unique(self.places[self.places >= retained])
        if len(beyond) != self.count - retained or (len(beyond) and int(beyond[-1]) >= self.count):
            raise Protocol("a list of memory pages has gaps")
        made = np.zeros((self.count, *values.shape[1:]), dtype=values.dtype)
        made[:retained] = before[:retained]
        made[self.places] = values
        return made
