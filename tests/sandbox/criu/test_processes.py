"""Dump, kill, restore, compare, go on: real processes in real sandboxes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.content import dumpfile
from sandbox.criu import dump, equality
from sandbox.criu.open_files import held_files
from sandbox.differences import differences
from sandbox.errors import CheckpointFailed, NotEqual, RestoreFailed
from tests.support import checkpoint_programs_held
from tests.support.checkpoint_programs import ALL, CHECK, LISTENER, MEMORY, SHELL, python_program
from tests.support.checkpoint_support import Bench, shell
from tests.support.daemon_host import ASLEEP
from tests.support.programs import Program

PROGRAMS = ALL | checkpoint_programs_held.ALL


@pytest.mark.parametrize("name", list(PROGRAMS))
async def test_what_is_restored_equals_and_goes_on(bench: Bench, name: str) -> None:
    start, check = PROGRAMS[name]
    sb = await bench.maker.create()
    await shell(sb, start)
    saved = await bench.save(sb)
    assert await shell(sb, check) == "good\n"  # left running
    for source in (saved.capture.dir, saved.dump):
        await bench.kill_and_restore(sb, saved, source)
        assert await shell(sb, check) == "good\n"


# Ends all of its children as soon as there is a file, which is made between the checkpoint and the restore.
IMPATIENT = python_program("""
null = subprocess.DEVNULL
children = [subprocess.Popen(['sleep', '9999'], stdout=null, stderr=null) for _ in range(80)]
open('/t/ready', 'w').close()
while not os.path.exists('/t/go'): pass
for one in children: one.kill()
for one in children: one.wait()
open('/t/ended', 'w').close()
""")


async def test_what_runs_first_may_end_all_others(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, IMPATIENT)
    saved = await bench.save(sb)
    for _ in range(3):
        await sb.kill()
        tree = bench.snapshot(saved.tree, readonly=False)
        (tree / "upper" / "t" / "go").touch()
        await sb.remount(tree)
        await bench.checkpointer.restore(sb, saved.capture.dir)
        assert await shell(sb, "while [ ! -e /t/ended ]; do sleep 0.05; done; pgrep -c sleep || true") == "0\n"


async def test_an_idle_sandbox_keeps_its_confinement(bench: Bench) -> None:
    sb = await bench.maker.create()
    questions = (
        "grep -E 'Cap|NoNew|Seccomp' /proc/1/status /proc/self/status; cat /proc/self/uid_map /proc/self/cgroup; "
        "readlink /proc/1/exe; ulimit -n; hostname; cat /proc/self/mountinfo | cut -d' ' -f5-9 | sort"
    )
    before = await shell(sb, questions)
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, questions) == before


async def test_forks_live_beside_the_original(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, LISTENER[0] + "; echo 1 > /t/mine; chown 1000 /t/mine")
    saved = await bench.save(sb)
    for number in range(4):
        tree = bench.snapshot(saved.tree, readonly=False)
        child = await bench.maker.prepare(
            tree=tree, uid_base=90_000_000 + 65_536 * number, hostname=f"child-{number}", image=sb.spec.image
        )
        report = await bench.checkpointer.restore(child, saved.dump, verify=True)
        assert report.verified
        assert await shell(child, CHECK) == "good\n"
        assert await shell(child, "hostname; stat -c %u /t/mine") == f"child-{number}\n1000\n"
        mapped = await shell(child, "cat /proc/1/uid_map")
        assert mapped.split() == ["0", str(90_000_000 + 65_536 * number), "65536"]
        await shell(child, f"echo {number} > /t/mine")
    assert await shell(sb, "cat /t/mine") == "1\n"
    assert await shell(sb, CHECK) == "good\n"


async def test_an_older_checkpoint_after_newer_changes(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, LISTENER[0] + "; echo old > /t/state")
    old = await bench.save(sb)
    await shell(sb, f"echo new > /t/state; pkill python3; sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    new = await bench.save(sb)
    await bench.kill_and_restore(sb, old, old.dump)
    assert await shell(sb, "cat /t/state; pgrep -c sleep; " + CHECK) == "old\n0\ngood\n"
    await bench.kill_and_restore(sb, new, new.dump)
    assert await shell(sb, "cat /t/state; pgrep -c sleep") == "new\n1\n"


async def test_newer_files_under_older_processes(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, LISTENER[0])
    saved = await bench.save(sb)
    before = held_files(sb)
    await shell(sb, "echo later > /t/later; echo more >> /etc/motd")
    assert held_files(sb) == before  # nothing that a process holds was touched
    newer = bench.snapshot(sb.tree, readonly=False)
    await sb.kill()
    await sb.remount(newer)
    await bench.checkpointer.restore(sb, saved.dump, verify=True)
    assert await shell(sb, "cat /t/later; " + CHECK) == "later\ngood\n"


async def test_a_changed_held_file_is_noticed_and_refused(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, ALL["files"][0])
    saved = await bench.save(sb)
    before = held_files(sb)
    await shell(sb, "echo grown >> /t/data")
    assert before.changes(held_files(sb)) == ["/t/data: changed while held"]
    newer = bench.snapshot(sb.tree, readonly=False)
    await sb.kill()
    await sb.remount(newer)
    with pytest.raises(RestoreFailed, match=r"/?t/data") as caught:
        await bench.checkpointer.restore(sb, saved.dump)
    assert "captured both" in str(caught.value)
    assert sb.tasks() == []


def alongside(init: int) -> tuple[Program, int]:
    """A process that entered the sandbox's pid namespace from outside, and its pid."""
    entering = Program(["nsenter", "-t", str(init), "-p", "-m", "sleep", "1000"])
    children = Path(f"/proc/{entering.pid}/task/{entering.pid}/children")
    while not (result := children.read_text().split()):  # nsenter forks to enter the pid namespace
        time.sleep(0.01)
    return entering, int(result[0])


