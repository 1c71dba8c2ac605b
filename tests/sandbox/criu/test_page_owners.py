"""Whose pages a store shares with whom."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from sandbox.content.page_hashes import PAGE
from sandbox.content.pages import PageStore


def test_owners_do_not_share_pages(tmp_path: Path) -> None:
    store, data = PageStore(tmp_path / "pages"), os.urandom(8 * PAGE)
    first, second = store.add(data, "one"), store.add(data, "two")
    assert first.new_bytes == second.new_bytes > 0
    assert not set(first.numbers.tolist()) & set(second.numbers.tolist())
    assert store.add(data, "one").new_pages == store.add(data, "two").new_pages == 0
    assert store.verify(np.concatenate([first.numbers, second.numbers])) == 16
    existing = store.existing({item.tobytes() for item in store.digests(second.numbers)})
    assert set(existing.values()) <= {*first.numbers.tolist(), *second.numbers.tolist()}  # an import takes anyone's
    assert len(existing) == 8
    store.close()


def test_owners_share_pages_where_the_host_wants_it(tmp_path: Path) -> None:
    store, data = PageStore(tmp_path / "pages", shared=True), os.urandom(8 * PAGE)
    store.add(data, "one")
    assert store.add(data, "two").new_pages == 0
    store.close()


def test_an_index_without_owners_is_the_hosts(tmp_path: Path) -> None:
    store, data = PageStore(tmp_path / "pages"), os.urandom(4 * PAGE)
    numbers = store.add(data).numbers
    store.close()
    with sqlite3.connect(tmp_path / "pages" / "index.sqlite") as database:
        database.executescript(
            "CREATE TABLE old (id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE);"
            "INSERT INTO old SELECT id, hash FROM pages; DROP TABLE pages; ALTER TABLE old RENAME TO pages;"
        )
    database.close()
    store = PageStore(tmp_path / "pages")
    assert store.add(data).numbers.tolist() == numbers.tolist()
    assert store.add(data, "one").new_pages == 4
    store.close()


def test_a_damaged_page_of_one_owner_leaves_the_others(tmp_path: Path) -> None:
    store, data = PageStore(tmp_path / "pages"), os.urandom(2 * PAGE)
    first, second = store.add(data, "one"), store.add(data, "two")
    store._condemn(int(first.numbers[0]) // 64)
    assert store.add(data, "one").new_pages == 2
    assert store.add(data, "two").numbers.tolist() == second.numbers.tolist()
    store.close()


@pytest.mark.parametrize("shared", [False, True])
def test_the_host_shares_with_itself(tmp_path: Path, shared: bool) -> None:
    store, data = PageStore(tmp_path / "pages", shared=shared), os.urandom(2 * PAGE)
    store.add(data)
    assert store.add(data).new_pages == 0
    store.close()
