"""One sandbox keeps the daemon busy as well as it can; what its neighbours and its remover wait for goes on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from sandbox import CheckpointFailed, Client, Conflict, Limits, Sandbox
from sandbox.messages import CheckpointState
from tests.support.daemon_host import IMAGE, Daemon, missing, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PARENT = """
import ctypes, os, time
if ctypes.CDLL(None).syscall(56, 0x4000 | 17, 0, 0, 0, 0) == 0:
    with open('/tmp/child.new', 'w') as file: file.write(str(os.getpid()))
    os.rename('/tmp/child.new', '/tmp/child')
    while True: time.sleep(1)
"""


def readers(daemon: Daemon) -> list[int]:
    """Processes of the daemon that do long work."""
    assert daemon.process is not None
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"daemon.aside" in words and int(parent) == daemon.process.pid:
                result.append(int(entry.name))
    return result


async def slowed(daemon: Daemon, sandbox: Sandbox, checkpoint: str) -> None:
    """The process that reads next for the daemon stands still: whatever it does takes as long as one likes."""
    while True:
        await sandbox.diff(checkpoint)
        result = await asyncio.to_thread(readers, daemon)
        if len(result) == 1:
            break
        await asyncio.sleep(0.2)  # one that hashed beside it ends when it had nothing to do for a while
    os.kill(result[0], signal.SIGSTOP)


@pytest.mark.parametrize("what", ["verify", "diff", "commit"])
async def test_long_work_ends_with_who_asked_and_keeps_nobody(own: Daemon, what: str) -> None:
    async with own.client() as host, own.client() as leaving:
        sandbox, neighbour = await host.create(IMAGE), await host.create(IMAGE)
        done = await sandbox.exec("echo something > /here")
        made = await sandbox.durable(done)

        async def hashed() -> int:
            return (await host.statistics()).store["hashed"]

        await until(hashed, "its files are hashed, and that process is free")
        await slowed(own, sandbox, made.id)
        mine = await leaving.get(sandbox.id)
        acts = {
            "verify": lambda: leaving.store.verify(made.id),
            "diff": lambda: mine.diff(made.id),
            "commit": lambda: leaving.images.commit(made, "made"),
        }
        requested = asyncio.ensure_future(acts[what]())
        while not (await host.statistics()).stages["read"]["running"]:
            assert not requested.done()
        changes = await neighbour.diff((await neighbour.tree())[0].id)
        assert [change.path for change in changes] == ["/etc/hosts"]  # its own name
        await sandbox.remove()  # it does not wait for that
        assert not requested.done()
        requested.cancel()
        await asyncio.gather(requested, return_exceptions=True)
        await leaving.close()

        async def over() -> bool:
            return not (await host.statistics()).stages["read"]["running"]

        await until(over, "the work is given up")
        await until(lambda: not (own.state / "pool" / "checkpoints" / made.id).exists(), "its content is removed")
        assert "made" not in [image.name for image in await host.images.list()]
        assert (await neighbour.exec("echo well")).text == "well\n"


async def test_a_task_that_does_not_stop_is_its_own_sandboxs_trouble(daemon: Daemon, host: Client) -> None:
    sandboxes = [await host.create(IMAGE) for _ in range(4)]
    neighbour = await host.create(IMAGE)
    for item in sandboxes:
        await item.exec(
            f'setsid python3 -c "{PARENT}" >/dev/null 2>&1 & until [ -e /tmp/child ]; do :; done', ends_turn=False
        )
    turns = [asyncio.ensure_future(item.exec("sleep 1000 & date > /now")) for item in sandboxes]
    made = await neighbour.captured(await neighbour.exec("sleep 1000 & date > /now"))
    assert made.state in (CheckpointState.CAPTURED, CheckpointState.DURABLE)
    for turn in turns:
        with pytest.raises(CheckpointFailed, match=r"\[python3\] cannot be stopped: it waits for a vfork child") as why:
            await host.checkpoint((await turn).checkpoint or "", wait="captured")
        assert "start it with fork" in str(why.value)
    again = await sandboxes[0].exec("kill -9 $(cat /tmp/child)")
    assert "vfork child" in (again.checkpoint_error or "")  # the turn was owed, and said so
    saved = await sandboxes[0].captured(again)
    assert saved.state in (CheckpointState.CAPTURED, CheckpointState.DURABLE)
    for item in (*sandboxes, neighbour):
        await item.remove()


async def test_a_sandbox_is_removed_whose_checkpoint_cannot_begin(daemon: Daemon, host: Client) -> None:
    sandbox = await host.create(IMAGE)
    await sandbox.exec(
        f'setsid python3 -c "{PARENT}" >/dev/null 2>&1 & until [ -e /tmp/child ]; do :; done', ends_turn=False
    )
    await sandbox.exec("date > /now")
    await sandbox.remove()
    assert sandbox.id not in [item.id for item in await host.sandboxes()]


BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""


async def test_under_a_fork_bomb_a_checkpoint_says_what_is_wrong(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE, limits=Limits(processes=32, cpus=0.5)) as sandbox:
        await sandbox.exec(f"setsid python3 -c '{BOMB}' >/dev/null 2>&1 & sleep 0.5", ends_turn=False)
        with pytest.raises(Conflict, match="no process left: all 32 are in use"):
            while True:
                await sandbox.exec("true", ends_turn=False)
        for _ in range(2):
            try:
                await sandbox.captured(await sandbox.checkpoint())
            except CheckpointFailed as error:
                said = str(error)
                assert re.search("did not all stop within|no process left: all 32 are in use", said), said
                assert re.search("end some|raise Limits", error.hint or ""), error.hint
        await sandbox.restore((await sandbox.tree())[0].id)
        assert (await sandbox.exec("echo well")).text == "well\n"


async def test_a_sandbox_with_all_its_processes_is_captured(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE, limits=Limits(processes=16)) as sandbox:
        await sandbox.exec("for i in $(seq 40); do sleep 1000 & done 2>/dev/null", ends_turn=False)
        with pytest.raises(Conflict, match="no process left: all 16 are in use"):
            await sandbox.exec("true", ends_turn=False)
        made = await sandbox.captured(await sandbox.checkpoint())
        assert made.state in (CheckpointState.CAPTURED, CheckpointState.DURABLE)
        await sandbox.restore(made)
        with pytest.raises(Conflict, match="no process left: all 16 are in use"):
            await sandbox.exec("true", ends_turn=False)
