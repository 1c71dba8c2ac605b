"""Process images that several forks read are unpacked once; where that fails, each restore does it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.checkpoints.unpacked import UnpackedImages
from sandbox.content import dumpfile
from sandbox.criu.recent import RecentImages

ROW: Any = SimpleNamespace(dump="c-1")


class Capturer:
    """Its stored dumps have 100 bytes each."""

    def __init__(self, directory: Path, limit: int) -> None:
        recent = RecentImages(directory / "recent", limit=limit)
        recent.prepare()
        self.directory, self.is_read = directory, lambda dump: False
        self.checkpointer = SimpleNamespace(recent=recent, pages=None)
        self.places = SimpleNamespace(packed=lambda dump: directory / f"{dump}.dump")

    def process_images(self, dump: str) -> Path:
        return self.checkpointer.recent.find(dump) or self.places.packed(dump)


@pytest.fixture
def unpackings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    done: list[Path] = []

    def unpack(path: Path, directory: Path, _store: object) -> None:
        done.append(path)
        directory.mkdir()
        if path.name == "torn.dump":
            raise OSError(5, "Input/output error")
        (directory / "pages-1.img").write_bytes(b"x" * 100)

    monkeypatch.setattr(dumpfile, "unpack", unpack)
    monkeypatch.setattr(dumpfile, "unpacked_bytes", lambda path: 100)
    return done


async def test_they_are_unpacked_once_for_all(tmp_path: Path, unpackings: list[Path]) -> None:
    capturer: Any = Capturer(tmp_path, limit=250)
    images = UnpackedImages(capturer)
    await asyncio.gather(*(images.provide(ROW) for _ in range(8)))
    await images.provide(ROW)
    assert unpackings == [tmp_path / "c-1.dump"]
    assert (capturer.process_images("c-1") / "pages-1.img").read_bytes() == b"x" * 100


async def test_what_has_no_room_or_is_torn_is_left_to_the_restores(tmp_path: Path, unpackings: list[Path]) -> None:
    capturer: Any = Capturer(tmp_path, limit=50)
    await UnpackedImages(capturer).provide(ROW)
    assert not unpackings
    capturer = Capturer(tmp_path, limit=250)
    torn: Any = SimpleNamespace(dump="torn")
    await UnpackedImages(capturer).provide(torn)
    assert unpackings and capturer.process_images("torn") == tmp_path / "torn.dump"
    assert list((tmp_path / "recent").iterdir()) == []


async def test_a_checkpoint_without_processes_has_none(tmp_path: Path, unpackings: list[Path]) -> None:
    capturer: Any = Capturer(tmp_path, limit=250)
    files: Any = SimpleNamespace(dump=None)
    await UnpackedImages(capturer).provide(files)
    assert not unpackings
