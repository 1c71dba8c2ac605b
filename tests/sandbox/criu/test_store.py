"""The page store and dump files: content, deduplication, crashes, collection."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.content import dumpfile
from sandbox.content.page_hashes import PAGE
from sandbox.content.pages import SLOTS, ZERO, PageStore
from sandbox.errors import CheckpointFailed, Conflict, NoSpace


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
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
    retained = store.add(page(1)).numbers

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(OSError, match="No space"):
            store.add(page(2))
    assert content(store, retained) == page(1)
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
    with pytest.raises(CheckpointFailed, match="damaged"):
        dumpfile.unpack(stored.path, tmp_path / "never", store)
    again = dumpfile.pack(tmp_path / "capture", tmp_path / "b.dump", store)
    assert again.new_pages == 10  # none of the damaged block is shared
    assert dumpfile.verify(again.path, store) == 10
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
    retained = dumpfile.pack(image(tmp_path, "1", [*shared, page(1)]), tmp_path / "kept.dump", store)
    gone = dumpfile.pack(
        image(tmp_path, "2", shared + [os.urandom(PAGE) for _ in range(3 * SLOTS)]), tmp_path / "gone.dump", store
    )
    before = store.statistics()
    assert store.collect(lambda: dumpfile.references([retained.path, gone.path])).blocks == 0
    gone.path.unlink()
    freed = store.collect(lambda: dumpfile.references([retained.path]))
    assert freed.blocks >= 3
    assert store.statistics()["pages"] < before["pages"]
    assert dumpfile.verify(retained.path, store) > 0
    dumpfile.unpack(retained.path, tmp_path / "again", store)
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


class PowerCuts:
    """Copies a directory at every step that makes something durable, as a power cut there would leave it.

    Of a file that was written but not synced, nothing survives: the harshest thing that a disk may do. SQLite's own
    files are taken as they are; its discipline is its own.
    """

    def __init__(self, directory: Path, into: Path, monkeypatch: pytest.MonkeyPatch):
        self.directory, self.into = directory, into
        self.images: list[Path] = []
        self._synced: dict[str, int] = {}
        self._fsync, self._fdatasync, self._rename = os.fsync, os.fdatasync, Path.rename
        monkeypatch.setattr(os, "fsync", lambda fd: self._sync(fd, self._fsync))
        monkeypatch.setattr(os, "fdatasync", lambda fd: self._sync(fd, self._fdatasync))
        monkeypatch.setattr(Path, "rename", self._renamed(self))

    @staticmethod
    def _renamed(cuts: PowerCuts):
        def rename(path: Path, target: Path) -> Path:
            cuts.cut()
            cuts._synced[str(target)] = cuts._synced.pop(str(path), 0)
            result = cuts._rename(path, target)
            cuts.cut()
            return result

        return rename

    def _sync(self, fd: int, really) -> None:
        self.cut()
        really(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        self._synced[path] = os.fstat(fd).st_size
        self.cut()

    def cut(self) -> None:
        image = self.into / str(len(self.images))
        shutil.copytree(self.directory, image)
        for path in image.rglob("*"):
            original = str(self.directory / path.relative_to(image))
            if path.suffix in (".segment", ".dump", ".new"):
                os.truncate(path, self._synced.get(original, 0))
        self.images.append(image)


def test_a_power_cut_leaves_the_old_or_the_new_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    (tmp_path / "cuts").mkdir()
    shared = [os.urandom(PAGE) for _ in range(70)]
    captures = [image(tmp_path, f"c{n}", [*shared, os.urandom(PAGE)], core=bytes([n])) for n in range(4)]
    with monkeypatch.context() as patched:
        store = PageStore(disk / "pages")
        cuts = PowerCuts(disk, tmp_path / "cuts", patched)
        published = []
        for number, capture in enumerate(captures):
            dumpfile.pack(capture, disk / f"{number}.dump", store)
            published.append(len(cuts.images))  # from this cut on it must be there
            if number == 2:
                (disk / "1.dump").unlink()
                store.collect(lambda: dumpfile.references(sorted(disk.glob("*.dump"))))
        cuts.cut()
        store.close()
    assert len(cuts.images) > 20
    for index, copied in enumerate(cuts.images):
        again = PageStore(copied / "pages")
        result = {int(path.stem) for path in copied.glob("*.dump")}
        for number in result:
            dumpfile.unpack(copied / f"{number}.dump", copied / f"out{number}", again)
            for path in captures[number].iterdir():
                assert (copied / f"out{number}" / path.name).read_bytes() == path.read_bytes()
        due = {number for number, since in enumerate(published) if index >= since} - {1}
        assert due <= result
        # And it goes on from there.
        dumpfile.pack(captures[0], copied / "more.dump", again)
        dumpfile.verify(copied / "more.dump", again)
        again.close()


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "small", str(disk)], check=True)
    store = PageStore(disk / "pages")
    try:
        retained = dumpfile.pack(image(tmp_path, "small", [os.urandom(PAGE)] * 3), disk / "kept.dump", store)
        large = image(tmp_path, "large", [os.urandom(PAGE) for _ in range(800)])
        with pytest.raises(NoSpace, match=r"1 MiB free.* 2 MiB more"):
            dumpfile.pack(large, disk / "large.dump", store)
        with pytest.raises(NoSpace, match=r"1 MiB free.* 3 MiB more"):  # though its bytes would fit
            dumpfile.pack(image(tmp_path, "one", [os.urandom(PAGE)]), disk / "one.dump", store, reserve=4 << 20)
        assert [path.name for path in disk.glob("*.dump*")] == ["kept.dump"]
        assert dumpfile.verify(retained.path, store) == 1
        again = dumpfile.pack(image(tmp_path, "more", [os.urandom(PAGE)]), disk / "more.dump", store)
        assert dumpfile.verify(again.path, store) == 1
    finally:
        store.close()
        subprocess.run(["umount", str(disk)], check=True)
