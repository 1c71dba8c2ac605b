"""`SavePartsReader`: loads a save whose shards are on another host, of which it fetches what this rank reads.

Guarantee: nothing that does not match its hash is loaded; two ranks of a host may fetch into the same files.

::

    plan: which bytes of which shard ─▶ fetch them ─▶ files with holes, at the same offsets ─▶ torch reads these files
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

PART = 32 << 20  # bytes of one request


class SavePartsReader(FileSystemReader):
    """``dcp.load(tensors, storage_reader=SavePartsReader(directory, client.part))``. Its metadata must be there."""

    def __init__(self, directory: Path, part: Callable[[str, int, int], bytes]):
        """`part`: bytes of a file of the save, from an offset on, so many."""
        super().__init__(directory)
        self._directory, self._part = directory, part

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        needed: dict[str, set[tuple[int, int]]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            needed.setdefault(place.relative_path, set()).add((place.offset, place.length))
        for name, places in needed.items():
            self._fetch(name, places)
        return super().read_data(plan, planner)

    def _fetch(self, name: str, places: set[tuple[int, int]]) -> None:
        file = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for offset, length in sorted(places):
                for at in range(offset, offset + length, PART):
                    os.pwrite(file, self._part(name, at, min(PART, offset + length - at)), at)
        finally:
            os.close(file)
