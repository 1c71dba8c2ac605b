"""Routes for watching: what all sandboxes use, what the host has left, and what it can do.

Guarantee: however many callers watch, the control groups are read once in an interval.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from daemon.api.route import Area
from daemon.auth.visibility import visible
from daemon.doctor import DoctorFinding, examine
from daemon.host.host import Host
from daemon.host.report import host_usage
from daemon.turns.turns import LiveSandbox
from sandbox.container import usage
from sandbox.messages.processes import HostUsage, SandboxUsage

AREA = Area()
INTERVAL = 3.0  # seconds for which a reading is good
EXAMINED = 30.0  # seconds for which the doctor's findings are


class Readings:
    """What the sandboxes of a host used when they were last read."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._latest: list[tuple[str, SandboxUsage]] = []  # with the owner of each
        self._one = asyncio.Lock()

    async def latest(self, host: Host) -> list[tuple[str, SandboxUsage]]:
        """A reading that is not older than the interval."""
        async with self._one:
            if time.monotonic() - self._read_at > INTERVAL:
                running = [live for live in host.live_sandboxes.values() if live.container_or_none is not None]
                self._latest = await asyncio.to_thread(_read, running)
                self._read_at = time.monotonic()
            return self._latest


class Examination:
    """What the doctor found last. However many callers wait, one examination runs."""

    def __init__(self) -> None:
        self._ended_at = float("-inf")
        self._latest: list[DoctorFinding] = []
        self._one = asyncio.Lock()

    async def latest(self, host: Host) -> list[DoctorFinding]:
        async with self._one:
            if time.monotonic() - self._ended_at > EXAMINED:
                self._latest = await host.services.aside.run(examine, sandbox="doctor")
                self._ended_at = time.monotonic()
            return self._latest


READINGS: web.AppKey[Readings] = web.AppKey("readings", Readings)
EXAMINATION: web.AppKey[Examination] = web.AppKey("examination", Examination)


def _read(running: list[LiveSandbox]) -> list[tuple[str, SandboxUsage]]:
    result = []
    for live in running:
        container = live.container_or_none
        reading = None if container is None else usage.read_briefly(live.row.id, container)
        if reading is not None:
            result.append((live.row.owner, reading))
    return result


@AREA("GET", "/v1/usage")
async def _usage(request: web.Request, host: Host) -> list[SandboxUsage]:
    """What the running sandboxes of the caller use; an administrator sees all. At most a few seconds old."""
    return [reading for owner, reading in await request.app[READINGS].latest(host) if visible(owner)]


@AREA("GET", "/v1/usage/host", scope="monitor")
async def _host_usage(host: Host) -> HostUsage:
    """What the host has, and what of it is free."""
    return await asyncio.to_thread(host_usage, host)


@AREA("GET", "/v1/doctor", scope="admin")
async def _doctor(request: web.Request, host: Host) -> list[DoctorFinding]:
    """What this host can do, found out by doing it. Takes seconds."""
    return await request.app[EXAMINATION].latest(host)
