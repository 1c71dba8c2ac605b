"""Commands in one sandbox: how they start, what they say, how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox import procfs
from sandbox.container import endings, process
from sandbox.container.outlet import Outlet
from sandbox.container.process import RunningCommand, pidfd_tells_exit, readers_first, signal_started
from sandbox.descriptors import closing
from sandbox.errors import CommandNotFound, Conflict, Invalid
from sandbox.messages import Limits
from sandbox.procfs import ProcessIdentity
from tests.support.container_support import Maker, finalized, shell
from tests.support.daemon_host import until
from tests.support.programs import Program


@pytest.fixture(params=["pidfds", "notes of pid 1"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How exit codes are learned: as on this kernel, and as before Linux 6.15."""
    if request.param == "pidfds" and not pidfd_tells_exit():
        pytest.skip("this kernel's pidfds do not tell exit codes (needs 6.15)")
    monkeypatch.setattr("sandbox.container.container._pidfd_tells_exit", lambda: request.param == "pidfds")


@pytest.mark.usefixtures("either_way")
async def test_exit_codes(maker: Maker) -> None:
    sb = await maker.create()
    for code in (0, 1, 7, 255):
        assert (await sb.exec(["sh", "-c", f"exit {code}"])).exit_code == code
    assert (await sb.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137
    assert (await sb.exec(["sh", "-c", "kill -SEGV $$"])).exit_code == 139


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("link", [False, True], ids=["named", "by a link of the sandbox"])
async def test_a_working_directory_leads_out_through_no_descriptor(maker: Maker, uid: int, link: bool) -> None:
    """What starts a command holds directories of the host open (CVE-2024-21626 is the same in runc)."""
    sb = await maker.create()
    own = (await shell(sb, "stat -c %d:%i /")).strip()
    for number in range(16):
        path = f"/proc/self/fd/{number}"
        if link:
            await shell(sb, f"rm -f /link; ln -s {path} /link")
        try:
            done = await sb.exec(["stat", "-c", "%d:%i", "../" * 12], cwd="/link" if link else path, uid=uid)
        except Invalid:
            continue
        assert done.stdout.decode().strip() == own, number


@pytest.mark.parametrize("uid", [0, 1000])
async def test_a_program_of_the_host_is_no_command(maker: Maker, uid: int) -> None:
    """A command is the host's program until it executes its own (CVE-2019-5736 is the same in runc)."""
    sb = await maker.create()
    await shell(sb, "ln -s /proc/self/exe /usr/bin/own")
    await shell(sb, "printf '#!/proc/self/exe\\n' > /usr/bin/script; chmod 755 /usr/bin/script")
    for argv, cwd in ((["/proc/self/exe"], "/"), (["own"], "/"), (["script"], "/"), (["./exe"], "/proc/self")):
        with pytest.raises(CommandNotFound, match="cannot be executed"):
            await sb.exec(argv, uid=uid, cwd=cwd)


@pytest.mark.usefixtures("either_way")
async def test_command_is_adopted_by_pid_1(maker: Maker) -> None:
    sb = await maker.create()
    pid, parent, session = (await shell(sb, "exec sh -c 'cut -d\" \" -f1,4,6 /proc/$$/stat'")).split()
    assert (parent, session) == ("1", pid)


@pytest.mark.usefixtures("either_way")
async def test_exit_codes_among_many_sessions_that_end(maker: Maker) -> None:
    sb = await maker.create()
    script = "i=0; while [ $i -lt 200 ]; do setsid -f true; (true &); i=$((i+1)); done; exit $0"
    done = await asyncio.gather(*(sb.exec(["sh", "-c", script, str(code)]) for code in (3, 5, 200)))
    assert [item.exit_code for item in done] == [3, 5, 200]


@pytest.mark.usefixtures("either_way")
async def test_a_command_ends_with_its_sandbox(maker: Maker) -> None:
    sb = await maker.create()
    running = asyncio.ensure_future(sb.exec(["sleep", "1000"]))
    await until(lambda: len(sb.tasks()) == 2, "the command runs")
    await sb.kill()
    assert (await running).exit_code == 137


def test_a_pid_1_that_is_ending_was_killed_with_its_commands() -> None:
    with Program(["true"]) as ending, closing(os.pidfd_open(ending.pid)) as pidfd:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # it has no memory any more, and still has its number
        assert endings.noted(ending.pid, pidfd, 2) == signal.SIGKILL
        ending.wait()
        assert endings.noted(ending.pid, pidfd, 2) == signal.SIGKILL


async def test_an_exit_code_that_nobody_noted_is_an_error() -> None:
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    with closing(os.pidfd_open(child.pid)) as pidfd:
        await child.communicate(b"")
        with pytest.raises(Conflict, match="exit code is lost"):
            await endings.ended(child.pid, pidfd, lambda: None)


@pytest.mark.parametrize(
    ("argv", "options", "error", "says"),
    [
        (["no-such-program"], {}, CommandNotFound, "no-such-program: no such program"),
        (["/etc/passwd"], {}, CommandNotFound, "cannot be executed"),
        (["/etc"], {}, CommandNotFound, "cannot be executed"),
        ([], {}, Invalid, "empty command"),
        (["true"], {"cwd": "/no/such"}, Invalid, "working directory /no/such"),
        (["true"], {"cwd": "/etc/passwd"}, Invalid, "working directory /etc/passwd"),
        (["true"], {"uid": 65_536}, Invalid, "no such user"),
        (["true", "a\0b"], {}, Invalid, "NUL"),
        (["true", "x" * (1 << 20)], {}, Invalid, "too long"),
        (["true", "x" * (140 << 10)], {}, Invalid, "too long"),
    ],
)
async def test_what_cannot_start(maker: Maker, argv: list[str], options: dict, error: type, says: str) -> None:
    sb = await maker.create()
    with pytest.raises(error, match=says):
        await sb.exec(argv, **options)
    assert await shell(sb, "echo still here") == "still here\n"
    assert sb.tasks() == [sb.init_pid]


async def test_a_command_starts_with_no_signal_blocked(maker: Maker) -> None:
    sb = await maker.create()
    done = await sb.exec(["grep", "SigBlk", "/proc/self/status"])
    assert done.stdout.split() == [b"SigBlk:", b"0" * 16]


async def test_stdin_and_binary_output(maker: Maker) -> None:
    sb = await maker.create()
    data = bytes(range(256)) * 4000
    assert (await sb.exec(["cat"], stdin=data, output_limit=1 << 21)).stdout == data
    assert (await sb.exec(["true"], stdin=data)).exit_code == 0  # nobody reads it
    assert (await sb.exec(["cat"])).stdout == b""  # no stdin is an empty one


async def test_huge_output_is_counted_not_kept(maker: Maker) -> None:
    sb = await maker.create()
    done = await sb.exec(["head", "-c", "100000000", "/dev/zero"], output_limit=1000)
    assert (done.exit_code, done.stdout, done.stdout_dropped) == (0, bytes(1000), 99_999_000)


async def test_output_comes_as_it_is_written(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkfifo /go")
    outlet = Outlet()
    running = asyncio.create_task(sb.exec(["sh", "-c", "echo one; read x < /go; echo two >&2"], outlet=outlet))
    assert await outlet.get() == ("stdout", b"one\n")
    await shell(sb, "echo > /go")
    assert await outlet.get() == ("stderr", b"two\n")
    assert (await running).exit_code == 0


async def test_background_process_neither_delays_nor_dies(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkfifo /in /out")
    loop = "while read x < /in; do echo got $x; echo error $x >&2; echo $x > /out; done"
    assert await shell(sb, f"({loop}) & echo started") == "started\n"
    for word in ("a", "b", "c"):  # each writes to the pipes that exec has given up
        assert await shell(sb, f"echo {word} > /in; cat /out") == f"{word}\n"
    assert len(sb.tasks()) == 2


async def test_background_output_without_end_is_drained(maker: Maker) -> None:
    sb = await maker.create(limits=Limits(cpus=0.2))
    await shell(sb, "mkfifo /out; (head -c 20000000 /dev/zero; echo done > /out) & true")
    assert await shell(sb, "cat /out") == "done\n"


async def test_timeout_kills_what_was_started(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    before = set(sb.tasks())
    done = await sb.exec(["sh", "-c", "echo begun; (sleep 1001; true) & setsid sleep 1002 & sleep 1003"], timeout=3.0)
    assert (done.timed_out, done.exit_code, done.stdout) == (True, 143, b"begun\n")
    assert await finalized(sb, before) == before


async def test_cancelled_command_is_killed(maker: Maker) -> None:
    sb = await maker.create()
    outlet = Outlet()
    task = asyncio.create_task(sb.exec(["sh", "-c", "echo x; sleep 1000"], outlet=outlet))
    await outlet.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await finalized(sb, {sb.init_pid}) == {sb.init_pid}
    assert await shell(sb, "echo on") == "on\n"


async def test_command_cancelled_while_it_starts_is_killed(maker: Maker) -> None:
    sb = await maker.create()
    for _ in range(5):
        task = asyncio.create_task(sb.exec(["sleep", "1000"]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await finalized(sb, {sb.init_pid}) == {sb.init_pid}


async def test_a_signal_that_ends_the_command_at_once_has_reached_it(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sb = await maker.create()
    started: asyncio.Future[RunningCommand] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(sb.exec(["sleep", "1000"], on_start=started.set_result))
    command = await started

    def send_and_see_the_end(*arguments: Any, **options: Any) -> bool:
        sent = signal_started(*arguments, **options)
        while not running.done():
            time.sleep(0.001)
        return sent

    monkeypatch.setattr(process, "signal_started", send_and_see_the_end)
    assert await command.signal(signal.SIGTERM, group=True)
    assert (await running).exit_code == 143
    assert not await command.signal(signal.SIGTERM, group=True)


def name_of(task: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{task}/comm").read_text().strip()
    return ""


async def test_a_signal_reaches_a_child_that_is_being_forked(maker: Maker) -> None:
    """Whoever looks for processes one by one misses what was forked since; here none of them was seen."""
    sb = await maker.create()
    started: asyncio.Future[RunningCommand] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(sb.exec(["sh", "-c", "sleep 1000; echo after"], on_start=started.set_result))
    await started
    # Before it executes `sleep`, the child of dash shares its memory, and dash may lose the signal.
    await until(lambda: "sleep" in map(name_of, sb.tasks()), "the child")
    shell = next(task for task in sb.tasks() if name_of(task) == "sh")
    assert await asyncio.to_thread(signal_started, shell, lambda: [shell], signal.SIGINT, group=True)
    assert (await running).exit_code == 130
    await until(lambda: sb.tasks() == [sb.init_pid], "the child gone too")


async def test_many_at_once(maker: Maker) -> None:
    sb = await maker.create()
    done = await asyncio.gather(*(sb.exec(["sh", "-c", f"echo {n}; exit {n}"]) for n in range(40)))
    assert [(d.exit_code, d.stdout) for d in done] == [(n, b"%d\n" % n) for n in range(40)]


STOPPER = """
import os, signal
me = os.getpid()
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, me):
            try: os.kill(int(name), signal.SIGSTOP)
            except OSError: pass
"""


async def test_who_stops_new_processes_keeps_nobody_waiting_and_leaves_no_half_of_one(maker: Maker) -> None:
    sb = await maker.create()

    def names() -> list[bytes]:
        result = []
        for pid in sb.tasks():
            with contextlib.suppress(OSError):  # it has ended
                result.append(procfs.read_bytes(f"/proc/{pid}/comm").strip())
        return sorted(result)

    await sb.exec(["sh", "-c", f"(sleep 0.2; exec setsid python3 -c '{STOPPER}') >/dev/null 2>&1 &"])
    await until(lambda: names() == [b"init", b"python3"], "pid 1 and the stopper alone")
    for _ in range(3):
        with contextlib.suppress(Conflict):  # "something in the sandbox stops new processes"
            await sb.exec(["true"], timeout=0.2)
    await until(lambda: names() == [b"init", b"python3"], "pid 1 and the stopper alone")


def test_who_reads_is_signalled_before_who_writes_and_parents_before_children() -> None:
    def task(pid: int, parent: int, started: int = 5) -> ProcessIdentity:
        return ProcessIdentity(pid, parent, group=10, session=10, started=started)

    shell, writer, reader, inner = task(10, 1), task(11, 10), task(12, 10), task(13, 12)
    wrapped = task(9, 10, started=6)  # numbers begin anew
    lost, below_lost = task(20, 1, started=9), task(21, 20, started=9)
    tasks = [lost, inner, writer, below_lost, shell, wrapped, reader]
    assert readers_first(10, tasks) == [shell, wrapped, reader, inner, writer, lost, below_lost]
    assert readers_first(10, tasks[::-1]) == readers_first(10, tasks)
    assert readers_first(10, []) == []
    assert readers_first(10, [lost]) == [lost]


TRACE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def trace(pid):
    if libc.ptrace(0x4206, pid, None, None) < 0: sys.exit(os.strerror(ctypes.get_errno()))
    open('/tmp/traced', 'w').close()
    while True: time.sleep(1)  # and never waits for it
"""


async def test_a_command_ends_although_its_tracer_does_not_reap_it(maker: Maker) -> None:
    container = await maker.create()
    tracer = f"import os; pid = os.getppid()\n{TRACE}\ntrace(pid)"
    script = 'setsid python3 -c "$0" </dev/null >/dev/null 2>&1 & until [ -e /tmp/traced ]; do :; done; exit 7'
    done = await container.exec(["/bin/sh", "-c", script, tracer], timeout=60)
    assert done.exit_code == 7 and not done.timed_out


async def test_commands_run_while_somebody_traces_pid_1(maker: Maker) -> None:
    container = await maker.create()
    stop = TRACE.replace("    open(", "    libc.ptrace(0x4207, pid, None, None)\n    open(")
    script = 'setsid python3 -c "$0" </dev/null >/dev/null 2>&1 & until [ -e /tmp/traced ]; do :; done; exit 7'
    assert (await container.exec(["/bin/sh", "-c", script, f"{stop}\ntrace(1)"])).exit_code == 7
    done = await container.exec(["/bin/sh", "-c", "sleep 1000"], timeout=0.1)
    assert done.timed_out and done.exit_code == 143
    await container.kill()
    assert await container.start()
