"""Raw images of one checkpoint become those of the next one in place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from sandbox.content import dumpfile
from sandbox.content.page_hashes import HASH, PAGE, hash_pages
from sandbox.content.renewed import Former, Lacking

A, B, C, D = (bytes([number]) * PAGE for number in range(1, 5))
ZERO = bytes(PAGE)


def listed(*pages: bytes) -> np.ndarray:
    rows = [blake3(page).digest() if any(page) else bytes(HASH) for page in pages]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, HASH)


def former(directory: Path) -> Former:
    directory.mkdir()
    (directory / "pages-1.img").write_bytes(A + ZERO + B + C)
    (directory / "pages-2.img").write_bytes(D)
    (directory / "core-1.img").write_bytes(b"before")
    (directory / "dump.log").write_bytes(b"words")
    return Former.at(directory)


def test_pages_stay_move_come_and_go(tmp_path: Path) -> None:
    new = os.urandom(PAGE)
    target = {"pages-1.img": listed(A, D, C, B, ZERO, new), "pages-3.img": listed(B)}
    made = former(tmp_path / "images")
    made.become({"core-1.img": b"after"}, target, {blake3(new).digest(): new})
    result = {path.name: path.read_bytes() for path in made.directory.iterdir()}
    assert result == {"core-1.img": b"after", "pages-1.img": A + D + C + B + ZERO + new, "pages-3.img": B}


def test_what_lacks_a_page_changes_nothing(tmp_path: Path) -> None:
    made = former(tmp_path / "images")
    with pytest.raises(Lacking):
        made.become({}, {"pages-1.img": listed(os.urandom(PAGE))}, {})
    assert (made.directory / "pages-1.img").read_bytes() == A + ZERO + B + C


@pytest.mark.parametrize("now", [A + ZERO + B + C, A + B + ZERO + D, A, A + ZERO + B + C + D, ZERO])
def test_hashes_by_comparison_are_the_hashes(now: bytes) -> None:
    by_comparison, alone = hash_pages(now, hash_pages(A + ZERO + B + C)), hash_pages(now)
    assert (by_comparison.hashes == alone.hashes).all() and (by_comparison.filled == alone.filled).all()


def test_a_directory_is_hashed_like_the_former_one_of_its_sandbox(tmp_path: Path) -> None:
    before = former(tmp_path / "before").hashed
    after = tmp_path / "after"
    after.mkdir()
    (after / "pages-1.img").write_bytes(A + D)
    (after / "pages-9.img").write_bytes(B)
    pairs = zip(dumpfile.hashed(after, before).pages.items(), dumpfile.hashed(after).pages.items(), strict=True)
    for (name, parts), (same, others) in pairs:
        assert name == same and all(
            (one.hashes == other.hashes).all() for one, other in zip(parts, others, strict=True)
        )
