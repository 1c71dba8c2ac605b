"""A real coordinator for tests, over real daemons. Not a test module."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.harness.own_daemon import launch
from sandbox import Client
from sandbox.messages.cluster import HostInfo, HostRequest
from tests.crash.whole_host import GROUPS, group
from tests.support.daemon_host import Daemon


class Cluster:
    """A coordinator process over the directory `root`."""

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        self.run = Path(f"/run/pagurus-test-{os.getpid()}-{secrets.token_hex(4)}")
        self.socket = self.run / "cluster.sock"
        self.log = root / "coordinator.log"
        self.daemons: dict[str, Daemon] = {}
        self._options = ("--state", str(root / "state"), "--run", str(self.run), *options)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Cluster:
        self.process = launch(self.root / "x", self.root / "x", self.log, *self._options, module="coordinator")
        return self

    def client(self, *, timeout: float = 120.0) -> Client:
        return Client(self.socket, timeout=timeout)

    def options(self, *more: str) -> None:
        """For its next start."""
        self._options += more

    def add(self, name: str, daemon: Daemon, **labels: str) -> HostInfo:
        self.daemons[name] = daemon

        async def work() -> HostInfo:
            async with self.client() as client:
                target = HostRequest(address=str(daemon.socket), labels=labels)
                return await client.call("PUT", f"/v1/cluster/hosts/{name}", HostInfo, target)

        with ThreadPoolExecutor(1) as thread:  # a fixture may be asked for where a loop runs already
            return thread.submit(asyncio.run, work()).result()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def clean(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(timeout=120) == 0, self.log.read_text()[-3000:]
            self.process = None
        shutil.rmtree(self.run, ignore_errors=True)


def apart(daemon: Daemon) -> Daemon:
    """Its sandboxes have control groups of their own, as on a machine of their own: another host may have the same."""
    daemon.environment[GROUPS] = f"pagurus-{daemon.run.name}"
    return daemon


def frozen(daemon: Daemon, sandbox: str) -> bool:
    return "frozen 1" in (group(daemon, sandbox) / "cgroup.events").read_text()
