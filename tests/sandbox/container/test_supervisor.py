"""Attendants: programs whose other ends lie inside the sandbox, through dump, restore and another daemon."""

from __future__ import annotations

import asyncio
import signal

import pytest

from sandbox.container import supervisor
from sandbox.container.container import Container
from sandbox.container.spawn import PATH
from sandbox.container.supervisor import Mode, Program, Supervisor, SupervisorGone, Until
from sandbox.errors import CommandNotFound
from tests.support.checkpoint_support import Bench
from tests.support.container_support import Maker

ENV = {"PATH": PATH, "HOME": "/root"}


async def started(container: Container, name: str, mode: Mode, *argv: str, **more: object) -> Supervisor:
    await supervisor.start(container, name, Program(mode=mode, argv=argv, env=ENV, **more))  # type: ignore[arg-type]
    return await connected(container, name)


async def connected(container: Container, name: str) -> Supervisor:
    return (await Supervisor.connect(container.inside, name))[0]


async def everything(a: Supervisor, stream: int = 0) -> bytes:
    result, at = b"", 0
    while True:
        data = await a.read(stream, at, wait=True)
        result, at = result + data.data, data.end
        if data.ended:
            return result


async def script(a: Supervisor, key: bytes, text: str) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a script in a session."""
    complete = key.ljust(16)
    serial = int.from_bytes(complete[:4], "little") & 0x7FFFFFFF
    quoted = text.replace("'", "'\\''")
    line = f"{{ eval '{quoted}'; }} </dev/null >&$(((N={serial})*0+7)) 2>&8 7>&- 8>&-\n"
    async with asyncio.timeout(240):
        await a.execute(complete, line.encode(), 1 << 20)
        state = await a.wait(Until.DONE)
        return state.done_status, await everything(a, 0), await everything(a, 1)


async def session(container: Container, *argv: str) -> Supervisor:
    a = await started(container, "x", Mode.SESSION, *(argv or ("/bin/sh", "-i")))
    async with asyncio.timeout(240):
        await a.execute(bytes(16), b"N=0; PS2=; PS1='\x1e$?.$N\x1f'\n", 0)
        await a.wait(Until.DONE)
    return a


async def test_outputs_and_exit_of_a_process(maker: Maker) -> None:
    container = await maker.create()
    a = await started(container, "p1", Mode.PROCESS, "sh", "-c", "printf 'a\\0b'; echo oops >&2; cat; exit 7")
    assert await a.read(0, 0, wait=True) == supervisor.Data(0, 0, False, b"a\0b")
    state = await a.write(b"hello", 0)
    assert state.written == 5
    assert (await a.write(b"hello!", 0)).written == 6  # what was taken before is not taken again
    await a.close_stdin()
    state = await a.wait(Until.EXIT)
    assert state.exit_status is not None and state.exit_status >> 8 == 7
    assert await everything(a) == b"a\0bhello!"
    assert await everything(a, 1) == b"oops\n"
    await a.finish()
    with pytest.raises(SupervisorGone):
        await connected(container, "p1")


async def test_a_program_that_does_not_exist(maker: Maker) -> None:
    container = await maker.create()
    with pytest.raises(CommandNotFound):
        await supervisor.start(container, "p1", Program(mode=Mode.PROCESS, argv=["nonesuch"], env=ENV))
    async with asyncio.timeout(60):  # its last words come before the kernel has done away with it
        while container.tasks() != [container.init_pid]:  # noqa: ASYNC110 - the kernel tells no event
            await asyncio.sleep(0.01)


async def test_the_last_bytes_of_a_log_are_kept(maker: Maker) -> None:
    container = await maker.create()
    a = await started(container, "p1", Mode.PROCESS, "sh", "-c", "seq 1 200000; sleep 60", log_limit=65536)
    at, tail = 0, b""
    while not tail.endswith(b"200000\n"):
        data = await a.read(0, at, wait=True)
        assert data.start >= at
        tail, at = (tail if data.start == at else b"") + data.data, data.end
    retained = (await a.state()).outputs[0]
    complete = b"".join(b"%d\n" % n for n in range(1, 200001))
    assert (retained.end, retained.end - retained.start) == (len(complete), 65536)
    again, at = b"", retained.start
    while at < retained.end:
        data = await a.read(0, at, wait=False)
        again, at = again + data.data, data.end
    assert again == complete[-65536:]


async def test_another_daemon_attaches_in_the_middle_of_an_answer(maker: Maker) -> None:
    container = await maker.create()
    first = await started(container, "p1", Mode.PROCESS, "sh", "-c", "head -c 500000 /dev/zero; sleep 60")
    await first.read(0, 400_000, wait=True)
    first._loop.remove_reader(first._rs)  # it dies: requests on their way, answers that nobody reads
    for _ in range(8):
        await first._send(supervisor._Op.READ, seq=99, y=supervisor.CHUNK)
    first.close()
    second = await connected(container, "p1")
    assert len((await second.read(0, 0, wait=True)).data) > 0
    second.close()


@pytest.mark.parametrize("argv", [("/bin/sh", "-i"), ("/bin/bash", "--noediting", "--norc", "-i")])
async def test_a_session_keeps_its_shell(maker: Maker, argv: tuple[str, ...]) -> None:
    container = await maker.create()
    a = await session(container, *argv)
    assert await script(a, b"1", "cd /usr; export A=1; f() { echo \"f $1\"; }; printf 'x\\0y'") == (0, b"x\0y", b"")
    assert await script(a, b"2", "pwd; f $A; exit_code() { return 9; }; exit_code") == (9, b"/usr\nf 1\n", b"")
    assert await script(a, b"2b", "echo $?; (exit 300)") == (44, b"9\n", b"")
    code, _, errors = await script(a, b"3", "if")  # a syntax error does not end it
    assert code != 0 and b"yntax error" in errors
    assert await script(a, b"4", "echo still") == (0, b"still\n", b"")


async def test_a_script_runs_once_for_its_key(maker: Maker) -> None:
    container = await maker.create()
    a = await session(container)
    assert await script(a, b"1", "echo once >> /n; cat /n") == (0, b"once\n", b"")
    assert await script(a, b"1", "echo once >> /n; cat /n") == (0, b"once\n", b"")
    await a.acknowledge(b"1".ljust(16))
    assert await script(a, b"2", "cat /n") == (0, b"once\n", b"")


async def test_a_terminal_with_a_program_in_front_is_dumped_and_restored(bench: Bench) -> None:
    container = await bench.maker.create()
    a = await started(container, "x", Mode.TERMINAL, "/bin/bash", "--norc", "-i")
    await a.write(b"A=before; echo re''ady; cat; echo $A-$((1+1)); read -r line; echo got $line\n", 0)
    await reads(a, b"ready\r\n")
    await a.write(b"hello\n", (await a.state()).written)
    await reads(a, b"hello\r\nhello\r\n")
    saved = await bench.save(container)
    await bench.kill_and_restore(container, saved, saved.dump)
    a = await connected(container, "x")
    await a.write(b"\x04", (await a.state()).written)
    await reads(a, b"before-2")
    await a.write(b"more\n", (await a.state()).written)
    await reads(a, b"got more")
    await a.write(b"tty; stty size\n", (await a.state()).written)
    await reads(a, b"24 80")


async def test_waits_that_were_given_up_leave_room_for_others(maker: Maker) -> None:
    """The attendant keeps 32 questions. A long poll asks again every minute."""
    a = await started(await maker.create(), "p", Mode.PROCESS, "sh", "-c", "read line; echo $line; exit 7")
    for _ in range(40):
        for question in (a.wait(Until.EXIT), a.read(0, 0, wait=True)):
            asking = asyncio.ensure_future(question)
            await a.state()  # it has been asked
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    reading, waiting = asyncio.ensure_future(a.read(0, 0, wait=True)), asyncio.ensure_future(a.wait(Until.EXIT))
    assert (await a.state()).exit_status is None
    assert not waiting.done()
    await a.write(b"hello\n", 0)
    assert (await reading).data == b"hello\n"
    status = (await waiting).exit_status
    assert status is not None and status >> 8 == 7
    assert await everything(a) == b"hello\n"


async def reads(a: Supervisor, target: bytes) -> bytes:
    """What it printed, once that is in it."""
    at, result = 0, b""
    async with asyncio.timeout(240):
        while target not in result:
            data = await a.read(0, at, wait=True)
            result, at = result + data.data, data.end
    return result


@pytest.mark.parametrize("mode", ["session", "terminal", "process"])
async def test_all_of_it_survives_a_dump_and_a_restore(bench: Bench, mode: str) -> None:
    container = await bench.maker.create()
    if mode == "session":
        a = await session(container)
        await script(a, b"1", "cd /usr; A=before; sleep 1000 & echo kept")
    else:
        argv = ("cat",) if mode == "process" else ("/bin/sh", "-i")
        a = await started(container, "x", Mode(mode), *argv)
        await a.write(b"A=before\n", 0)
        await a.read(0, 0, wait=True)
    saved = await bench.save(container)
    if mode == "session":
        assert (await script(a, b"2", "A=after; cd /; echo later"))[0] == 0
    else:
        await a.write(b"A=after\n", 9)
    await bench.kill_and_restore(container, saved, saved.dump)
    assert a.closed
    a = await connected(container, "x")
    state = await a.state()
    if mode == "session":
        assert state.done and state.key == b"1".ljust(16)
        assert await everything(a) == b"kept\n"  # the answer that nobody acknowledged
        assert await script(a, b"2", "pwd; echo $A; kill $! && echo job") == (0, b"/usr\nbefore\njob\n", b"")
        return
    assert state.written == 9
    await a.write(b"echo $A\n", 9)
    assert b"after" not in await reads(a, b"$A" if mode == "process" else b"\nbefore")
    await a.signal(signal.SIGKILL)
    assert (await a.wait(Until.EXIT)).exit_status == signal.SIGKILL


async def test_a_terminal_is_one(maker: Maker) -> None:
    container = await maker.create()
    a = await started(container, "t", Mode.TERMINAL, "/bin/sh", "-c", "tty; stty size; cat", rows=33, columns=101)
    await reads(a, b"33 101\r\n")
    await a.write(b"here\n", 0)
    await reads(a, b"here\r\nhere\r\n")  # cat runs: a shell that was just starting it would lose the signal
    await a.write(b"x\x03", 5)  # Ctrl-C ends cat
    state = await a.wait(Until.EXIT)
    assert state.exit_status is not None and state.exit_status & 0x7F == signal.SIGINT
    said = await everything(a)
    assert said.startswith(b"/dev/pts/") and b"33 101\r\n" in said
