"""Runs of clients: the rule, then sandboxes of a client that is killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from daemon.auth import access
from daemon.auth.access import CALLER
from daemon.host.runs import MAX_RUNS, MEMORY, Runs
from sandbox import Client
from sandbox.errors import Conflict, Invalid, TooMany
from tests.support.daemon_host import Daemon, until

CLIENT = """
import asyncio, sys
from sandbox import Client

async def main():
    async with Client(sys.argv[1]) as host, host.run("crashed", lease=8) as run:
        sb = await run.create("debian")
        await sb.fork(1)
        print(sb.id, flush=True)
        await sb.exec("sleep 100000", timeout=None)

asyncio.run(main())
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    CALLER.set(access.LOCAL)
    return Clock()


async def test_a_run_that_nobody_renews_ends_and_is_refused(tmp_path: Path, clock: Clock) -> None:
    runs = Runs(tmp_path / "runs.json", clock)
    await runs.renew("a", 10)
    clock.now = 9
    await runs.renew("a", 10)
    clock.now = 18.9
    assert await runs.expired() == set()
    runs.need_open("", {"pagurus.run": "a"})
    clock.now = 19
    assert await runs.expired() == {("", "a")}
    with pytest.raises(Conflict):
        await runs.renew("a", 10)
    with pytest.raises(Conflict):
        runs.need_open("", {"pagurus.run": "a"})
    runs.need_open("somebody", {"pagurus.run": "a"})  # another owner's run of this name
    clock.now = 19 + MEMORY
    assert await runs.expired() == set()
    await runs.renew("a", 10)


async def test_a_daemon_that_starts_gives_whole_leases(tmp_path: Path, clock: Clock) -> None:
    runs = Runs(tmp_path / "runs.json", clock)
    await runs.renew("a", 10)
    await runs.renew("b", 10)
    await runs.end("b")
    clock.now = 1000
    again = Runs(tmp_path / "runs.json", clock)
    again.load()
    assert await again.expired() == set()  # b's sandboxes may not have been removed: it ends once more
    clock.now = 1010
    assert await again.expired() == {("", "a"), ("", "b")}


async def test_runs_are_bounded(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.host.runs.MAX_RUNS", 3)
    assert MAX_RUNS > 3
    runs = Runs(tmp_path / "runs.json", clock)
    for name in "abc":
        await runs.renew(name, 10)
    with pytest.raises(TooMany):
        await runs.renew("d", 10)
    await runs.renew("a", 10)


# --------------------------------------------------------------------------- a real daemon


async def gone(host: Client, *labels: str) -> None:
    async def none() -> bool:
        return not [info for info in await host.sandboxes() if info.labels.get("pagurus.run") in labels]

    await until(none, "the sandboxes of the run are removed", 240)


async def test_kill_9_of_a_client_leaves_nothing_after_its_lease(host: Client, daemon: Daemon) -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(daemon.socket), stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    sandbox = (await program.stdout.readline()).decode().strip()
    assert len(await host.sandboxes({"pagurus.run": "crashed"})) == 2  # and its fork
    assert sandbox
    bystander = await host.create("debian")
    program.send_signal(signal.SIGKILL)
    await program.wait()
    await gone(host, "crashed")  # a command without a time limit is under way there
    with pytest.raises(Conflict):
        await host.create("debian", labels={"pagurus.run": "crashed"})
    assert [info.id for info in await host.sandboxes()] == [bystander.id]
    await bystander.remove()


async def test_a_run_ends_with_its_block(host: Client) -> None:
    async with host.run(lease=3600) as run:
        sb = await run.create("debian", labels={"x": "1"})
        await run.fork(await sb.checkpoint(), 2)
        assert [info.labels["x"] for info in await run.sandboxes() if "x" in info.labels] == ["1"]
        assert len(await run.sandboxes()) == 3
    assert await host.sandboxes() == []
    with pytest.raises(Conflict):
        await run.renew()


async def test_names_of_runs(host: Client) -> None:
    for wrong in ("-a", "a b", "x" * 101):
        with pytest.raises(Invalid):
            await host.run(wrong).renew()
    with pytest.raises(Invalid):
        await host.run("a", lease=0.01).renew()
