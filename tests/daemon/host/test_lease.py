"""The lease of a host, beside a daemon that dies: nothing runs without one, and nothing stays still with one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from daemon.host.fence import boot, clock
from sandbox import Client
from sandbox.errors import Conflict
from sandbox.messages import SandboxInfo
from sandbox.messages.cluster import ArriveRequest, HostReport, LeaseRequest
from tests.support.cluster import apart, frozen
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, missing, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return apart(Daemon(tmp_path))


def watchers(daemon: Daemon) -> list[int]:
    result = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"daemon.fence" in words and str(daemon.run).encode() in words:
                result.append(int(entry.name))
    return result


async def grant(host: Client, seconds: float) -> None:
    await host.call("POST", "/v1/host", HostReport, LeaseRequest(until=clock() + seconds, boot=boot()))


async def test_with_its_watcher_dead_too_a_daemon_that_begins_keeps_still_what_has_no_lease(daemon: Daemon) -> None:
    daemon.start()
    try:
        async with daemon.client() as host:
            sandbox = await host.create(IMAGE)
            retained = await sandbox.durable(await sandbox.exec(f"sleep 1000 > /dev/null 2>&1 & {ASLEEP}"))
            await grant(host, 2.0)
        await until(lambda: watchers(daemon), "its lease is watched")
        daemon.kill()
        for pid in watchers(daemon):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(2.0)
        assert not frozen(daemon, sandbox.id)  # nobody is there to see that its lease is over
        await asyncio.to_thread(daemon.start)
        await until(lambda: frozen(daemon, sandbox.id), "it stands still")
        async with daemon.client() as host:
            for ahead in (True, False):
                target = ArriveRequest(id=sandbox.id, ahead=ahead)
                with pytest.raises(Conflict, match="coordinator"):
                    await host.call("POST", f"/v1/checkpoints/{retained.id}/arrive", SandboxInfo, target)
            await grant(host, 60.0)
            await until(lambda: not frozen(daemon, sandbox.id), "it goes on")
            assert (await (await host.get(sandbox.id)).exec("pgrep -c sleep")).text == "1\n"
    finally:
        (daemon.run / "lease").unlink(missing_ok=True)
        daemon.clean()
