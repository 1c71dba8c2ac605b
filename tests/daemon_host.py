"""A real daemon for tests: its own state, its own pool, its own socket, gone at the end.

Owns: starting, killing and cleaning up. Not a test module. Needs root, btrfs, BTF and the parts that
`make setup` built; `missing()` names what is not there.
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
from pathlib import Path

from sandbox import Client, paths
from sandbox.pool import Pool

IMAGE = "debian"


def image_tree() -> Path:
    """The base image that `make setup` made; PAGURUS_TEST_IMAGE names another tree."""
    return Path(os.environ.get("PAGURUS_TEST_IMAGE", paths.state() / "images" / IMAGE))


def missing() -> str:
    """What keeps a real daemon from running here; "" when nothing does."""
    if os.geteuid() != 0:
        return "needs root"
    needed = {
        "the shim": paths.shim(),
        "CRIU": paths.criu(),
        "the inspector's BPF object": paths.inspector_object(),
        "BTF": Path("/sys/kernel/btf/vmlinux"),
        "a base image": image_tree(),
    }
    absent = [f"{what} ({path})" for what, path in needed.items() if not path.exists()]
    if shutil.which("mkfs.btrfs") is None:
        absent.append("mkfs.btrfs")
    return f"missing: {', '.join(absent)}; run `make setup`" if absent else ""


class Daemon:
    """A daemon process over the directories below `root`. `start` returns when it serves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state"
        # Below /run, where the real one lies: CRIU has a /run of its own.
        self.run = Path(f"/run/pagurus-test-{os.getpid()}-{secrets.token_hex(4)}")
        self.socket = self.run / "pagurus.sock"
        self.log = root / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None
        (self.state / "images").mkdir(parents=True)
        (self.state / "images" / IMAGE).symlink_to(image_tree())

    def start(self, *options: str) -> Daemon:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gate:
            gate.bind(f"\0pagurus-test-{os.getpid()}-{id(self)}")
            gate.settimeout(60)
            environment = {
                **os.environ,
                "PAGURUS_STATE": str(self.state),
                "PAGURUS_RUN": str(self.run),
                "NOTIFY_SOCKET": "@" + gate.getsockname()[1:].decode(),
            }
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "daemon", *options], env=environment, stdout=log, stderr=log
                )
            try:
                assert gate.recv(64) == b"READY=1"
            except TimeoutError:
                raise AssertionError(f"the daemon does not start:\n{self.log.read_text()[-4000:]}") from None
        return self

    def client(self, *, patience: float = 20.0) -> Client:
        """`patience`: seconds for which it waits for the next daemon; 0 where the test wants to see the failure."""
        return Client(self.socket, patience=patience)

    def kill(self) -> None:
        """kill -9: no chance to tidy up."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=60)
        self.process = None
        return status

    def clean(self) -> None:
        """End the daemon and everything that it ever made below its directories."""
        if self.process is not None:
            self.kill()
        if self.state.exists():
            self.start("--stop-sandboxes")
            self.stop()
            Pool(self.state).close()
        for line in Path("/proc/self/mounts").read_text().splitlines():
            mount = Path(line.split()[1])
            if mount.is_relative_to(self.root) or mount.is_relative_to(self.run):
                subprocess.run(["umount", str(mount)], check=True)
        shutil.rmtree(self.root)
        if self.run.exists():
            shutil.rmtree(self.run)


def tasks_of(sandbox: str) -> list[int]:
    """Host pids of a sandbox's processes: its host name is part of its id, and only they can see it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if f"/pagurus/{sandbox}" in (entry / "cgroup").read_text().split("\n0::", 1)[-1]:
                    found.append(int(entry.name))
    return found


def kill_everything(sandbox: str) -> None:
    """kill -9 for all processes of a sandbox; some die with others before their turn comes."""
    for task in tasks_of(sandbox):
        with contextlib.suppress(ProcessLookupError):
            os.kill(task, signal.SIGKILL)
