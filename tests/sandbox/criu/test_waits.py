"""No system call returns because of a dump or a restore: it goes on for what was left of it.

The program is that of `pagurus bench transparency`: each call is made in a process of its own, by its main thread and
by another one, and tells when it returned and whether with what it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from daemon import fence
from daemon.verdict.judge import judge
from ebpf.inspector import Inspector
from sandbox import paths
from sandbox.container.container import Container
from sandbox.criu.carried import frozen, waits
from sandbox.criu.tracking import userfault
from sandbox.errors import CheckpointFailed
from sandbox.messages import Limits, Verdict
from tests.support.checkpoint_programs import python_program
from tests.support.checkpoint_support import Bench, shell, started
from tests.support.container_support import Maker

SECONDS = 2  # that each call is to last
EARLY = 1500  # microseconds: some time-outs are in milliseconds
TIMEOUT = 60.0
GROUPS = {
    "sleeps": "nanosleep nanosleep_rest nanosleep_same clock_nanosleep clock_nanosleep_absolute sleep",
    "polls": "poll_pipe poll_forever poll_woken ppoll ppoll_mask ppoll_signal select pselect_mask",
    "epolls": "epoll_wait epoll_wait_forever epoll_wait_woken epoll_pwait epoll_pwait2 epoll_pwait2_mask",
    "futexes": "futex futex_forever futex_woken futex_bitset sem_wait cond_timedwait pthread_join",
    "signals": "sigtimedwait sigwaitinfo pause sigsuspend nanosleep_signal epoll_wait_signal",
    "messages": "semtimedop semop msgrcv msgsnd read_eventfd read_timerfd read_signalfd flock wait4",
    "sockets": "recv recv_timed read_timed recvmsg_udp_timed accept",
}

#: Calls that the kernel ends with EINTR after any interruption (signal(7)).
NEVER_RESTARTED = "epoll_wait epoll_pwait epoll_pwait2 semtimedop sigtimedwait recv_timed accept_timed"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: run `make setup`")
    made = tmp_path_factory.mktemp("waits") / "waits"
    source = paths.CHECKOUT / "tests" / "conformance" / "native" / "waits.c"
    subprocess.run(["cc", "-O2", "-static", "-pthread", "-o", made, source], check=True)
    return made


@pytest.fixture(scope="module")
def inspector() -> Iterator[Inspector]:
    if not paths.inspector_object().exists():
        pytest.skip(f"{paths.inspector_object()} is missing: run `make setup`")
    with Inspector.load() as loaded:
        yield loaded


@pytest_asyncio.fixture
async def observed(maker: Maker, tmp_path: Path, inspector: Inspector) -> AsyncIterator[Bench]:
    async with started(maker, tmp_path, inspector.notes) as made:
        yield made


async def sandbox(bench: Bench, inspector: Inspector | None, program: Path) -> Container:
    container = await bench.maker.prepare(limits=Limits(processes=1000))
    shutil.copy(program, container.tree / "upper" / "waits")
    if inspector is not None:
        inspector.watch(container.cgroup.id)  # before anything runs in it
    await container.start()
    return container


async def enter(container: Container, calls: str, seconds: float = SECONDS) -> None:
    """Start the calls; returns when all of them wait."""
    await shell(container, f"/waits {seconds} /tmp/r {calls} </dev/null >/tmp/said 2>&1 &")
    await until(container, "/tmp/r.ready")


async def until(container: Container, path: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while (await container.exec(["test", "-e", path])).exit_code:
        assert time.monotonic() < deadline, await shell(container, "cat /tmp/said")
        await asyncio.sleep(0.05)


def until_frozen(container: Container) -> None:
    deadline = time.monotonic() + TIMEOUT
    while "frozen 1" not in (container.cgroup.path / "cgroup.events").read_text():
        assert time.monotonic() < deadline


async def outcome(container: Container, seconds: float = SECONDS) -> dict[str, str]:
    """What is wrong with each call; "" when nothing is."""
    await until(container, "/tmp/r.done")
    result = {}
    for line in (await shell(container, "cat /tmp/r")).splitlines():
        name, place, expected, error, lasted, _end = line.split()
        early = int(lasted) < seconds * 1e6 - EARLY
        result[f"{name} {place}"] = "" if expected == "1" and not early else f"errno {error} after {lasted} us"
    return result


@pytest.mark.parametrize("group", GROUPS)
async def test_waits_go_on_after_dumps(observed: Bench, inspector: Inspector, program: Path, group: str) -> None:
    container = await sandbox(observed, inspector, program)
    await enter(container, GROUPS[group])
    for _ in range(3):
        await observed.save(container)
    result = await outcome(container)
    assert result == dict.fromkeys(result, "")
    assert len(result) == 2 * len(GROUPS[group].split())


@pytest.mark.parametrize("group", GROUPS)
async def test_waits_continue_after_freezes(observed: Bench, inspector: Inspector, program: Path, group: str) -> None:
    """As a checkpoint of the files alone freezes: without CRIU."""
    container = await sandbox(observed, inspector, program)
    await enter(container, GROUPS[group])
    for _ in range(3):
        container.cgroup.freeze()
        await asyncio.to_thread(until_frozen, container)
        await asyncio.to_thread(frozen.thaw, container, inspector.notes)
        await container.exec(["true"])
    result = await outcome(container)
    assert result == dict.fromkeys(result, "")
    assert len(result) == 2 * len(GROUPS[group].split())


async def test_waits_continue_after_a_helper_had_room(observed: Bench, inspector: Inspector, program: Path) -> None:
    """A sandbox with all the processes that it may have stands still while CRIU is started."""
    container = await sandbox(observed, inspector, program)
    await enter(container, NEVER_RESTARTED)
    thaw = functools.partial(frozen.thaw, container, inspector.notes)
    async with container.cgroup.capacity(container.spec.limits, thaw):
        await asyncio.to_thread(until_frozen, container)
    result = await outcome(container)
    assert result == dict.fromkeys(result, "")
    assert len(result) == 2 * len(NEVER_RESTARTED.split())


async def test_waits_continue_after_a_lease_was_renewed(
    observed: Bench, inspector: Inspector, program: Path, tmp_path: Path
) -> None:
    """The process that froze the sandbox has no notes of the inspector: waits may last longer, and none ends early."""
    container = await sandbox(observed, inspector, program)
    (tmp_path / "sandboxes" / container.spec.id).mkdir(parents=True)
    await enter(container, NEVER_RESTARTED)
    fence.freeze(tmp_path, True)
    await asyncio.to_thread(until_frozen, container)
    fence.freeze(tmp_path, False)
    result = await outcome(container)
    assert result == dict.fromkeys(result, "")
    assert len(result) == 2 * len(NEVER_RESTARTED.split())


@pytest.mark.parametrize("group", GROUPS)
async def test_waits_go_on_after_a_verified_restore(
    observed: Bench, inspector: Inspector, program: Path, group: str
) -> None:
    container = await sandbox(observed, inspector, program)
    await enter(container, GROUPS[group])
    saved = await observed.save(container)
    await observed.kill_and_restore(container, saved, saved.dump)
    result = await outcome(container)
    assert result == dict.fromkeys(result, "")
    assert len(result) == 2 * len(GROUPS[group].split())


@pytest.mark.parametrize("group", GROUPS)
async def test_waits_continue_after_a_restore_with_tracked_memory(
    observed: Bench, inspector: Inspector, program: Path, group: str
) -> None:
    """Each process is stopped once more before it runs, as one of them makes a userfaultfd."""
    container = await sandbox(observed, inspector, program)
    await shell(container, python_program("held = bytearray(os.urandom(24 << 20))\nserve(lambda: True)"))
    await enter(container, GROUPS[group])
    saved = await observed.save(container)
    await observed.kill_and_restore(container, saved, saved.capture.dir, verify=False)
    if userfault.supported():
        assert observed.checkpointer.expected_bytes(container, 1 << 30) < 1 << 28
    result = await outcome(container)
    assert result == dict.fromkeys(result, "")
    assert len(result) == 2 * len(GROUPS[group].split())


async def test_waits_go_on_where_nobody_noted_when_they_began(bench: Bench, program: Path) -> None:
    """As after a restart of the daemon: some last longer, none ends early."""
    container = await sandbox(bench, None, program)
    await enter(container, "nanosleep nanosleep_rest poll epoll_wait futex semtimedop recv_timed")
    await bench.save(container)
    result = await outcome(container)
    assert result == dict.fromkeys(result, "")


@pytest.mark.parametrize("restored", [False, True], ids=["live", "restored"])
async def test_waits_go_on_under_the_next_daemon(maker: Maker, tmp_path: Path, program: Path, restored: bool) -> None:
    """Only the kernel still knows which calls were interrupted by dumps of the daemon before, and when they end."""
    calls = "nanosleep nanosleep_rest clock_nanosleep clock_nanosleep_absolute poll futex cond_timedwait"
    seconds = 6
    with Inspector.load() as before, Inspector.load() as after:
        async with started(maker, tmp_path, before.notes) as bench:
            container = await sandbox(bench, before, program)
            await enter(container, calls, seconds)
            await bench.save(container)
            await bench.checkpointer.forget(container)
            before.unwatch(container.cgroup.id)
            after.watch(container.cgroup.id)
            bench.checkpointer._notes = after.notes
            for _ in range(2):
                saved = await bench.save(container)
            if restored:
                await bench.kill_and_restore(container, saved, saved.dump)
            result = await outcome(container, seconds)
    assert result == dict.fromkeys(result, "")
    assert len(result) == 2 * len(calls.split())


async def test_a_sleeper_that_was_dumped_has_not_worked(observed: Bench, inspector: Inspector, program: Path) -> None:
    container = await sandbox(observed, inspector, program)
    await enter(container, "nanosleep poll epoll_wait futex pause", 1000)
    for number in range(3):
        capture = observed.checkpointer.captures / f"quiet-{number}"
        await observed.checkpointer.capture(container, capture, on_frozen=lambda: inspector.mark(container.cgroup.id))
        assert (await container.exec(["true"])).exit_code == 0
        effects = inspector.read(container.cgroup.id)
        assert judge(effects).verdict is Verdict.NONE, effects


async def test_a_refused_dump_ends_no_wait(observed: Bench, inspector: Inspector, program: Path) -> None:
    container = await sandbox(observed, inspector, program)
    await enter(container, "nanosleep poll epoll_wait futex semtimedop")
    watching = "import os, ctypes; c = ctypes.CDLL(None); open('/tmp/w', 'w'); n = c.inotify_init1(0); "
    watching += "c.inotify_add_watch(n, b'/tmp/w', 2); f = open('/tmp/w'); os.unlink('/tmp/w'); "
    watching += "open('/tmp/watching', 'w'); import signal; signal.pause()"
    await shell(container, f'python3 -c "{watching}" </dev/null >/dev/null 2>&1 &')
    await until(container, "/tmp/watching")
    with pytest.raises(CheckpointFailed):
        await observed.save(container)
    result = await outcome(container)
    assert result == dict.fromkeys(result, "")


def test_a_file_of_another_form_tells_of_no_wait(tmp_path: Path) -> None:
    entry = struct.pack("<4i3Qq6Q", 7, 8, -4, 3, 232, 0x1002, 0x7000, 10**9, 0, 0, 0x5000, 1 << 60, 0x6FF0, 32)
    complete = struct.pack("<II", 0x31746957, 1) + entry
    (tmp_path / waits.NAME).write_bytes(complete)
    (one,) = waits.read(tmp_path)
    assert (one.process, one.thread, one.nr, one.left) == (7, 8, 232, 10**9)
    assert one.registers({"r10": 5, "ax": 1, "ip": 2})["r10"] != 5
    assert len(waits.pages(tmp_path, 7)) <= (1 << 24) // waits.PAGE + 3 and not waits.pages(tmp_path, 8)
    for wrong in (b"", complete[:-1], complete + b"x", b"\0" * 8, struct.pack("<II", 0x31746957, 1 << 31) + entry):
        (tmp_path / waits.NAME).write_bytes(wrong)
        assert waits.read(tmp_path) == []


#: name -> number of the call that it waits in, and how a program gets there.
INTERRUPTED = {
    "read": (0, "ends = os.pipe(); os.read(ends[0], 1)"),
    "write": (1, "ends = os.pipe(); os.write(ends[1], bytes(1 << 20))"),
    "recv": (45, "ends = socket.socketpair(); ends[0].recv(1)"),
    "recvmsg": (47, "ends = socket.socketpair(); ends[0].recvmsg(1)"),
    "accept": (288, "one = socket.create_server(('127.0.0.1', 0)); one.accept()"),
    "wait4": (61, "os.waitpid(os.posix_spawn('/bin/sleep', ['sleep', '1000'], {}), 0)"),
    "pause": (34, "signal.pause()"),
    "sleep": (230, "time.sleep(1000)"),
}


async def test_a_signal_that_comes_while_frozen_ends_the_call(observed: Bench, inspector: Inspector) -> None:
    """Python runs a handler when a call returns: one that was entered again behind the signal would never do."""
    container = await sandbox(observed, inspector, Path("/bin/true"))
    for name, (_, call) in INTERRUPTED.items():
        handler = f"signal.signal(signal.SIGUSR1, lambda *_: open('/tmp/{name}', 'w'))"
        program = f"import os, signal, socket, time; {handler}; {call}"
        await shell(container, f'python3 -c "{program}" waits-{name} </dev/null >/dev/null 2>&1 &')
    waiting = {await asyncio.to_thread(until_waiting, container, name): name for name in INTERRUPTED}

    def interrupt() -> None:
        for pid in waiting:
            os.kill(pid, signal.SIGUSR1)

    await observed.save(container, on_frozen=interrupt)
    for name in INTERRUPTED:
        await until(container, f"/tmp/{name}")


def until_waiting(container: Container, name: str) -> int:
    """The number on the host of the program with this name, once it is in its call."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        for pid in container.tasks():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                number = Path(f"/proc/{pid}/syscall").read_text().split()[0]
                if f"waits-{name}".encode() in words and words[0] == b"python3" and number == str(INTERRUPTED[name][0]):
                    return pid
    raise AssertionError(f"{name} was not entered")
