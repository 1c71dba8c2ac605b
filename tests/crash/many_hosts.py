"""Hosts of a cluster on one machine: each a daemon in a network namespace, with a pool and control groups of its own.

A kill takes all that a host is: its daemon, what watches its lease, its sandboxes and their shims.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
from pathlib import Path

from bench.harness import aftermath
from bench.harness.own_daemon import BenchHost, launch
from daemon.host.fence import HELD
from sandbox import Client
from sandbox.messages.cluster import HostInfo, HostRequest
from sandbox.messages.tokens import NewToken, TokenRequest
from tests.crash.daemon_in_netns import WHERE
from tests.crash.whole_host import GROUPS, group, remove_groups

PORT = 8700
CRIU = ("ld-linux", "pagurus-criu", "criu", "pagurus-shim")  # names of its processes begin so, or will in a moment
EXITING = 0x4  # PF_EXITING among a task's flags


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def dying(task: str) -> bool:
    """Whether it has ended, is ending, or will before it comes to anything else."""
    try:
        flags = int(Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[6])
        lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{task}/status").read_text().splitlines())
    except OSError:
        return True
    pending = int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)
    return bool(flags & EXITING or pending >> signal.SIGKILL - 1 & 1)


def traced(task: str) -> bool:
    """Whether whoever traces it has stopped it, or it has ended."""
    try:
        return Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[0] in "tZX"
    except OSError:
        return True


def is_init(task: str) -> bool:
    """Whether it is pid 1 of a sandbox."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{task}/status").read_text().splitlines():
            name, _, values = line.partition(":")
            if name == "NSpid":
                return len(values.split()) > 1 and values.split()[-1] == "1"
    return False


def named(task: str) -> str:
    """For people: its number and its program."""
    with contextlib.suppress(OSError):
        return f"{task}:{Path(f'/proc/{task}/comm').read_text().strip()}"
    return task


class NetHost(BenchHost):
    """Host number `number` of a :class:`Hosts`."""

    def __init__(self, directory: Path, image: Path, tag: str, number: int) -> None:
        super().__init__(directory, image, "tests.crash.daemon_in_netns")
        self.name, self.link, self.namespace = f"h{number}", f"{tag}v{number}", f"{tag}n{number}"
        self.address = f"10.97.{number + 1}.2"
        self.gateway = f"10.97.{number + 1}.1"
        self.environment = {WHERE: self.namespace, GROUPS: f"pagurus-{tag}-{number}"}

    def connect(self, rate: str) -> None:
        """Its namespace and its link, of `rate` both ways."""
        aftermath.note(command=["ip", "netns", "del", self.namespace])
        ip("netns", "add", self.namespace)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "up0", "netns", self.namespace)
        ip("addr", "add", f"{self.gateway}/24", "dev", self.link)
        ip("link", "set", self.link, "up")
        for words in (("addr", "add", f"{self.address}/24", "dev", "up0"), ("link", "set", "up0", "up")):
            ip("-n", self.namespace, *words)
        ip("-n", self.namespace, "link", "set", "lo", "up")
        shape = ["root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
        for place in ([], ["-n", self.namespace]):
            subprocess.run(["tc", *place, "qdisc", "add", "dev", "up0" if place else self.link, *shape], check=True)

    def serve(self) -> None:
        self.start("--listen", f"{self.address}:{PORT}", "--tls-self-signed")

    async def registration(self) -> HostRequest:
        """How a coordinator reaches it, with a token made for that."""
        async with self.client() as client:
            token = await client.call("POST", "/v1/tokens", NewToken, TokenRequest(name="cluster", scope="admin"))
        result = re.findall(r"fingerprint (sha256:\w+)", self.log.read_text())
        return HostRequest(address=f"https://{self.address}:{PORT}", token=token.text, ca=result[-1])

    def groups(self) -> list[str]:
        """Names of the control groups of its sandboxes."""
        with contextlib.suppress(OSError):
            return os.listdir(group(self, ""))
        return []

    def moves(self, sandbox: str) -> bool:
        """Whether processes of the sandbox are here that are not frozen."""
        try:
            events = (group(self, sandbox) / "cgroup.events").read_text()
        except OSError:
            return False
        return not ("populated 0" in events or "frozen 1" in events)

    def acts(self, sandbox: str) -> bool:
        """Whether processes of the sandbox run here now. One that is frozen and killed leaves the freezer to die.

        Pid 1 is ours, does nothing by itself, and waits alone where a sandbox is about to arrive.
        """
        try:
            moves = self.moves(sandbox) and not all(dying(task) or is_init(task) for task in self.tasks(sandbox))
            return moves and not self.waits(sandbox)
        except OSError:
            return False

    def waits(self, sandbox: str) -> bool:
        """Whether CRIU brings it back, and runs until it holds all of it, or it stands still here until it arrives."""
        tasks = self.tasks(sandbox)
        if any(named(task).partition(":")[2].startswith(CRIU) for task in tasks) or all(map(traced, tasks)):
            return True
        target = (group(self, sandbox) / "cgroup.freeze").read_text().strip() == "1"
        return target and (self.run / "sandboxes" / sandbox / HELD).exists()

    def tasks(self, sandbox: str) -> list[str]:
        return [task for item in group(self, sandbox).rglob("cgroup.threads") for task in item.read_text().split()]

    def switch(self, sandbox: str) -> str:
        """Whether its control group is to be frozen, and is, and what is in it."""
        with contextlib.suppress(OSError):
            target = (group(self, sandbox) / "cgroup.freeze").read_text().strip()
            events = " ".join((group(self, sandbox) / "cgroup.events").read_text().split())
            return f"to freeze {target}, {events}, {' '.join(map(named, (self.tasks(sandbox))))}"
        return "gone"

    def cut(self, off: bool) -> None:
        ip("-n", self.namespace, "link", "set", "up0", "down" if off else "up")  # no other way leads there

    def disconnect(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self.namespace)
        remove_groups(self)


class Hosts:
    """A coordinator and its hosts, gone at the end."""

    def __init__(self, directory: Path, image: Path, count: int, *, rate: str, options: list[str]) -> None:
        tag = f"pg{secrets.token_hex(2)}"
        self.directory = directory
        self.run = Path(f"/run/pagurus-bench-{os.getpid()}-{tag}")
        self.hosts = [NetHost(directory / f"h{number}", image, tag, number) for number in range(count)]
        self._rate, self._options = rate, options
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Hosts:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self) -> None:
        for host in self.hosts:
            await asyncio.to_thread(host.connect, self._rate)
        await asyncio.gather(*(asyncio.to_thread(host.serve) for host in self.hosts))
        words = ["--state", str(self.directory / "cluster"), "--run", str(self.run), *self._options]
        log = self.directory / "coordinator.log"
        nowhere = self.directory / "x"
        self._process = await asyncio.to_thread(launch, nowhere, nowhere, log, *words, module="coordinator")
        async with self.client() as client:
            for host in self.hosts:
                target = await host.registration()
                await client.call("PUT", f"/v1/cluster/hosts/{host.name}", HostInfo, target)

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self._process.wait)
        for host in self.hosts:
            (host.run / "lease").unlink(missing_ok=True)  # what stands still may end
            await asyncio.to_thread(host.clean)
            await asyncio.to_thread(host.disconnect)
        shutil.rmtree(self.run, ignore_errors=True)

    def client(self) -> Client:
        return Client(self.run / "cluster.sock", timeout=120.0)
