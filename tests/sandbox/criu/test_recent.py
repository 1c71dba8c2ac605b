"""Raw images that are kept for a while after they were stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.criu.recent import RecentImages, remove


@pytest.fixture
def recent(tmp_path: Path) -> RecentImages:
    made = RecentImages(tmp_path / "recent", limit=250)
    made.prepare()
    return made


def images(directory: Path, name: str, size: int = 100) -> Path:
    path = directory / f"raw-{name}"
    path.mkdir()
    (path / "pages-1.img").write_bytes(b"x" * size)
    return path


def nobody(_name: str) -> bool:
    return False


def test_the_least_recently_used_goes_first(recent: RecentImages, tmp_path: Path) -> None:
    for name in "abc":
        remove(recent.keep(name, images(tmp_path, name), busy=nobody))
        assert recent.find("b") or name == "a"
    assert [name for name in "abc" if recent.find(name)] == ["b", "c"]
    assert sum(recent._sizes.values()) == 200
    result = recent.find("b")
    assert result is not None
    assert (result / "pages-1.img").read_bytes() == b"x" * 100
    remove(recent.keep("d", images(tmp_path, "d"), busy=nobody))
    assert [name for name in "bcd" if recent.find(name)] == ["b", "d"]
    assert len(list((tmp_path / "recent").iterdir())) == 2


def test_what_is_being_read_stays(recent: RecentImages, tmp_path: Path) -> None:
    for name in "ab":
        recent.keep(name, images(tmp_path, name), busy=nobody)
    gone = recent.keep("c", images(tmp_path, "c"), busy="a".__eq__)
    assert recent.find("a")
    assert not recent.find("b")
    assert len(gone) == 1
    assert (gone[0] / "pages-1.img").exists()  # out of its name, and not yet removed
    remove(recent.make_room(busy="a".__eq__))
    assert len(recent._sizes) == 1


def test_too_large_and_gone_ones(recent: RecentImages, tmp_path: Path) -> None:
    remove(recent.keep("huge", images(tmp_path, "huge", 1000), busy=nobody))
    assert recent.find("huge") is None
    assert recent.keep("gone", tmp_path / "missing", busy=nobody) == []
    recent.keep("a", images(tmp_path, "a"), busy=nobody)
    recent.drop("a")
    recent.drop("a")
    assert recent.find("a") is None
    recent.keep("b", images(tmp_path, "b"), busy=nobody)
    again = RecentImages(tmp_path / "recent")
    again.prepare()  # of the next daemon
    assert again.find("b") is None
    assert list((tmp_path / "recent").iterdir()) == []
