"""What a host tells the coordinator of itself: what it has, what it holds, how busy it is.

Owns: reading these from the kernel and the daemon. Does not own: what follows (:mod:`coordinator.decide`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from daemon.host.fence import boot, clock
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.errors import PagurusError
from sandbox.messages import CheckpointState
from sandbox.messages.cluster import HostedSandbox, HostReport


async def report(host: Host) -> HostReport:
    """As it is now."""
    newest = _newest(host)
    here = [_hosted(live, newest.get(live.row.id, "")) for live in host.live_sandboxes.values()]
    return await asyncio.to_thread(_report, host, here)


def _report(host: Host, sandboxes: list[HostedSandbox]) -> HostReport:
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    disk = os.statvfs(host.places.stored)
    return HostReport(
        clock=clock(),
        boot=boot(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=int(memory["MemTotal"].split()[0]) << 10,
        memory_free=int(memory["MemAvailable"].split()[0]) << 10,
        disk_bytes=disk.f_frsize * disk.f_blocks,
        disk_free=disk.f_frsize * disk.f_bavail,
        load=float(Path("/proc/loadavg").read_text().split()[0]),
        images=_images(host),
        sandboxes=sandboxes,
    )


def _images(host: Host) -> dict[str, str]:
    found = {}
    for name in host.images.list():
        try:
            found[name] = host.images.resolve(name).digest
        except (PagurusError, OSError):  # removed meanwhile, or damaged: nothing starts from it
            continue
    return found


def _newest(host: Host) -> dict[str, str]:
    """The newest durable checkpoint of each sandbox that has one of its own."""
    newest: dict[str, tuple[int, str]] = {}
    for row in host.services.checkpoints.values():
        if row.state is CheckpointState.DURABLE and not row.damaged:
            newest[row.sandbox] = max(newest.get(row.sandbox, (0, "")), (row.number, row.id))
    return {sandbox: id for sandbox, (_, id) in newest.items()}


def _hosted(live: LiveSandbox, durable: str) -> HostedSandbox:
    row = live.row
    return HostedSandbox(
        id=row.id,
        owner=row.owner,
        name=row.name,
        image=row.image,
        limits=row.limits,
        state=row.state.value,
        head=row.head,
        durable=durable,
        turn=row.turn,
        created_at=row.created_at,
        replicated_answers=row.replicated_answers,
    )
