"""Output on its way to a reader: at the reader's pace, and what its leaving does."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.container.outlet import PART, Outlet
from sandbox.errors import Closed
from tests.support.container_support import Maker, finalized, shell
from tests.support.daemon_host import until


async def test_parts_come_in_order_and_then_the_end() -> None:
    outlet = Outlet()
    outlet.put("stdout", b"a")
    outlet.put("stderr", b"b")
    assert [await outlet.get(), await outlet.get()] == [("stdout", b"a"), ("stderr", b"b")]
    waiting = asyncio.ensure_future(outlet.get())
    await asyncio.sleep(0)
    outlet.put("stdout", b"c")
    outlet.end()
    assert await waiting == ("stdout", b"c")
    assert await outlet.get() is None and await outlet.get() is None


async def test_who_fills_it_is_told_to_stop_and_to_go_on() -> None:
    outlet, reported = Outlet(10), list[bool]()
    outlet.put("stdout", b"123456")
    with outlet.paced(reported.append):
        outlet.put("stderr", b"123456")
        assert reported == [True, False] and outlet.full
        capacity = asyncio.ensure_future(outlet.capacity())
        await asyncio.sleep(0)
        assert not capacity.done()
        await outlet.get()
        assert reported == [True, False, True] and not outlet.full
        await capacity
        outlet.put("stdout", b"123456")
        outlet.open()
        assert reported == [True, False, True, False, True] and not outlet.full
    outlet.put("stdout", bytes(100))
    assert len(reported) == 5


async def test_single_bytes_take_no_part_each() -> None:
    outlet = Outlet()
    for _ in range(PART + 3):
        outlet.put("stdout", b"x")
    assert [await outlet.get(), await outlet.get()] == [("stdout", b"x" * PART), ("stdout", b"xxx")]


async def test_a_reader_that_left_is_a_deadline() -> None:
    outlet = Outlet(10)
    outlet.put("stdout", bytes(100))
    outlet.need_reader()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as deadline:
            with outlet.ending(deadline):
                outlet.leave()
                outlet.leave()
                await asyncio.Event().wait()
    assert not outlet.full
    with pytest.raises(Closed):
        outlet.need_reader()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as late:
            with outlet.ending(late):
                await asyncio.Event().wait()


async def test_a_command_waits_for_a_slow_reader(maker: Maker) -> None:
    """40 MB, and a reader that takes none until the command waits in its pipe: no byte is lost, and few are held."""
    sb = await maker.create()
    outlet = Outlet(1 << 20)
    size = 40_000_000
    running = asyncio.create_task(sb.exec(["sh", "-c", f"head -c {size} /dev/zero; echo end >&2"], outlet=outlet))
    running.add_done_callback(lambda _: outlet.end())
    await until(lambda: outlet.full)
    for _ in range(20):  # had it been read on, it would have ended by now
        await asyncio.sleep(0.01)
    assert not running.done()
    assert outlet._size < 3 << 20
    out = errors = 0
    while (part := await outlet.get()) is not None:
        assert outlet._size < 3 << 20
        out, errors = out + len(part[1]) * (part[0] == "stdout"), errors + len(part[1]) * (part[0] == "stderr")
    done = await running
    assert (out, errors) == (size, 4)
    assert (done.exit_code, done.stdout, done.stdout_dropped, done.timed_out) == (0, b"", 0, False)


async def test_a_command_whose_reader_takes_nothing_has_its_deadline(maker: Maker) -> None:
    sb = await maker.create()
    outlet = Outlet(1 << 20)
    done = await sb.exec(["sh", "-c", "yes"], timeout=3.0, outlet=outlet)
    assert (done.timed_out, done.exit_code) == (True, 143)
    assert outlet.full and outlet._size < 6 << 20  # what it had, and what lay in the pipe
    assert await finalized(sb, {sb.init_pid}) == {sb.init_pid}


@pytest.mark.parametrize("command", ["echo x; exec sleep 1000", "exec yes"])
async def test_a_command_ends_when_its_reader_leaves(maker: Maker, command: str) -> None:
    sb = await maker.create()
    outlet = Outlet(1 << 20)
    running = asyncio.create_task(sb.exec(["sh", "-c", command], outlet=outlet))
    await outlet.get()
    if command == "exec yes":
        await until(lambda: outlet.full)
    outlet.leave()
    assert (await running).exit_code == 143
    assert await finalized(sb, {sb.init_pid}) == {sb.init_pid}
    assert await shell(sb, "echo on") == "on\n"


async def test_a_survivor_that_writes_without_end_holds_nothing_up(maker: Maker) -> None:
    sb = await maker.create()
    outlet = Outlet(1 << 20)
    done = await sb.exec(["sh", "-c", "setsid yes & exec sleep 0.3"], outlet=outlet)
    assert done.exit_code == 0 and outlet._size < 6 << 20
    await sb.exec(["sh", "-c", "kill -9 -1"])
    assert await finalized(sb, {sb.init_pid}) == {sb.init_pid}
