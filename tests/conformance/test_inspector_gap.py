"""What happens in a sandbox while no daemon watches it is in the first verdict of the next one.

The daemon is killed with SIGKILL; then the host itself puts programs into its sandboxes, past any daemon, which change
a file in one and end a process in the other.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.container.cgroup import PARENT, hierarchy
from tests.crash.torture.enter import Enter, compiled
from tests.support.daemon_host import IMAGE, Daemon, init_of, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def enter(tmp_path: Path) -> Iterator[Enter]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: run `make setup`")
    helper = Enter(compiled("enter.c", tmp_path / "enter"))
    try:
        yield helper
    finally:
        helper.close()


async def test_a_gap_hides_nothing(daemon: Daemon, enter: Enter) -> None:
    async with daemon.client() as host:
        for name in ("files", "processes"):
            sandbox = await host.create(IMAGE, name=f"gap-{name}")
            await sandbox.exec("echo before > /kept; setsid sleep 1000000 >/dev/null 2>&1 &")
            await sandbox.durable(await sandbox.exec("true"))
    identities = {}
    async with daemon.client() as host:
        for name in ("files", "processes"):
            identities[name] = (await host.get(f"gap-{name}")).id
    daemon.kill()
    scripts = {"files": "echo while nobody looked > /kept", "processes": "kill -9 $(pidof sleep)"}
    for name, script in scripts.items():
        group = hierarchy().unified / PARENT / identities[name]
        done = enter.run("setns", init_of(identities[name]), group, group, ["/bin/sh", "-c", script])
        assert done.exit_code == 0, done.output
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        changed = await host.get("gap-files")
        first = await changed.exec("true")
        assert first.verdict.files
        await changed.exec("rm /kept")
        await changed.restore(await changed.durable(first))
        assert (await changed.exec("cat /kept")).text == "while nobody looked\n"
        ended = await host.get("gap-processes")
        first = await ended.exec("true")
        assert first.verdict.processes
        await ended.restore(await ended.durable(first))
        assert (await ended.exec("pidof sleep || echo none")).text == "none\n"
        await ended.exec("true")
        await ended.exec("true")
        assert (await ended.exec("true")).verdict == "none"  # and not for ever
