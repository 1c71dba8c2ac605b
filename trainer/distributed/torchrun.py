"""`Torchrun`: the ranks of a trainer on this machine, alone or as one node of several."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollout.engine.adopted import RoleRecord, hold, started
from rollout.engine.keep import die_with_parent
from sandbox.errors import Invalid
from trainer.distributed.head import HEAD
from trainer.distributed.watch import read
from trainer.distributed.worker import WorkPlan

GET_ADDRESS = 0x8915  # SIOCGIFADDR
KILL_TIMEOUT = 30.0  # seconds for a killed rank to be gone
# What torchrun writes of the first rank that failed.
CAUSE = re.compile(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """This machine among those of a trainer."""

    node: int
    nodes: int
    address: str  # rendezvous
    port: int
    own: str  # address at which other ranks reach this machine
    head: str = ""  # URL to which saves go, unless this is node 0

    def options(self) -> list[str]:
        meeting = ["--master-addr", self.address, "--master-port", str(self.port)]
        return ["--nnodes", str(self.nodes), "--node-rank", str(self.node), *meeting]

    def environment(self) -> dict[str, str]:
        link = link_of(self.own)
        return {"GLOO_SOCKET_IFNAME": link, "NCCL_SOCKET_IFNAME": link, HEAD: self.head}


def link_of(address: str) -> str:
    """Name of the interface with this IPv4 address. Raises Invalid."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # without an address
                answer = fcntl.ioctl(any_socket, GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise Invalid(f"no interface has the address {address}", hint="name this host's address")


def own_files(directory: Path) -> list[str]:
    """Options that have torchrun put its files into a run; else it leaves a directory in that of temporary files."""
    place = directory / "torchrun"
    shutil.rmtree(place, ignore_errors=True)  # of an earlier start
    return ["--log-dir", str(place)]


class Torchrun:
    """``torchrun.start()``, ``torchrun.poll()``, ``torchrun.stop()``. Ranks end when this process has ended."""

    def __init__(self, plan: WorkPlan, *, ranks: int):
        self.plan, self.ranks = plan, ranks
        self.directory = Path(plan.directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0

    def start(self, place: NodePlace | None = None) -> None:
        """All ranks of this machine; they continue from the last save."""
        self.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.end_left()
        for old in (*(self.directory / "beats").glob("rank-*"), *(self.directory / "results").glob("*.json")):
            old.unlink()
        path, pid = self.directory / "plan.json", os.getpid()
        owner = RoleRecord(name="owner", pid=pid, started=started(pid) or 0, at=time.time())
        plan = msgspec.structs.replace(self.plan, owner=owner)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.plan.threads), "TOKENIZERS_PARALLELISM": "false"}
        options = [*(["--standalone"] if place is None else place.options()), *own_files(self.directory)]
        with (self.directory / "ranks.log").open("ab") as log:
            self._began = log.tell()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts", "0"),
                    *("--nproc-per-node", str(self.ranks), "-m", "trainer.distributed.worker", str(path)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | ({} if place is None else place.environment()),
                start_new_session=True,
                preexec_fn=die_with_parent,  # ranks end by themselves, but it may still wait for other machines
            )

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        assert self._process is not None, "start() comes first"
        return self._process.poll()

    def wait(self, timeout: float) -> None:
        """For its end. Raises subprocess.TimeoutExpired."""
        assert self._process is not None, "start() comes first"
        self._process.wait(timeout)

    def stop(self) -> None:
        """Ends all ranks, whatever state they are in. Idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGSTOP)  # from here on it starts no process
            for pid in _children(self._process.pid):  # they have sessions of their own
                _kill(RoleRecord(name="rank", pid=pid, started=started(pid) or 0, at=0.0))
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self.end_left()

    def end_left(self) -> None:
        """Ranks whose torchrun or owner is gone, and that are stopped, so that they have not ended by themselves."""
        for beat in read(self.directory / "beats"):
            _kill(beat.process)

    def cause(self) -> str:
        """How it ended, in words."""
        with (self.directory / "ranks.log").open("rb") as log:
            log.seek(self._began)
            text = log.read().decode("utf-8", "replace")
        result = CAUSE.search(text[text.rfind("Root Cause") :])
        if result is None:
            return f"torchrun ended: {text.strip().splitlines()[-1] if text.strip() else 'no output'}"
        rank, code, pid = result.groups()
        how = f"was killed by signal {-int(code)}" if int(code) < 0 else f"ended with status {code}"
        return f"rank {rank} (pid {pid}) {how}"


def has_ended(rank: RoleRecord) -> bool:
    if (handle := hold(rank)) is None:
        return True
    os.close(handle)
    return False


def _children(pid: int) -> list[int]:
    """Of this process, as the kernel has them now."""
    return [int(item) for path in Path(f"/proc/{pid}/task").glob("*/children") for item in path.read_text().split()]


def _kill(rank: RoleRecord) -> None:
    """Ends this process, no other that got its number since, and waits for its end."""
    handle = hold(rank)
    if handle is None:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], KILL_TIMEOUT)
    finally:
        os.close(handle)
