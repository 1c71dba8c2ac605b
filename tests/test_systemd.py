"""systemd understands the units, each privilege has its reason, and what would break restores is absent."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_host import Daemon, missing
from tests.support.programs import Program

DIRECTORY = Path(__file__).parent.parent / "systemd"
UNIT = DIRECTORY / "pagurus.service"
SOCKET = DIRECTORY / "pagurus.socket"
CLUSTER = DIRECTORY / "pagurus-cluster.service"

# systemd implements these by a seccomp filter, which sandboxes would inherit and CRIU would dump as their own.
SECCOMP = {
    "SystemCallFilter",
    "SystemCallArchitectures",
    "SystemCallLog",
    "RestrictAddressFamilies",
    "RestrictNamespaces",
    "RestrictRealtime",
    "RestrictSUIDSGID",
    "LockPersonality",
    "MemoryDenyWriteExecute",
    "ProtectClock",
    "ProtectKernelModules",
    "ProtectKernelLogs",
    "ProtectKernelTunables",
    "ProtectHostname",
    "PrivateDevices",
}
# And these by a mount namespace of the unit, in which the next daemon would not find the pool mounted.
MOUNTS = {
    "ProtectSystem",
    "ProtectHome",
    "ProtectProc",
    "ProtectControlGroups",
    "PrivateTmp",
    "PrivateMounts",
    "PrivateUsers",
    "PrivateNetwork",
    "ReadWritePaths",
    "ReadOnlyPaths",
    "InaccessiblePaths",
    "BindPaths",
    "TemporaryFileSystem",
    "RootDirectory",
    "DynamicUser",
    "MountFlags",
}
MAX_EXPOSED = 8.9  # of 10, as systemd-analyze counts it: most of its points are what the unit may not have

# Settings that give nothing: what runs, when, and what systemd is told about it.
HARMLESS = {"Type", "ExecStart", "Restart", "RestartSec", "WatchdogSec", "StateDirectoryMode", "RuntimeDirectoryMode"}


def settings(unit: Path) -> list[tuple[str, str]]:
    lines = [line for line in unit.read_text().splitlines() if line and line[0] not in "#["]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units, with a program that exists here."""
    result = []
    for unit in (UNIT, SOCKET, CLUSTER):
        copy = tmp_path / unit.name
        copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))
        result.append(copy)
    return result


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(units: list[Path]) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    own = [line for line in done.stderr.splitlines() if "pagurus." in line or CLUSTER.name in line]
    assert (own, done.returncode) == ([], 0)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_exposure_is_known(units: list[Path]) -> None:
    done = subprocess.run(
        [
            "systemd-analyze",
            "security",
            "--offline=true",
            f"--threshold={MAX_EXPOSED * 10:.0f}",
            "--no-pager",
            units[0],
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def reasoned(unit: str) -> tuple[set[str], set[str]]:
    """Settings of [Service] with a comment directly above, and those without."""
    lines = unit.partition("[Service]\n")[2].partition("[Install]")[0].splitlines()
    result: tuple[set[str], set[str]] = (set(), set())
    for above, line in itertools.pairwise(["", *lines]):
        if line and not line.startswith("#"):
            result[0 if above.startswith("# ") else 1].add(line if line.startswith("Cap") else line.partition("=")[0])
    return result


def test_each_privilege_has_a_reason() -> None:
    assert reasoned(UNIT.read_text())[1] <= HARMLESS
    bare = "[Service]\nCapabilityBoundingSet=CAP_KILL\n\n# Why.\nLimitNOFILE=1\nDeviceAllow=/dev/mem\n"
    assert reasoned(bare) == ({"LimitNOFILE"}, {"CapabilityBoundingSet=CAP_KILL", "DeviceAllow"})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_each_missing_protection_has_a_reason(units: list[Path]) -> None:
    """Whatever systemd counts against the unit is a setting with its reason, or named among what is left out."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--json=short", "--no-pager", units[0]],
        capture_output=True,
        check=True,
    )
    unit = UNIT.read_text()
    given = {line.partition("=")[0] for line in reasoned(unit)[0]}
    left_out = set(re.findall(r"(\w+)=", "".join(line for line in unit.splitlines() if line.startswith("#"))))
    counted = {item["json_field"] for item in json.loads(done.stdout) if float(item.get("exposure") or 0) > 0}
    named = {re.split(r"_|Or(?=[A-Z])", field)[0] for field in counted}
    assert len(named) > 20 and named <= given | left_out


def test_sandboxes_outlive_the_daemon() -> None:
    unit = UNIT.read_text().splitlines()
    for needed in (
        "Type=notify",
        "KillMode=process",
        "Delegate=yes",
        "RuntimeDirectoryPreserve=yes",
        "OOMPolicy=continue",
        "WatchdogSec=30",
    ):
        assert needed in unit


def test_nothing_is_inherited_by_sandboxes_or_hidden_from_the_next_daemon() -> None:
    assert {name for name, _ in settings(UNIT)} & (SECCOMP | MOUNTS) == set()


def test_only_root_opens_the_socket() -> None:
    existing = dict(settings(SOCKET))
    assert (existing["SocketMode"], existing["DirectoryMode"], existing["RemoveOnStop"]) == ("0600", "0700", "no")


# --------------------------------------------------------------------------- what systemd does to the daemon


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_callers_wait_in_the_socket_that_systemd_passed_while_the_daemon_is_replaced(tmp_path: Path) -> None:
    """The socket outlives the daemons; nobody is refused in between. As systemd does it: LISTEN_FDS from 3 on."""
    daemon = Daemon(tmp_path / "host")
    daemon.run.mkdir(mode=0o700)
    passed = socket.socket(socket.AF_UNIX)
    passed.bind(str(daemon.socket))
    passed.listen(16)
    # The number is taken in the child alone: in this process 3 is somebody else's.
    program = (
        "import os, sys; os.environ['LISTEN_PID'] = str(os.getpid())\n"
        f"if {passed.fileno()} != 3: os.dup2({passed.fileno()}, 3)\n"
        "os.set_inheritable(3, True); os.execv(sys.executable, sys.argv[1:])"
    )
    environment = {
        **os.environ,
        "PAGURUS_STATE": str(daemon.state),
        "PAGURUS_RUN": str(daemon.run),
        "LISTEN_FDS": "1",
        "WATCHDOG_USEC": "200000",
    }

    def start(gate: socket.socket) -> Program:
        return Program(
            [sys.executable, "-c", program, sys.executable, "-m", "daemon"],
            env={**environment, "NOTIFY_SOCKET": "@" + gate.getsockname()[1:].decode()},
            pass_fds=[passed.fileno()],
            stderr=subprocess.DEVNULL,
        )

    def request() -> bytes:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(60)
            caller.connect(str(daemon.socket))
            caller.sendall(b"GET /v1/health HTTP/1.0\r\n\r\n")
            return caller.makefile("rb").readline()

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gate:
            gate.bind(f"\0pagurus-systemd-{os.getpid()}")
            gate.settimeout(60)
            for _ in range(2):
                with start(gate) as process:
                    assert request().endswith(b"200 OK\r\n")  # it was queued before the daemon was there
                    last_seen = {gate.recv(64) for _ in range(3)}
                    assert {b"READY=1", b"WATCHDOG=1"} == last_seen
                    process.terminate()
                    assert process.wait(timeout=60) == 0
                    while gate.recv(64) != b"STOPPING=1":
                        pass
    finally:
        passed.close()
        daemon.socket.unlink()
        daemon.clean()


def _running_systemd() -> str:
    """What keeps a real systemd from running the unit here; "" when nothing does."""
    if not Path("/run/systemd/system").is_dir():
        return "no systemd runs this machine (/run/systemd/system is missing)"
    return missing()


@pytest.mark.skipif(bool(_running_systemd()), reason=_running_systemd())
def test_a_real_systemd_restarts_it_over_its_sandboxes(tmp_path: Path) -> None:
    """Started by systemd from this unit, killed, started again: the sandbox goes on."""
    from sandbox.sync import Client

    name, daemon = f"pagurus-test-{os.getpid()}", Daemon(tmp_path / "host")
    unit = Path(f"/run/systemd/system/{name}.service")
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^(Wants|Also|StateDirectory|RuntimeDirectory)\w*=.*\n", "", text, flags=re.MULTILINE)
    here = Path(__file__).parent.parent
    text = text.replace(
        "[Service]\n",
        f"[Service]\nWorkingDirectory={here}\nEnvironment=PAGURUS_STATE={daemon.state} PAGURUS_RUN={daemon.run}\n",
    )
    unit.write_text(text)
    try:
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        subprocess.run(["systemctl", "start", name], check=True)  # returns when it is ready
        with Client(daemon.socket) as host:
            sandbox = host.create("debian")
            sandbox.exec("echo here > /dev/shm/mark")
            subprocess.run(["systemctl", "kill", "--signal=KILL", name], check=True)
            assert sandbox.exec("cat /dev/shm/mark").text == "here\n"
            sandbox.remove()
    finally:
        subprocess.run(["systemctl", "stop", name], check=False)
        unit.unlink()
        subprocess.run(["systemctl", "daemon-reload"], check=False)
        daemon.clean()
