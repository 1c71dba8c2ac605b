"""Streams through a real daemon whose reader is slow, or leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal

import pytest

from daemon.turns.watches import MAX_WATCHES
from sandbox import Client, Sandbox, SandboxState, sync
from sandbox.errors import Conflict, Invalid, NotFound, TooMany
from sandbox.messages import ExecRequest, ExecResult
from sandbox.sdk.transport import MSGPACK
from tests.support.daemon_host import IMAGE, Daemon, exists, missing, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


async def ended(sb: Sandbox, command: str) -> int:
    """The exit code of the latest turn, once it is that of this command."""

    async def last() -> bool:
        turns = await sb.turns()
        return bool(turns) and turns[-1].command == command

    await until(last, f"the turn of {command!r} ends")
    return (await sb.turns())[-1].exit_code


@pytest.mark.parametrize("command", ["echo begun; exec sleep 1000000", "exec yes"])
async def test_a_reader_that_leaves_ends_the_command_and_its_turn(sb: Sandbox, command: str) -> None:
    async for chunk in sb.stream(command):
        assert chunk.data
        break
    assert await ended(sb, command) == 143
    assert (await sb.exec("echo on")).text == "on\n"


async def test_signals_to_a_command_that_runs(sb: Sandbox) -> None:
    running = sb.stream("trap 'echo tidy; exit 7' INT; echo up; while :; do sleep 1; done")
    assert (await anext(running)).data == b"up\n"
    await running.signal("INT")
    *chunks, last = [chunk async for chunk in running]
    assert b"".join(chunk.data for chunk in chunks) == b"tidy\n"
    assert last.result is not None and last.result.exit_code == 7
    assert not last.result.timed_out and last.result.turn is not None

    silent = sb.stream("sleep 1000000; echo $?")
    reading = asyncio.ensure_future(anext(silent))

    async def sent() -> bool:
        with contextlib.suppress(NotFound):  # not begun
            await silent.signal(signal.SIGTERM)
            return True
        return False

    await until(sent)
    assert (await reading).result.exit_code == 143  # shell and sleep, whoever had begun by then
    with pytest.raises(Invalid):
        await silent.signal("NONE")


async def test_one_key_names_one_command(host: Client, sb: Sandbox) -> None:
    running = sb.stream("echo up; exec sleep 1000000")
    await anext(running)
    request = ExecRequest(command="true", key=running._key)
    with pytest.raises(Conflict):
        await host.call("POST", f"{sb._path}/exec", ExecResult, request)
    await running.signal(9, group=False)
    *_, last = [chunk async for chunk in running]
    assert last.result is not None and last.result.exit_code == 137


async def test_a_reader_that_leaves_before_there_was_any_output(sb: Sandbox) -> None:
    command = "touch /begun; exec sleep 1000000"
    reading = asyncio.ensure_future(anext(aiter(sb.stream(command))))
    await until(lambda: exists(sb, "/begun"))
    reading.cancel()
    assert await ended(sb, command) == 143


async def test_a_stream_of_the_synchronous_sdk_that_is_left(daemon: Daemon, sb: Sandbox) -> None:
    command = "echo begun; exec sleep 1000000"

    def read() -> None:
        with sync.Client(daemon.socket) as host:
            for chunk in host.get(sb.id).stream(command):
                assert chunk.data == b"begun\n"
                break

    await asyncio.to_thread(read)
    assert await ended(sb, command) == 143


async def test_a_session_goes_on_when_the_reader_of_its_command_leaves(sb: Sandbox) -> None:
    session = await sb.sessions.open()
    await session.exec("A=kept; sleep 1000000 & true")
    command = "echo begun; sleep 1000001"
    async for chunk in session.stream(command):
        assert chunk.data == b"begun\n"
        break
    assert await ended(sb, command) == 130
    assert (await session.exec("echo $A; kill $! && echo job")).stdout == b"kept\njob\n"


async def test_a_command_in_a_session_ends_its_turn_whatever_its_reader_takes(sb: Sandbox) -> None:
    """32 MB are more than what waits between a command and its reader: the rest stays with the session until then."""
    session = await sb.sessions.open()
    command = "head -c 16000000 /dev/zero; head -c 16000000 /dev/zero >&2"
    stream = session.stream(command)
    size = len((await anext(stream)).data)
    assert await ended(sb, command) == 0
    async for chunk in stream:
        size += len(chunk.data)
    assert chunk.result is not None and chunk.result.exit_code == 0
    assert size == 32_000_000


async def test_a_command_waits_for_its_reader(sb: Sandbox) -> None:
    size = 100_000_000
    stream = sb.stream(f"head -c {size} /dev/zero; touch /done")
    got = len((await anext(stream)).data)
    for _ in range(20):
        await asyncio.sleep(0.02)
    with pytest.raises(NotFound):
        await sb.files.stat("/done")
    async for chunk in stream:
        got += len(chunk.data)
    assert chunk.result is not None and (chunk.result.exit_code, chunk.result.stdout_dropped) == (0, 0)
    assert got == size


async def test_a_deadline_holds_though_nobody_reads(sb: Sandbox) -> None:
    stream = sb.stream("exec yes", timeout=3.0)
    await anext(stream)
    assert await ended(sb, "exec yes") == 143
    *_, last = [chunk async for chunk in stream]
    assert last.result is not None and last.result.timed_out


async def test_watches_that_were_left_leave_their_places(sb: Sandbox) -> None:
    """More than there are places, one after another; nothing happens below what they watch."""

    async def watched() -> bool:
        try:
            async with sb._client.request("GET", f"{sb._path}/files/watch?path=/&recursive=0", None, MSGPACK):
                return True
        except TooMany:  # the last ones are not gone yet
            return False

    for _ in range(MAX_WATCHES + 10):
        await until(watched, "a watch finds a place")


async def test_whoever_follows_a_log_and_leaves_uses_the_sandbox_no_more(host: Client) -> None:
    async with host.create(IMAGE, idle_timeout=3.0) as sb:
        process = await sb.processes.start("echo up; exec sleep 1000000")
        async for chunk in process.stream():
            assert chunk.data == b"up\n"
            break

        async def stopped() -> bool:  # asking for the list is no use of it
            (info,) = [info for info in await host.sandboxes() if info.id == sb.id]
            return info.state is not SandboxState.RUNNING

        await until(stopped, "the sandbox is idle")


async def test_a_stream_that_is_left_prints_nothing(sb: Sandbox) -> None:
    """Neither by `break`, nor by an exception or a cancellation, nor by who lets it go."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
    command = "echo begun; exec yes"
    async for _ in sb.stream(command):
        break
    with pytest.raises(ZeroDivisionError):
        async for _ in sb.stream(command):
            raise ZeroDivisionError
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in sb.stream("echo begun; exec sleep 1000000"):
            begun.set()

    reading = asyncio.ensure_future(read())
    await begun.wait()
    reading.cancel()
    await asyncio.wait({reading})
    await anext(sb.stream(command))
    gc.collect()
    assert (await sb.exec("echo on")).text == "on\n" and said == []
