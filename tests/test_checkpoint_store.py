"""The page store and dump files: content, deduplication, crashes, collection."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox import dumpfile
from sandbox.errors import CheckpointFailed, Conflict
from sandbox.pages import PAGE, SLOTS, ZERO, PageStore


@pytest.fixture
def store(tmp_path: Path):
    made = PageStore(tmp_path / "pages")
    yield made
    made.close()


def page(number: int) -> bytes:
    return number.to_bytes(8, "little") * (PAGE // 8)


def content(store: PageStore, numbers: np.ndarray) -> bytes:
    parts: list[bytes] = []
    store.read(numbers, parts.append)
    return b"".join(parts)


def image(directory: Path, name: str, pages: list[bytes], **images: bytes) -> Path:
    made = directory / name
    made.mkdir()
    (made / "pages-1.img").write_bytes(b"".join(pages))
    for key, value in images.items():
        (made / f"{key}.img").write_bytes(value)
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 300), max_size=3 * SLOTS), st.integers(1, 5))
def test_what_goes_in_comes_out(store: PageStore, numbers: list[int], times: int) -> None:
    data = b"".join(page(number) for number in numbers) * times
    added = store.add(data)
    assert content(store, added.numbers) == data
    again = store.add(data)
    assert again.new_pages == 0
    assert again.new_bytes == 0
    assert (again.numbers == added.numbers).all()
    assert ((added.numbers == ZERO) == np.array([n == 0 for n in numbers] * times, dtype=bool)).all()


def test_repeated_pages_are_stored_once(store: PageStore) -> None:
    added = store.add(page(7) * 1000)
    assert added.new_pages == 1
    assert added.new_bytes < 200


def test_the_store_survives_reopening(tmp_path: Path) -> None:
    data = b"".join(os.urandom(PAGE) for _ in range(SLOTS * 2 + 3))
    first = PageStore(tmp_path / "pages")
    numbers = first.add(data).numbers
    with pytest.raises(Conflict):
        PageStore(tmp_path / "pages")
    first.close()
    second = PageStore(tmp_path / "pages")
    assert content(second, numbers) == data
    assert second.add(data).new_pages == 0
    second.close()


def test_bytes_that_a_crash_left_behind_are_overwritten(tmp_path: Path) -> None:
    first = PageStore(tmp_path / "pages")
    numbers = first.add(page(1)).numbers
    first.close()
    (segment,) = (tmp_path / "pages").glob("*.segment")
    with open(segment, "ab") as file:
        file.write(b"half a block that the index never heard of")
    (tmp_path / "pages" / "00000099.segment").write_bytes(b"a segment that it never heard of")
    second = PageStore(tmp_path / "pages")
    more = second.add(page(2)).numbers
    assert content(second, np.concatenate([numbers, more])) == page(1) + page(2)
    assert [path.name for path in (tmp_path / "pages").glob("*.segment")] == [segment.name]
    second.close()


def test_a_failed_write_leaves_the_store_as_it_was(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store.add(page(1)).numbers

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(OSError, match="No space"):
            store.add(page(2))
    assert content(store, kept) == page(1)
    again = store.add(page(2))
    assert again.new_pages == 1
    assert content(store, again.numbers) == page(2)


def test_a_changed_byte_is_found(store: PageStore, tmp_path: Path) -> None:
    data = [os.urandom(PAGE) for _ in range(10)]
    stored = dumpfile.pack(image(tmp_path, "capture", data, core=b"c"), tmp_path / "a.dump", store)
    assert dumpfile.verify(stored.path, store) == 10
    (segment,) = store.directory.glob("*.segment")
    with open(segment, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointFailed):
        dumpfile.verify(stored.path, store)
    with open(stored.path, "r+b") as file:
        file.seek(40)
        file.write(b"\0\0\0")
    with pytest.raises(CheckpointFailed, match="changed on disk"):
        dumpfile.read(stored.path)


def test_a_dump_file_gives_back_the_same_directory(store: PageStore, tmp_path: Path) -> None:
    capture = image(tmp_path, "capture", [page(0), page(1), page(0), page(1)], core=b"core", files=b"f" * 5000)
    (capture / "dump.log").write_text("left out")
    stored = dumpfile.pack(capture, tmp_path / "dumps" / "a.dump", store)
    assert (stored.pages, stored.new_pages) == (4, 1)
    dumpfile.unpack(stored.path, tmp_path / "again", store)
    (capture / "dump.log").unlink()
    for path in capture.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "again").iterdir())) == len(list(capture.iterdir()))


def test_a_collection_keeps_what_a_dump_refers_to(store: PageStore, tmp_path: Path) -> None:
    shared = [os.urandom(PAGE) for _ in range(SLOTS)]
    kept = dumpfile.pack(image(tmp_path, "1", [*shared, page(1)]), tmp_path / "kept.dump", store)
    gone = dumpfile.pack(
        image(tmp_path, "2", shared + [os.urandom(PAGE) for _ in range(3 * SLOTS)]), tmp_path / "gone.dump", store
    )
    before = store.statistics()
    assert store.collect(lambda: dumpfile.references([kept.path, gone.path])).blocks == 0
    gone.path.unlink()
    freed = store.collect(lambda: dumpfile.references([kept.path]))
    assert freed.blocks >= 3
    assert store.statistics()["pages"] < before["pages"]
    assert dumpfile.verify(kept.path, store) > 0
    dumpfile.unpack(kept.path, tmp_path / "again", store)
    assert (tmp_path / "again/pages-1.img").read_bytes() == b"".join(shared) + page(1)
    # What was collected can come back.
    dumpfile.pack(tmp_path / "2", tmp_path / "back.dump", store)
    dumpfile.unpack(tmp_path / "back.dump", tmp_path / "2again", store)
    assert (tmp_path / "2again/pages-1.img").read_bytes() == (tmp_path / "2/pages-1.img").read_bytes()


def test_an_unreadable_dump_file_stops_the_collection(store: PageStore, tmp_path: Path) -> None:
    stored = dumpfile.pack(image(tmp_path, "1", [page(1)]), tmp_path / "a.dump", store)
    (tmp_path / "b.dump").write_bytes(b"torn")
    with pytest.raises(CheckpointFailed):
        store.collect(lambda: dumpfile.references([tmp_path / "b.dump"]))
    assert dumpfile.verify(stored.path, store) == 1
