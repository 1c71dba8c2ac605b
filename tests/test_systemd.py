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


#: Options that make a mount namespace, install a system-call filter or set a device policy: the unit says why not.
HARMFUL = """
    ProtectSystem ProtectHome ProtectKernelModules ProtectKernelTunables ProtectKernelLogs ProtectControlGroups
    ProtectProc ProcSubset PrivateTmp PrivateDevices PrivateMounts PrivateNetwork PrivateUsers PrivateIPC
    ReadOnlyPaths InaccessiblePaths BindPaths TemporaryFileSystem RootDirectory RootImage DynamicUser
    SystemCallFilter SystemCallArchitectures RestrictAddressFamilies RestrictNamespaces RestrictRealtime
    RestrictSUIDSGID LockPersonality MemoryDenyWriteExecute ProtectClock ProtectHostname DeviceAllow DevicePolicy
    IPAddressDeny NoNewPrivileges
"""


def test_nothing_is_set_that_sandboxes_would_suffer_from() -> None:
    options = {line.partition("=")[0] for line in UNIT.read_text().splitlines() if re.match(r"[A-Z]\w+=", line)}
    assert options.isdisjoint(HARMFUL.split())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_bounding_set_is_what_systemd_understands(tmp_path: Path) -> None:
    """`systemd-analyze security` of the unit: no privilege beyond those that are listed with a reason."""
    unit = tmp_path / "pagurus.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE))
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Unknown option" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot read a unit that is not loaded")
    assert done.returncode == 0, done.stderr
    granted = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("✓")}
    for capability in ("SYS_MODULE", "SYS_RAWIO", "SYSLOG", "SYS_BOOT", "MAC_*", "SYS_PACCT", "LINUX_IMMUTABLE"):
        assert f"CapabilityBoundingSet=~CAP_{capability}" in granted, capability
