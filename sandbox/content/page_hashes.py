"""The hashes of memory pages, before any of them is stored.

Guarantee: no disk and no lock is touched; a page of zeros has no hash.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from sandbox.errors import CheckpointFailed
from sandbox.libc import library

PAGE = 4096
HASH = 32  # bytes of a page's hash
COMPARED = 128  # pages that are compared at once


@dataclass(frozen=True)
class HashedPages:
    """Pages and their hashes: [n, 32] uint8, meaningless where `filled` [n] bool is false (zero pages).

    Of a `layer` they are the pages at `places` [n] of `data`, else all of it in order.
    """

    data: memoryview
    hashes: np.ndarray
    filled: np.ndarray
    places: np.ndarray | None = None
    layer: str = ""


def hash_pages(data: memoryview | bytes, like: HashedPages | None = None) -> HashedPages:
    """Hash the pages of `data` (a multiple of 4096 bytes). Touches no disk and no lock.

    Of pages that are the same at the same place in `like` the hash is taken from there: comparing is quicker. A `like`
    that is part of a layer is of no use: its hashes are not in the order of its data.
    """
    if like is not None and like.places is not None:
        like = None
    view = memoryview(data)
    if len(view) % PAGE:
        raise CheckpointFailed(f"page data of {len(view)} bytes is not a multiple of {PAGE}")
    count = len(view) // PAGE
    words = np.frombuffer(view, dtype=np.uint64).reshape(count, PAGE // 8)
    filled, hashes = np.zeros(count, dtype=bool), np.zeros((count, HASH), dtype=np.uint8)
    fresh = np.ones(count, dtype=bool)
    if like is not None:
        both = min(count, len(like.filled))
        fresh[:both] = _differ(words[:both], np.frombuffer(like.data, dtype=np.uint64).reshape(-1, PAGE // 8)[:both])
        same = np.flatnonzero(~fresh)
        filled[same], hashes[same] = like.filled[same], like.hashes[same]
    fresh = np.flatnonzero(fresh)
    filled[fresh] = words[fresh].any(axis=1) if len(fresh) < count else words.any(axis=1)
    fresh = fresh[filled[fresh]]
    if len(fresh):
        digests = [blake3(view[i * PAGE : (i + 1) * PAGE]).digest() for i in fresh.tolist()]
        hashes[fresh] = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, HASH)
    return HashedPages(view, hashes, filled)


def _differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Which rows of two arrays of pages differ, [n] bool: in parts, most of which are the same."""
    result = np.zeros(len(one), dtype=bool)
    for first in range(0, len(one), COMPARED):
        a, b = one[first : first + COMPARED], other[first : first + COMPARED]
        if library.memcmp(ctypes.c_void_p(a.ctypes.data), ctypes.c_void_p(b.ctypes.data), ctypes.c_size_t(a.nbytes)):
            result[first : first + COMPARED] = (a != b).any(axis=1)
    return result
