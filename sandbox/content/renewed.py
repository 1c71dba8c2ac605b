"""Raw process images of one checkpoint made into those of the next one, in place.

A page that stays where it was is not touched, so that most of a large memory costs nothing. Guarantee: afterwards each
page has the hash that was requested, if the directory held what `Former` says, or :class:`Lacking` was raised before
anything was changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sandbox.content import dumpfile
from sandbox.content.dumpfile import HashedImages
from sandbox.content.page_hashes import HASH, PAGE
from sandbox.errors import Conflict

ZERO_HASH = bytes(HASH)


class Lacking(Conflict):
    """There are pages that neither came nor are here."""


@dataclass(frozen=True)
class Former:
    """A directory of raw images, and what its pages hash to. Its owner gives it away."""

    directory: Path
    hashed: HashedImages

    @classmethod
    def at(cls, directory: Path) -> Former:
        """Blocks."""
        return cls(directory, dumpfile.hashed(directory))

    def become(self, images: Mapping[str, bytes], pages: Mapping[str, np.ndarray], came: Mapping[bytes, bytes]) -> None:
        """Hold these images, and pages with these hashes [n, 32]; `came`: pages by their hash. Blocks."""
        writes = self._writes(pages, came)
        for entry in os.scandir(self.directory):
            if entry.name not in pages:
                os.unlink(entry.path)
        for name, content in images.items():
            (self.directory / name).write_bytes(content)
        for name, target in pages.items():
            fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, len(target) * PAGE)
                for place, data in writes[name]:
                    os.pwrite(fd, data, place * PAGE)
            finally:
                os.close(fd)

    def _writes(
        self, pages: Mapping[str, np.ndarray], came: Mapping[bytes, bytes]
    ) -> dict[str, list[tuple[int, bytes]]]:
        """What is to be written where, all read before anything is overwritten."""
        existing: dict[bytes, bytes | memoryview] = {ZERO_HASH: bytes(PAGE), **came}
        writes: dict[str, list[tuple[int, bytes]]] = {}
        searched = False
        for name, target in pages.items():
            parts = [part.hashes for part in self.hashed.pages.get(name, ())]
            before = np.concatenate([np.zeros((0, HASH), np.uint8), *parts])
            both = min(len(before), len(target))
            changed = np.ones(len(target), dtype=bool)
            changed[:both] = (before[:both] != target[:both]).any(axis=1)
            places = np.flatnonzero(changed).tolist()
            result = [target[place].tobytes() for place in places]
            if not searched and not existing.keys() >= set(result):
                existing, searched = {**self._index(), **existing}, True
            if missing := len(set(result) - existing.keys()):
                raise Lacking(f"{missing} memory pages neither came nor are here", hint="export it again in full")
            writes[name] = [(place, bytes(existing[item])) for place, item in zip(places, result, strict=True)]
        return writes

    def _index(self) -> dict[bytes, memoryview]:
        """All its pages, by hash."""
        return {
            part.hashes[place].tobytes(): part.data[place * PAGE : (place + 1) * PAGE]
            for parts in self.hashed.pages.values()
            for part in parts
            for place in np.flatnonzero(part.filled).tolist()
        }
