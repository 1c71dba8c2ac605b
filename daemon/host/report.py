"""What a host reports to the coordinator: what it has, what it holds, how busy it is."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import msgspec

from daemon.catalogue import CheckpointRow
from daemon.host.expiry_watch import life
from daemon.host.fence import boot, clock
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox import procfs
from sandbox.errors import PagurusError
from sandbox.messages import CheckpointState
from sandbox.messages.cluster import SOLE, HostedSandbox, HostReport
from sandbox.messages.processes import HostUsage

ESTABLISHED = "01"  # among the states of a connection in /proc/net/tcp
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


async def report(host: Host) -> HostReport:
    """As it is now."""
    here = [_hosted(live, _durable(host, live)) for live in host.live_sandboxes.values()]
    inits = {live.row.id: live.container.init_pid for live in host.live_sandboxes.values() if _reaches_out(live)}
    result = await asyncio.to_thread(_report, host, here, inits)
    # As late as can be: the coordinator counts the lease from when this comes, others act for this host only after it.
    return msgspec.structs.replace(result, clock=clock())


def _report(host: Host, sandboxes: list[HostedSandbox], inits: dict[str, int | None]) -> HostReport:
    for item in sandboxes:
        if not item.bound and connected(inits.get(item.id)):
            item.bound = "connections to the outside"
    memory, disk = procfs.memory(), os.statvfs(host.places.stored)
    return HostReport(
        clock=0.0,  # looked at last
        boot=boot(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=memory["MemTotal"],
        memory_free=memory["MemAvailable"],
        disk_bytes=disk.f_frsize * disk.f_blocks,
        disk_free=disk.f_frsize * disk.f_bavail,
        load=_load(),
        images=_images(host),
        sandboxes=sandboxes,
    )


def host_usage(host: Host) -> HostUsage:
    """What the host has, and what of it is free. Blocks."""
    memory, disk, pool = procfs.memory(), os.statvfs(host.places.stored), host.services.capturer.pool.usage()
    return HostUsage(
        cpus=len(os.sched_getaffinity(0)),
        load=_load(),
        memory_bytes=memory["MemTotal"],
        memory_free=memory["MemAvailable"],
        disk_bytes=disk.f_frsize * disk.f_blocks,
        disk_free=disk.f_frsize * disk.f_bavail,
        pool_bytes=pool.total,
        pool_free=pool.free,
    )


def _load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def _images(host: Host) -> dict[str, str]:
    result = {}
    for name in host.images.list():
        try:
            result[name] = host.images.resolve(name).digest
        except (PagurusError, OSError):  # removed since, or damaged: nothing starts from it
            continue
    return result


def _durable(host: Host, live: LiveSandbox) -> CheckpointRow | None:
    """The newest durable checkpoint that the sandbox's state descends from, where it is one of its own."""
    checkpoints = host.services.checkpoints
    row = checkpoints.get(live.row.head)
    while row is not None and (row.state is not CheckpointState.DURABLE or row.damaged):
        row = checkpoints.get(row.parent or "")
    return row if row is not None and row.sandbox == live.row.id else None


def _reaches_out(live: LiveSandbox) -> bool:
    return live.container_or_none is not None and live.row.network.mode != "none"


def connected(init: int | None) -> bool:
    """Whether a TCP connection leads out of the network of this process."""
    for name in ("tcp", "tcp6") if init is not None else ():
        try:
            lines = Path(f"/proc/{init}/net/{name}").read_text().splitlines()[1:]
        except OSError:  # it has ended
            return False
        for _, _, remote, state, *_ in map(str.split, lines):
            if state == ESTABLISHED and remote.partition(":")[0] not in LOOPBACK:
                return True
    return False


def _hosted(live: LiveSandbox, durable: CheckpointRow | None) -> HostedSandbox:
    row = live.row
    existing = life(live)
    return HostedSandbox(
        id=row.id,
        owner=row.owner,
        name=row.name,
        image=row.image,
        limits=row.limits,
        state=row.state.value,
        head=row.head,
        durable="" if durable is None else durable.id,
        durable_turn=0 if durable is None else durable.turn,
        turn=row.turn,
        created_at=row.created_at,
        replicated_answers=row.replicated_answers,
        labels={name: value for name, value in row.labels.items() if name.startswith(SOLE)},
        idle_s=None if existing.busy else max(0.0, time.time() - existing.used),
        bound="its mounts" if row.mounts else "",
    )
