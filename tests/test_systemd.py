"""The unit is one that systemd understands, and each privilege has its reason."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parent.parent / "systemd" / "pagurus.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "pagurus.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    own = [line for line in done.stderr.splitlines() if "pagurus.service" in line]
    assert (own, done.returncode) == ([], 0)


def test_each_privilege_has_a_reason() -> None:
    lines = UNIT.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("CapabilityBoundingSet="):
            assert lines[number - 1].startswith("# "), line


def test_sandboxes_outlive_the_daemon() -> None:
    unit = UNIT.read_text().splitlines()
    for needed in ("Type=notify", "KillMode=process", "Delegate=yes", "RuntimeDirectoryPreserve=yes"):
        assert needed in unit
