"""Hashes of dumps that are kept in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sandbox.content import dumpfile
from sandbox.content.lists import Lists
from sandbox.content.page_hashes import PAGE


def hashes(pages: int, value: int = 1) -> dict[str, np.ndarray]:
    return {"pages-1.img": np.full((pages, 32), value, np.uint8)}


def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    lists = Lists(limit=3 * 320)
    for name in "abc":
        lists.remember(name, hashes(10))
    assert lists.find("a") is not None
    lists.remember("d", hashes(10))
    assert lists.find("b") is None
    assert all(lists.find(name) is not None for name in "acd")
    lists.remember("d", hashes(20))
    assert lists.find("a") is None and lists.find("c") is not None and lists.find("d") is not None


def test_images_whose_hashes_are_known_are_as_if_they_were_hashed(tmp_path: Path) -> None:
    pages = [bytes([number]) * PAGE for number in (1, 0, 2)]
    (tmp_path / "pages-1.img").write_bytes(b"".join(pages))
    (tmp_path / "core.img").write_bytes(b"core")
    made = dumpfile.hashed(tmp_path)
    again = dumpfile.hashed(tmp_path, existing=made.hashes())
    (one,), (other,) = made.pages["pages-1.img"], again.pages["pages-1.img"]
    assert (one.hashes == other.hashes).all() and one.filled.tolist() == other.filled.tolist() == [True, False, True]
    assert bytes(one.data) == bytes(other.data) and made.images == again.images


def test_hashes_of_another_size_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(bytes([7]) * PAGE)
    result = dumpfile.hashed(tmp_path, existing=hashes(2))
    assert result.hashes()["pages-1.img"].tolist() == dumpfile.hashed(tmp_path).hashes()["pages-1.img"].tolist()
