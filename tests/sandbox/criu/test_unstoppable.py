"""A task that does not stop is found before anybody waits for it, named, and costs a slot nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sandbox.container import unstoppable
from sandbox.container.container import Container
from sandbox.container.unstoppable import StallDetector, Unstoppable, awaited, need_stoppable, stuck
from tests.support.checkpoint_support import Bench, shell
from tests.support.programs import END_TIMEOUT, Program

# Its child executes nothing and does not end, so the parent stays in clone(2). CLONE_VFORK without CLONE_VM.
PARENT = """
import ctypes, os, time
if ctypes.CDLL(None).syscall(56, 0x4000 | 17, 0, 0, 0, 0) == 0:
    open('/tmp/child', 'w').close()
    while not os.path.exists('/tmp/enough'): time.sleep(0.01)
    os._exit(0)
open('/tmp/free', 'w').close()
while True: time.sleep(1)
"""


@pytest.fixture
def parent() -> Iterator[int]:
    """The pid of a process of this host that waits for its vfork child."""
    code = "import ctypes, time\nif not ctypes.CDLL(None).syscall(56, 0x4000 | 17, 0, 0, 0, 0): time.sleep(1000)"
    process = Program([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not stuck([process.pid]) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield process.pid
    finally:
        os.killpg(process.pid, 9)
        process.wait(END_TIMEOUT)


def test_a_vfork_parent_is_found(parent: int) -> None:
    (result,) = stuck([parent, os.getpid(), 1 << 22])
    assert (result.pid, result.tid, result.vforked) == (parent, parent, True)
    assert stuck([parent]) == {result}  # the same wait


def test_what_sleeps_or_waits_for_a_signal_is_not() -> None:
    with Program(["sleep", "1000"]) as sleeper:
        assert stuck([sleeper.pid]) == set()


def test_whom_a_process_waits_for() -> None:
    code = "import os, time\nchild = os.fork() or time.sleep(1000)\nprint(child, flush=True)\nos.waitpid(child, 0)"
    waiter = Program([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert waiter.stdout is not None
        child = int(waiter.stdout.readline())
        deadline = time.monotonic() + 60
        while awaited(waiter.pid) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert awaited(waiter.pid) == child
        assert awaited(os.getpid()) is None
    finally:
        os.killpg(waiter.pid, 9)
        waiter.communicate(timeout=END_TIMEOUT)


def test_a_watch_tells_only_what_lasts_and_is_waited_for(parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    container = SimpleNamespace(tasks=lambda: [parent])
    watch = StallDetector(container, 0)
    monkeypatch.setattr(unstoppable, "awaited", lambda _: None)
    assert watch.poll() is None
    monkeypatch.setattr(unstoppable, "awaited", lambda _: parent)
    assert watch.poll() is None  # the first look
    deadline = time.monotonic() + 60
    while (result := watch.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert result is not None
    assert result.pid == parent
    monkeypatch.setattr(container, "tasks", list)  # it is not of this sandbox
    assert watch.poll() is None


async def test_nobody_waits_for_what_does_not_stop(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, "echo kept > /tmp/kept")
    await sb.exec(["sh", "-c", f'setsid python3 -c "{PARENT}" >/dev/null 2>&1 & until [ -e /tmp/child ]; do :; done'])
    with pytest.raises(Unstoppable, match="vfork child that neither executes"):
        await need_stoppable(sb)
    with pytest.raises(Unstoppable, match=r"\[python3\] cannot be stopped: it waits for a vfork child") as caught:
        await bench.save(sb)  # CRIU is stopped while it waits, and leaves the tasks as they were
    assert "fork" in (caught.value.hint or "")
    assert await shell(sb, "cat /tmp/kept") == "kept\n"
    await shell(sb, "touch /tmp/enough; until [ -e /tmp/free ]; do :; done")
    await need_stoppable(sb)
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, "cat /tmp/kept") == "kept\n"


async def test_a_sandbox_that_is_alone_is_not_waited_for(bench: Bench) -> None:
    sb: Container = await bench.maker.create()
    await need_stoppable(sb)
