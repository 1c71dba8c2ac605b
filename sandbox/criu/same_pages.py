"""Which memory pages are the same bytes in two image directories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sandbox.criu import rpc
from sandbox.criu.carried.memory import PARENT, PRESENT

PAGE = 4096
COMPARED = 1024  # pages at a time


def result(before: Path, after: Path) -> dict[str, set[int]]:
    """Addresses of pages that are the same in both, by pagemap."""
    pages: dict[str, set[int]] = {}
    for path in before.glob("pagemap-*.img"):
        (one, ones), (other, others) = (listed(item, path.name) for item in (before, after))
        both, here, there = np.intersect1d(one, other, return_indices=True)
        same = np.zeros(len(both), dtype=bool)
        for first in range(0, len(both), COMPARED):
            part = slice(first, first + COMPARED)
            same[part] = (ones[here[part]] == others[there[part]]).all(axis=1)
        pages[path.name] = set(both[same].tolist())
    return pages


def runs(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Address and number of the pages of each record of a pagemap. One whose pages are in no file has none, whatever it
    says: an image from elsewhere may say 2^35."""
    for entry in entries[1:]:
        flags = entry.get("flags", PRESENT)
        if flags & PRESENT and not (flags & PARENT or entry.get("in_parent")):
            yield entry["vaddr"], entry.get("nr_pages") or entry.get("compat_nr_pages", 0)


def listed(directory: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Addresses [n] of the pages that a pagemap lists, and their content [n, 512] uint64."""
    entries = rpc.load(directory / name) if (directory / name).exists() else []
    starts = [start + PAGE * np.arange(count, dtype=np.uint64) for start, count in runs(entries)]
    addresses = np.concatenate([np.zeros(0, np.uint64), *starts])
    if not len(addresses):
        return addresses, np.zeros((0, PAGE // 8), np.uint64)
    words = np.memmap(directory / f"pages-{entries[0]['pages_id']}.img", dtype=np.uint64, mode="r")
    return addresses, words[: len(addresses) * PAGE // 8].reshape(-1, PAGE // 8)
