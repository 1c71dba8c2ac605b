"""A real daemon for tests: its own state, its own pool, its own socket, gone at the end.

Not a test module. Needs root, btrfs, BTF and the parts that `make setup` built; `missing()` names what is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from bench.harness.own_daemon import launch
from sandbox import Client, NotFound, Sandbox, paths
from sandbox.tree.pool import BtrfsPool
from tests.crash.whole_host import GROUPS, remove_groups

IMAGE = "debian"
TIMEOUT = 240.0  # seconds; for what happens by itself, on a machine that may be very busy
T = TypeVar("T")


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


async def exists(sandbox: Sandbox, path: str) -> bool:
    """Whether there is this file."""
    with contextlib.suppress(NotFound):
        return (await sandbox.files.stat(path)).kind == "file"
    return False


def asleep(program: str) -> str:
    """Shell: until a program that was put into the background has come to rest. What still starts would count as at
    work in the next turn, and be found half started by a restore."""
    return f"until grep -q '({program}) S' /proc/[0-9]*/stat 2>/dev/null; do :; done"


ASLEEP = asleep("sleep")


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
        self.environment: dict[str, str] = {}  # of its next start
        (self.state / "images").mkdir(parents=True)
        (self.state / "images" / IMAGE).symlink_to(image_tree())

    def start(self, *options: str) -> Daemon:
        assert self.process is None, "it runs already"
        self.process = launch(self.state, self.run, self.log, *options, environment=self.environment)
        return self

    def client(self, *, timeout: float = 120.0) -> Client:
        """`timeout`: seconds for which it waits for the next daemon; 0 where the test wants to see the failure."""
        return Client(self.socket, timeout=timeout)

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
        status = self.process.wait(timeout=240)
        self.process = None
        return status

    def clean(self) -> None:
        """End the daemon and everything that it ever made below its directories."""
        hung = False
        if self.process is not None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                hung = True
                self.kill()
        self._end_sandboxes()
        if GROUPS in self.environment:
            remove_groups(self)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            mount = Path(line.split()[1])
            if mount.is_relative_to(self.root) or mount.is_relative_to(self.run):
                subprocess.run(["umount", str(mount)], check=True)
        shutil.rmtree(self.root)
        if self.run.exists():
            shutil.rmtree(self.run)
        assert not hung, "the daemon does not end when it is told to"

    def _end_sandboxes(self) -> None:
        """With the help of another daemon, if there are any, and close the pool."""
        places = self.run / "sandboxes"
        if places.exists() and any(place.name != "empty" for place in places.iterdir()):
            self.start("--stop-sandboxes")
            self.stop()
        BtrfsPool(self.state).close()


def tasks_of(sandbox: str) -> list[int]:
    """Host pids of a sandbox's processes: its host name is part of its id, and only they can see it."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if f"/pagurus/{sandbox}" in (entry / "cgroup").read_text().split("\n0::", 1)[-1]:
                    result.append(int(entry.name))
    return result


def kill_everything(sandbox: str) -> None:
    """kill -9 for all processes of a sandbox; some die with others before their turn comes.

    Pid 1 first, whatever its number: a command that dies while it lives has ended by a signal, and that is its result.
    """
    with contextlib.suppress(AssertionError, ProcessLookupError):  # it is dead already
        os.kill(init_of(sandbox), signal.SIGKILL)
    for task in tasks_of(sandbox):
        with contextlib.suppress(ProcessLookupError):
            os.kill(task, signal.SIGKILL)


def init_of(sandbox: str) -> int:
    """Host pid of a sandbox's pid 1."""
    for pid in tasks_of(sandbox):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text()
            if status.partition("NSpid:")[2].partition("\n")[0].split()[1:] == ["1"]:
                return pid
    raise AssertionError(f"no pid 1 in {sandbox}")


async def until(condition: Callable[[], T | Awaitable[T]], what: str = "", seconds: float = TIMEOUT) -> T:
    """What `condition` (plain or async) returns once that is true. For what nobody tells."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        result: T = await value if inspect.isawaitable(value) else value  # type: ignore[assignment]
        if result:
            return result
        assert time.monotonic() < deadline, f"never: {what or condition}"
        await asyncio.sleep(0.02)


def free_port() -> int:
    """A port to listen on, below those that the kernel gives to callers: nobody takes it while a daemon is away."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
