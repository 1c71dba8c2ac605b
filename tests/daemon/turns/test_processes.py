"""Background processes and terminals through a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import pytest

from daemon.turns.terminals import TerminalVisitor
from sandbox import Client, Sandbox
from sandbox.errors import CommandNotFound, Conflict, Invalid, NotFound
from sandbox.messages import ProgramState, Verdict
from sandbox.sdk.processes import Process, Terminal
from tests.support.daemon_host import TIMEOUT, Daemon, until

COUNTER = "n=0; while read -r line; do n=$((n+1)); echo $n $line; done"


async def printed(process: Process, target: bytes) -> bytes:
    """What its stdout kept, once `target` is in it."""
    result = b""
    async with asyncio.timeout(TIMEOUT):
        async for chunk in process.stream():
            result += chunk.data if chunk.stream == "stdout" else b""
            if target in result:
                return result
    raise AssertionError(f"it ended without {target!r}: {result!r}")


async def test_outputs_exit_code_and_list(sb: Sandbox) -> None:
    process = await sb.processes.start("printf 'a\\0b'; echo oops >&2; exit 7", env={"A": "1"}, cwd="/usr")
    assert process.info.verdict in (Verdict.PROCESSES, Verdict.BOTH, Verdict.FILES)
    assert await process.wait() == 7
    logs = await process.logs()
    assert (logs.stdout, logs.stderr, logs.ended) == (b"a\0b", b"oops\n", True)
    (listed,) = await sb.processes.list()
    assert (listed.id, listed.info.state, listed.info.exit_code) == (process.id, ProgramState.EXITED, 7)
    await process.remove()
    assert await sb.processes.list() == []
    with pytest.raises(NotFound):
        await process.refresh()


async def test_a_handle_from_before_a_restore_says_what_is_wrong(sb: Sandbox) -> None:
    old = await sb.processes.start("cat > /tmp/got; touch /tmp/done", stdin="pipe")
    before = await sb.checkpoint()
    await old.write("taken back\n")
    new = await sb.processes.start("sleep 1000", stdin="pipe")
    after = await sb.checkpoint()
    await sb.restore(before)
    with pytest.raises(NotFound, match="started after the checkpoint that was restored"):
        await new.write("x")
    with pytest.raises(Conflict, match=r"has got 0 bytes in its present state, not 11: .*restored") as refused:
        await old.write("lost")
    assert "refresh()" in (refused.value.hint or "")
    await old.refresh()
    await sb.restore(after)
    with pytest.raises(Conflict, match="has got 11 bytes in its present state, not 0"):  # no repetition of what it got
        await old.write("lost")
    await old.refresh()
    await old.write("kept\n")
    await old.close_stdin()
    assert await old.wait(timeout=TIMEOUT) == 0
    assert (await sb.exec("cat /tmp/got")).stdout == b"taken back\nkept\n"


async def test_stdin_signals_and_streams(sb: Sandbox) -> None:
    process = await sb.processes.start(COUNTER, stdin="pipe")
    await process.write("one\ntwo\n")
    assert await printed(process, b"2 two\n") == b"1 one\n2 two\n"
    await process.write("x" * 300_000 + "\n")  # more than any pipe holds
    await printed(process, b"3 xxx")
    await process.close_stdin()
    assert await process.wait() == 0
    sleeper = await sb.processes.start(["sleep", "1000"])
    await sleeper.signal(signal.SIGTERM)
    assert await sleeper.wait() == 128 + signal.SIGTERM
    with pytest.raises(Conflict):
        await sleeper.kill()
    assert await (await sb.processes.start(["sleep", "1000"])).wait(timeout=0.1) is None


async def test_refusals(sb: Sandbox) -> None:
    with pytest.raises(CommandNotFound):
        await sb.processes.start(["nonesuch"])
    with pytest.raises(Invalid):
        await sb.processes.start("true", user="nonesuch")
    with pytest.raises(Invalid):
        await sb.processes.start("true", cwd="/nonesuch")
    assert await sb.processes.list() == []


async def test_only_the_newest_of_a_log_is_kept(sb: Sandbox) -> None:
    process = await sb.processes.start("seq 1 100000", log_limit=4096)
    await process.wait()
    logs = await process.logs()
    assert len(logs.stdout) == 4096 and logs.stdout.endswith(b"99999\n100000\n")
    assert logs.stdout_end == sum(len(str(n)) + 1 for n in range(1, 100_001))
    assert (await process.logs(logs)).stdout == b""


async def test_a_process_goes_back_and_forks_with_its_sandbox(sb: Sandbox) -> None:
    process = await sb.processes.start(COUNTER, stdin="pipe")
    await process.write("one\n")
    await printed(process, b"1 one\n")
    before = await sb.checkpoint("one")
    await process.write("two\n")
    await printed(process, b"2 two\n")
    waiting = asyncio.ensure_future(process.wait())
    later = await sb.processes.start(["sleep", "1000"])
    assert await sb.diff(before) == []  # what holds it is none of the user's files
    child = (await sb.fork())[0].sandbox
    await sb.restore(before)
    assert (await process.logs()).stdout == b"1 one\n"  # the log of that state
    assert (await process.refresh()).written == 4
    again = await sb.processes.get(process.id)
    await again.write("other\n")
    assert await printed(again, b"2 other\n") == b"1 one\n2 other\n"
    with pytest.raises(NotFound):
        await later.refresh()
    await again.kill()
    assert await waiting == 128 + signal.SIGKILL  # the wait went on through the restore
    async with child:
        twin = await child.processes.get(process.id)
        await twin.write("three\n")
        assert await printed(twin, b"3 three\n") == b"1 one\n2 two\n3 three\n"


async def test_all_of_a_sandbox_killed_from_within(sb: Sandbox) -> None:
    process = await sb.processes.start(["sleep", "1000"])
    done = await sb.exec("kill -9 -1; echo on")
    assert (done.exit_code, done.text) == (0, "on\n")
    assert (await process.refresh()).state is ProgramState.LOST
    assert (await sb.exec("echo on")).text == "on\n"


async def test_users_by_name_and_number(sb: Sandbox) -> None:
    assert (await sb.exec("id -un; id -gn; echo $HOME", user="nobody")).text == "nobody\nnogroup\n/nonexistent\n"
    assert (await sb.exec("id -u; id -g", user=1234)).text == "1234\n0\n"
    with pytest.raises(Invalid):
        await sb.exec("true", user="nonesuch")


async def test_a_deadline_asks_before_it_kills(sb: Sandbox) -> None:
    done = await sb.exec("trap 'echo tidy; exit 3' TERM; sleep 1000 & wait", timeout=4.0)
    assert (done.timed_out, done.exit_code, done.text) == (True, 3, "tidy\n")


async def test_metrics(sb: Sandbox) -> None:
    before = await sb.metrics()
    await sb.exec("head -c 3000000 /dev/urandom > /big; i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
    await sb.processes.start(["sleep", "1000"])

    async def two_more() -> bool:  # what the command was is reaped by itself
        return (await sb.metrics()).processes == before.processes + 2

    await until(two_more, "the process and its attendant are counted")
    after = await sb.metrics()
    assert after.cpu_seconds > before.cpu_seconds
    assert after.disk_bytes is not None and before.disk_bytes is not None
    assert after.disk_bytes >= before.disk_bytes + 3_000_000
    assert after.memory_limit_bytes == 1 << 30 and after.disk_limit_bytes == 4 << 30


async def test_labels(host: Client, sb: Sandbox) -> None:
    await sb.set_labels({"task": "a=b", "seed": "1"})
    await sb.set_labels({"seed": None})
    assert (await sb.refresh()).labels == {"task": "a=b"}
    assert [info.id for info in await host.sandboxes({"task": "a=b"})] == [sb.id]
    assert [info.id for info in await host.sandboxes({"task": None})] == [sb.id]
    assert await host.sandboxes({"task": "other"}) == []


# --------------------------------------------------------------------------- terminals


async def shows(terminal: Terminal, target: bytes) -> bytes:
    result = b""
    async with asyncio.timeout(TIMEOUT):
        while target not in result:
            data = await terminal.read()
            assert data is not None, result
            result += data
    return result


async def test_a_terminal(sb: Sandbox) -> None:
    turns = len(await sb.turns())
    async with await sb.terminals.open(rows=30, columns=90) as terminal:
        await terminal.write("stty size; tty\n")
        await shows(terminal, b"30 90\r\n/dev/pts/")
        await terminal.resize(40, 120)
        await terminal.write("stty size; sh -c 'echo u''p; exec sleep 1000'\n")
        await shows(terminal, b"40 120\r\nup\r\n")
        await terminal.write(b"\x03")
        await terminal.write("echo $((2+3))$?; touch /typed\n")
        await shows(terminal, b"5130\r\n")
        await terminal.write("exit 5\n")
        async for _ in terminal:
            pass
        assert terminal.exit_code == 5

    async def another() -> bool:
        return len(await sb.turns()) > turns

    await until(another, "the daemon notices that we have left")
    last = (await sb.turns())[-1]
    assert last.command.startswith("(terminal)") and last.verdict in (Verdict.FILES, Verdict.BOTH)


async def test_a_terminal_waits_for_a_slow_reader_and_loses_nothing(sb: Sandbox) -> None:
    # Until somebody sits there, only the newest is kept: it begins when it is told to.
    async with await sb.terminals.open("stty raw -echo; echo up; read -r go; seq 1 200000") as terminal:
        await shows(terminal, b"up\n")
        await terminal.write("go\n")
        await asyncio.sleep(0.5)
        result = b"".join([data async for data in terminal])
        assert result == b"".join(b"%d\n" % n for n in range(1, 200_001))
        assert terminal.exit_code == 0


async def test_a_terminal_outlives_its_visitor_and_a_restore(sb: Sandbox) -> None:
    terminal = await sb.terminals.open('while read -r A; do echo "<$A>"; done')
    async with terminal:
        await terminal.write("one\n")
        await shows(terminal, b"<one>")
    before = await sb.checkpoint()
    async with await sb.terminals.get(terminal.id) as again:
        assert b"<one>" in await shows(again, b"<one>")  # what is kept
        await again.write("two\n")
        await shows(again, b"<two>")
        with pytest.raises(Conflict):
            async with await sb.terminals.get(terminal.id):
                pass
        await sb.restore(before)  # under the visitor
        await again.write("three\n")
        assert b"two" not in await shows(again, b"<three>")


class _Slots:
    """What a seat needs of a sandbox, and an attendant that answers when it is let."""

    def __init__(self) -> None:
        self.programs = self
        self.group = self
        self.attached: set[str] = set()
        self.held: list[bool] = []
        self.answers = asyncio.Event()

    async def supervisor(self, _: str) -> _Slots:
        await self.answers.wait()
        return self

    async def hold(self, held: bool) -> None:
        self.held.append(held)

    def attending(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


async def test_two_who_come_at_once_and_one_who_comes_as_another_leaves() -> None:
    loop: Any = _Slots()
    leave = asyncio.Event()

    async def visit() -> None:
        async with TerminalVisitor(loop, "t", since=None).taken():
            await leave.wait()

    first, second = asyncio.ensure_future(visit()), asyncio.ensure_future(visit())
    await asyncio.wait({second}, timeout=TIMEOUT)
    assert second.done() and isinstance(second.exception(), Conflict)
    loop.answers.set()
    await until(lambda: loop.held == [True])
    loop.answers.clear()
    leave.set()
    await until(lambda: not loop.attached)
    leave.clear()
    next_one = asyncio.ensure_future(visit())
    await asyncio.sleep(0)
    loop.answers.set()
    await first
    assert loop.attached == {"t"}
    await until(lambda: len(loop.held) == 2)
    assert loop.held == [True, True]
    leave.set()
    await next_one
    assert loop.held == [True, True, False] and not loop.attached


async def test_a_daemon_dies_under_a_terminal_and_a_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    daemon = Daemon(tmp_path_factory.mktemp("killed"))
    try:
        daemon.start()
        async with daemon.client() as host:
            sb = await host.create("debian")
            process = await sb.processes.start(COUNTER, stdin="pipe")
            await process.write("one\n")
            waiting = asyncio.ensure_future(process.wait())
            async with await sb.terminals.open('while read -r line; do echo "<$line>"; done') as terminal:
                await terminal.write("one\n")
                await shows(terminal, b"<one>")
                daemon.kill()
                await asyncio.to_thread(daemon.start)
                reading = asyncio.ensure_future(shows(terminal, b"<two>"))
                await terminal.write("two\n")
                assert b"<one>" not in await reading  # nothing is told twice
                await process.write("two\n")
                assert await printed(process, b"2 two\n") == b"1 one\n2 two\n"
                await asyncio.to_thread(daemon.stop)  # an orderly one does not wait for whoever sits at a terminal
                await asyncio.to_thread(daemon.start)
                reading = asyncio.ensure_future(shows(terminal, b"<three>"))
                await terminal.write("three\n")
                await reading
            await process.kill()
            assert await waiting == 128 + signal.SIGKILL
    finally:
        daemon.clean()
