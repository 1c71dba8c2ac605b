"""Which memory pages are the same bytes in two image directories.

Owns: reading page maps and pages of both. Does not own: what a difference means (:mod:`sandbox.criu.equality`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sandbox.criu import rpc

PAGE = 4096
COMPARED = 1024  # pages at a time


def found(before: Path, after: Path) -> dict[str, set[int]]:
    """Addresses of pages that are the same in both, by pagemap."""
    pages: dict[str, set[int]] = {}
    for path in before.glob("pagemap-*.img"):
        (one, ones), (other, others) = (_listed(each, path.name) for each in (before, after))
        both, here, there = np.intersect1d(one, other, return_indices=True)
        same = np.zeros(len(both), dtype=bool)
        for first in range(0, len(both), COMPARED):
            part = slice(first, first + COMPARED)
            same[part] = (ones[here[part]] == others[there[part]]).all(axis=1)
        pages[path.name] = set(both[same].tolist())
    return pages


def _listed(directory: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Addresses [n] of the pages that a pagemap lists, and their content [n, 512] uint64."""
    entries = rpc.load(directory / name) if (directory / name).exists() else []
    counts = [entry.get("nr_pages") or entry.get("compat_nr_pages", 0) for entry in entries[1:]]
    starts = [
        entry["vaddr"] + PAGE * np.arange(n, dtype=np.uint64) for entry, n in zip(entries[1:], counts, strict=True)
    ]
    addresses = np.concatenate([np.zeros(0, np.uint64), *starts])
    if not len(addresses):
        return addresses, np.zeros((0, PAGE // 8), np.uint64)
    words = np.memmap(directory / f"pages-{entries[0]['pages_id']}.img", dtype=np.uint64, mode="r")
    return addresses, words[: len(addresses) * PAGE // 8].reshape(-1, PAGE // 8)
