"""Programs that are no part of checkpoints, through a real daemon: judged, captured, restored, forked, adopted."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from daemon.catalogue import ProgramRow
from daemon.turns import excluded
from sandbox import Client, Sandbox
from sandbox.container.excluded import ExclusionGroup
from sandbox.container.supervisor import StartedSupervisor
from sandbox.errors import Conflict, NotFound
from sandbox.messages import ProgramKind, ProgramState, Verdict
from sandbox.procfs import task_of
from sandbox.sdk.processes import Process
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, until
from tests.support.programs import Program

# It works at every line that it is told, with threads and with children; `stay` leaves one behind.
WORKER = r"""
import subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
state = bytearray(8 << 20)
for line in sys.stdin:
    state[::4096] = bytes([len(line) % 256]) * (len(state) // 4096)
    threading.Thread(target=len, args=(line,)).start()
    word, _, rest = line.strip().partition(" ")
    if word == "run":
        subprocess.run(rest, shell=True, stdout=subprocess.DEVNULL)
    elif word == "stay":
        subprocess.Popen(rest, shell=True, stdin=subprocess.DEVNULL)
    print("did", line.strip(), flush=True)
"""


async def worker(sb: Sandbox) -> Process:
    await sb.files.write("/worker.py", WORKER)
    return await sb.processes.start(["python3", "/worker.py"], stdin="pipe", excluded=True)


async def reported(process: Process, line: str) -> None:
    """Tell it a line; returns when it has done what that says."""
    before = await process.logs()
    await process.write(line + "\n")

    async def has_done() -> bool:
        return f"did {line}\n".encode() in (await process.logs(before)).stdout

    await until(has_done, line)


async def verdict_of(sb: Sandbox) -> Verdict | None:
    return (await sb.exec("true")).verdict


async def test_what_it_does_in_memory_makes_no_checkpoint(sb: Sandbox) -> None:
    process = await worker(sb)
    assert process.info.excluded
    assert process.info.verdict is Verdict.FILES
    await verdict_of(sb)
    for _ in range(3):
        await reported(process, "run cat /etc/passwd")
        assert await verdict_of(sb) is Verdict.NONE
    await reported(process, "run echo x > /x")
    assert await verdict_of(sb) is Verdict.FILES
    await reported(process, "stay exec sleep 1000")
    await reported(process, f"run {ASLEEP}")
    assert await verdict_of(sb) is Verdict.PROCESSES
    await reported(process, "run cat /x")
    assert await verdict_of(sb) is Verdict.NONE


async def test_after_a_restore_and_in_a_fork_it_is_not_there(host: Client, sb: Sandbox) -> None:
    process = await worker(sb)
    await reported(process, "run echo one > /x")
    first = await sb.checkpoint("without a process")
    await reported(process, "stay exec sleep 1000")
    await reported(process, f"run {ASLEEP}")
    second = await sb.checkpoint("with one")
    await reported(process, "run echo two > /x")
    for checkpoint, sleeping in ((first, 0), (second, 1), (first, 0)):
        await sb.restore(checkpoint, verify=True)
        (child,) = await host.fork(checkpoint, 1)
        try:
            for one in (sb, child.sandbox):
                counted = await one.exec("pgrep -c sleep; pgrep -c python3; cat /x", ends_turn=False)
                assert counted.text == f"{sleeping}\n0\none\n"
                assert await one.processes.list() == []
        finally:
            await child.sandbox.remove()
    with pytest.raises(NotFound):
        await process.refresh()
    again = await worker(sb)
    await reported(again, "run cat /x")
    await verdict_of(sb)
    await reported(again, "run cat /x")
    assert await verdict_of(sb) is Verdict.NONE


async def test_the_next_daemon_keeps_it_apart(daemon: Daemon) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE)
        process = await worker(sandbox)
        await reported(process, "run true")
    daemon.kill()
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        sandbox = await host.get(sandbox.id)
        process = await sandbox.processes.get(process.id)
        assert process.info.excluded
        assert process.info.state is ProgramState.RUNNING
        assert await verdict_of(sandbox) is Verdict.BOTH  # the gap
        await reported(process, "run cat /etc/passwd")
        assert await verdict_of(sandbox) is Verdict.NONE
        head = (await sandbox.tree())[-1]
        await process.kill()
        assert await process.wait() == 137
        assert await verdict_of(sandbox) is Verdict.NONE
        await sandbox.restore(head, verify=True)
        assert await sandbox.processes.list() == []
        await sandbox.remove()


# --------------------------------------------------------------------------- who may be one


class Scene:
    """A container and an inspector that only remember; the processes are real ones of the host."""

    def __init__(self, *pids: int) -> None:
        self.noted: list[int] = []
        self.excluded = ExclusionGroup()
        self.spec = SimpleNamespace(id="s-1")
        self.cgroup = SimpleNamespace(id=7)
        self.pids = [*pids]

    def tasks(self) -> list[int]:
        return self.pids

    def exclude(self, _cgroup: int, pid: int) -> None:
        self.noted.append(pid)


def test_a_program_must_be_the_child_of_its_attendant() -> None:
    with Program(["sleep", "1000"]) as other:
        me = os.getpid()
        scene = Scene(me, other.pid)
        try:
            with pytest.raises(Conflict):  # what claims to be the attendant of a process is that process' child
                excluded.first(scene, scene, StartedSupervisor(host_pid=other.pid, supervisor=other.pid, program=me))
            assert scene.noted == []
            result = excluded.first(scene, scene, StartedSupervisor(host_pid=me, supervisor=me, program=other.pid))
            assert scene.noted == [me, other.pid]
            assert scene.excluded.pids() == {me, other.pid}
            row = ProgramRow(id="p-1", kind=ProgramKind.PROCESS, command="sleep", started_at=0.0, excluded=result)
        finally:
            other.end()
    assert scene.excluded.pids() == {me}
    later = Scene(me)
    excluded.again(later, later, [row])  # the program has ended meanwhile
    assert later.noted == [me]
    assert excluded.retained({"p-1": row}) == {}
    for item in (scene, later):
        item.excluded.clear()


def test_a_later_process_of_the_same_number_is_not_it() -> None:
    me = os.getpid()
    task = task_of(me)
    assert task is not None
    scene = Scene(me)
    row = ProgramRow(id="p-1", kind=ProgramKind.PROCESS, command="x", started_at=0.0, excluded=[(me, task.started - 1)])
    excluded.again(scene, scene, [row])
    assert scene.noted == []
    assert scene.excluded.pids() == frozenset()
