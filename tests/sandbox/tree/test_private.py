"""What the daemon keeps is for its own user alone, also where an older version had left it open."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sandbox import private
from sandbox.errors import Invalid
from sandbox.tree.pool import OURS


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_is_made_for_its_owner(tmp_path: Path) -> None:
    private.directory(tmp_path / "a" / "state")
    assert mode(tmp_path / "a" / "state") == 0o700


@pytest.mark.parametrize("wide", [0o755, 0o750, 0o711, 0o770])
@pytest.mark.parametrize("content", [[], ["images"], ["catalogue.sqlite", "notes"]])
def test_one_of_ours_is_tightened(tmp_path: Path, wide: int, content: list[str]) -> None:
    tmp_path.chmod(wide)
    for name in content:
        (tmp_path / name).touch()
    private.directory(tmp_path, ours=OURS)
    assert mode(tmp_path) == 0o700


def test_one_that_lets_others_pass_on_purpose_keeps_that(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    private.directory(tmp_path, mode=0o711)
    assert mode(tmp_path) == 0o711


@pytest.mark.parametrize(("wide", "content"), [(0o755, ["somebody.txt"]), (0o1777, []), (0o1777, ["images"])])
def test_one_that_may_be_somebody_elses_is_refused_and_left(tmp_path: Path, wide: int, content: list[str]) -> None:
    for name in content:
        (tmp_path / name).touch()
    tmp_path.chmod(wide)
    with pytest.raises(Invalid, match="other users may enter") as refused:
        private.directory(tmp_path, ours=OURS)
    assert "directory of its own" in (refused.value.hint or "") and mode(tmp_path) == wide


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_one_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1234)
    with pytest.raises(Invalid, match="belongs to the user 1234"):
        private.directory(tmp_path, ours=OURS)


def test_a_file_is_tightened_and_no_link_is_followed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    old.chmod(0o644)
    private.file(old)
    private.file(new)
    assert (mode(old), mode(new), old.read_text()) == (0o600, 0o600, "kept")
    (tmp_path / "link").symlink_to(old)
    with pytest.raises(OSError, match="symbolic"):
        private.file(tmp_path / "link")
