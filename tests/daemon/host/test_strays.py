"""What nobody needs and nobody can remove keeps no daemon from starting."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.startup import _remove_stray


def test_a_stray_that_stays_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "s-1.scratch0").mkdir()  # no subvolume: btrfs refuses to remove it
    _remove_stray(tmp_path / "s-1.scratch0")
    assert "cannot remove" in caplog.text
    assert "s-1.scratch0" in caplog.text
