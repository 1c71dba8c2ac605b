"""Files with the inode numbers that they had elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.store import numbered


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file system's counter: each file that is tried gets the next one."""
    given = [260]
    real = numbered._next

    def following(directory: int) -> int:
        real(directory)
        given[0] += 1
        return given[0] - 1

    monkeypatch.setattr(numbered, "_next", following)
    return given


def made(tmp_path: Path, target: dict[int, int]) -> list[str]:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        numbered.make(directory, target)
        numbered.move(directory, 1, directory, "there")
    finally:
        os.close(directory)
    return sorted(os.listdir(tmp_path))


def test_numbers_in_between_are_used_up(tmp_path: Path, numbers: list[int]) -> None:
    assert made(tmp_path, {1: 263, 2: 261, 3: 270}) == ["2.made", "3.made", "there"]
    assert numbers == [271]


def test_what_cannot_be_had_is_not_made(tmp_path: Path, numbers: list[int]) -> None:
    assert made(tmp_path, {1: 260, 2: 12, 3: 260, 4: 261}) == ["4.made", "there"]
    assert numbers == [262]


def test_no_more_are_used_up_than_may_be(tmp_path: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered, "MAX_SPENT", 50)
    assert made(tmp_path, {1: 262, 2: 1 << 40}) == ["there"]
    assert numbers[0] < 320
