"""A daemon of a bench's own: its state, its pool, its socket, gone at the end; and what is left when it is gone.

The tests start theirs by the same :func:`launch`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bench.harness import aftermath
from daemon.network.networks import Networks
from sandbox import Client
from sandbox.container.cgroup import hierarchy
from sandbox.tree.pool import BtrfsPool

IMAGE = "bench"
READY = 120.0  # seconds


def launch(
    state: Path,
    run: Path,
    log: Path,
    *options: str,
    module: str = "daemon",
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """A daemon over these directories, as soon as it serves. Blocks; one that does not serve is killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gate:
        gate.bind(f"\0pagurus-launch-{secrets.token_hex(8)}")
        gate.settimeout(0.2)
        existing = {
            **os.environ,
            **(environment or {}),
            "PAGURUS_STATE": str(state),
            "PAGURUS_RUN": str(run),
            "NOTIFY_SOCKET": "@" + gate.getsockname()[1:].decode(),
        }
        with log.open("ab") as said:
            program = [sys.executable, "-m", module, *options]
            process = subprocess.Popen(program, env=existing, stdout=said, stderr=said, start_new_session=True)
        deadline = time.monotonic() + READY
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                if gate.recv(64) == b"READY=1":
                    return process
    process.kill()
    process.wait()
    raise RuntimeError(f"the daemon does not start:\n{log.read_text(errors='replace')[-3000:]}")


class BenchHost:
    """A daemon over the directories below `directory`. `image`: of its sandboxes; None: it has one already."""

    def __init__(self, directory: Path, image: Path | None, module: str = "daemon", run: Path | None = None) -> None:
        self.directory = directory
        self.module = module  # what is started: the daemon, or a module that starts it
        self.environment: dict[str, str] = {}  # besides ours
        self.state = directory / "state"
        self.run = run or Path(f"/run/pagurus-bench-{os.getpid()}-{secrets.token_hex(4)}")
        self.socket = self.run / "pagurus.sock"
        self.log = directory / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None
        if image is not None:
            (self.state / "images").mkdir(parents=True)
            (self.state / "images" / IMAGE).symlink_to(image.resolve())

    def start(self, *options: str) -> float:
        """Start it; returns the seconds until it served. Blocks."""
        for place in (self.directory, self.run):
            aftermath.note(directory=place)
        aftermath.note(host=self.directory, run=self.run, module=self.module, environment=self.environment)
        began = time.monotonic()
        self.process = launch(
            self.state, self.run, self.log, *options, module=self.module, environment=self.environment
        )
        return time.monotonic() - began

    def client(self) -> Client:
        return Client(self.socket, timeout=60.0)

    def kill(self) -> None:
        """kill -9. Blocks until it is gone."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=120)
            self.process = None

    def complaints(self) -> list[str]:
        """Warnings and errors of the log."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if '"level": "INFO"' not in line]

    def clean(self) -> None:
        """End it and everything that it ever made. Blocks."""
        self.kill()
        if (self.state / "catalogue.sqlite").exists():
            self.start("--stop-sandboxes")
            self.stop()
        BtrfsPool(self.state).close()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            mount = Path(line.split()[1])
            if mount.is_relative_to(self.directory) or mount.is_relative_to(self.run):
                subprocess.run(["umount", "-q", str(mount)], check=False)
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.run, ignore_errors=True)


def image(name: str) -> Path:
    """The tree of an image of this host."""
    from sandbox.image.store import ImageStore

    return ImageStore(BtrfsPool().images).resolve(name).tree


class Census:
    """What of a host's sandboxes exists in the kernel and on the disk. Take one before, compare after."""

    def __init__(self, host: BenchHost) -> None:
        self._host = host
        self.groups = _groups()
        self._prefix = Networks(host.run).prefix  # of the links that this daemon makes; others have theirs

    def leaks(self) -> list[str]:
        """What is left of sandboxes when all have been removed and the daemon has been stopped."""
        host = self._host
        left = [f"group {name}" for name in sorted(_groups() - self.groups) if name in _names(host)]
        left += [f"link {name}" for name in os.listdir("/sys/class/net") if name.startswith(self._prefix)]
        left += [f"tree {path.name}" for path in _entries(host.state / "pool/sandboxes")]
        left += [f"snapshot {path.name}" for path in _entries(host.state / "pool/checkpoints")]
        left += [f"run directory {path.name}" for path in _entries(host.run / "sandboxes") if path.name != "empty"]
        left += [f"process {pid}" for pid in shims(host.run)]
        for line in Path("/proc/self/mounts").read_text().splitlines():
            point = line.split()[1]
            if point.startswith(f"{host.run}/sandboxes/"):
                left.append(f"mount {point}")
        return left


def _names(host: BenchHost) -> set[str]:
    """Every sandbox that the log ever spoke of."""
    text = host.log.read_text(errors="replace")
    return {part.split('"', 1)[0] for part in text.split('"sandbox": "')[1:]}


def _groups() -> set[str]:
    return {path.name for path in _entries(hierarchy().unified / "pagurus") if path.is_dir()}


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def shims(run: Path) -> list[int]:
    """Pids of the shims whose log lies below this run directory of a host."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "fd/1").startswith(str(run / "sandboxes")):
                    result.append(int(entry.name))
    return result


def tasks(sandboxes: list[str]) -> list[int]:
    """Host pids of all processes in these sandboxes."""
    result: list[int] = []
    for name in sandboxes:
        with contextlib.suppress(OSError):
            procs = hierarchy().unified / "pagurus" / name / "cgroup.procs"
            result += map(int, procs.read_text().split())
    return result


def pss(pids: list[int]) -> int:
    """Bytes that these processes have of their own, shared ones by their part."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def meminfo(*names: str) -> int:
    """Sum of these lines of /proc/meminfo, in bytes."""
    result = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(result[name].split()[0]) << 10 for name in names)


def ticks(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