async def test_a_process_beside_pid_1_is_not_left_out_silently(bench: Bench) -> None:
    sb = await bench.maker.create()
    assert sb.init_pid is not None
    entering, child = await asyncio.to_thread(alongside, sb.init_pid)
    try:
        (sb.cgroup.path / "cgroup.procs").write_text(str(child))
        with pytest.raises(CheckpointFailed, match="not below pid 1") as caught:
            await bench.save(sb)
        assert "1 of 2" in str(caught.value)
        assert sb.alive
    finally:
        os.kill(child, signal.SIGKILL)
        await asyncio.to_thread(entering.end)
    await bench.save(sb)


async def test_a_dump_of_killed_processes_is_no_checkpoint(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, LISTENER[0])
    failed = 0
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08):
        good = await bench.save(sb)
        saving = asyncio.ensure_future(bench.save(sb))
        await asyncio.sleep(delay)
        sb.cgroup.kill()
        try:
            source = await saving
        except CheckpointFailed:
            failed, source = failed + 1, good
        await bench.kill_and_restore(sb, source, source.capture.dir)
        assert await shell(sb, CHECK) == "good\n"
    assert failed


async def test_a_capture_cancelled_while_it_is_completed_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sb = await bench.maker.create()
    real, begun, go, done = dump._finish, threading.Event(), threading.Event(), threading.Event()

    def finish(*arguments: Any) -> dump.Dump:
        begun.set()
        assert go.wait(60)
        result = real(*arguments)
        done.set()
        return result

    monkeypatch.setattr(dump, "_finish", finish)
    images = bench.checkpointer.captures / "cancelled"
    capturing = asyncio.create_task(bench.checkpointer.capture(sb, images))
    await asyncio.to_thread(begun.wait, 60)
    capturing.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await capturing
    assert done.is_set() and not images.exists()
    monkeypatch.undo()
    await bench.save(sb)


async def test_a_refused_dump_says_why_and_leaves_the_sandbox_running(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, LISTENER[0])
    (pid,) = [pid for pid in sb.tasks() if pid != sb.init_pid]
    libc = ctypes.CDLL(None, use_errno=True)
    seize, detach = 0x4206, 17
    # A tracer that holds a process: CRIU cannot seize it. All on this thread, as ptrace wants it.
    assert libc.ptrace(seize, pid, None, None) == 0
    try:
        with pytest.raises(
            CheckpointFailed, match=r"process \d+ \[python3\] .* traced by a program outside of it"
        ) as caught:
            await bench.save(sb)
        assert "debugger" in caught.value.hint
    finally:
        interrupt = 0x4207
        libc.ptrace(interrupt, pid, None, None)
        os.waitpid(pid, 0x40000000)  # noqa: ASYNC222 - stopped at once
        libc.ptrace(detach, pid, None, None)
    assert await shell(sb, CHECK) == "good\n"
    await bench.save(sb)


async def test_a_difference_is_found_and_nothing_runs(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, SHELL[0])
    saved = await bench.save(sb)
    one = equality.processes(saved.capture.dir)
    assert differences(one, equality.processes(saved.capture.dir)) == []
    other = {**one, "process 1 ppid": 99}
    assert differences(one, other) == ["process 1 ppid: 0 became 99"]
    await sb.kill()
    tree = bench.snapshot(saved.tree, readonly=False)
    (tree / "upper/t/planted").write_text("x")
    await sb.remount(tree)
    with pytest.raises(NotEqual, match="planted"):
        await bench.checkpointer.restore(sb, saved.dump, verify=True, reference=saved.tree)
    assert sb.tasks() == []


async def test_a_second_dump_of_the_same_memory_stores_next_to_nothing(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, MEMORY[0])
    first, second = await bench.save(sb), await bench.save(sb)
    again = dumpfile.pack(second.capture.dir, bench.directory / "again.dump", bench.checkpointer.pages)
    assert first.capture.raw_bytes > 50 << 20
    assert again.new_pages == 0
    assert again.new_bytes < 64 << 10
    dumpfile.verify(again.path, bench.checkpointer.pages)


async def test_restored_processes_run_at_their_own_priority(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, f"nice -n 5 sleep 1000 > /dev/null 2>&1 & {ASLEEP}")
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    # Field 19 of stat: pid 1 as it was made, the sleeper as it asked to be.
    nice = "for n in /proc/[0-9]*; do read a < $n/stat && set -- $a && echo $2 ${19}; done 2>/dev/null"
    assert {"(init) 0", "(sleep) 5"} <= set((await shell(sb, nice)).splitlines())
