"""Who fills a descriptor in tiny pieces wakes the event loop so often a second and no more."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator

import pytest

from sandbox.container.paced import BURST, LARGE, RATE, Allowance, PacedReader
from tests.support.daemon_host import until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    yield ends
    for end in ends:
        os.close(end)


def spent() -> Allowance:
    allowance = Allowance()
    while not allowance.spend(1):
        pass
    return allowance


def test_an_allowance_lets_a_burst_pass_and_then_a_pace() -> None:
    began, allowance = time.monotonic(), Allowance()
    passed = 0
    while not allowance.spend(1):
        passed += 1
    assert BURST <= passed + 1 <= BURST + RATE * (time.monotonic() - began) + 1
    assert all(allowance.spend(LARGE) == 0 for _ in range(1000)), "large reads are free"
    waits = [allowance.spend(1) for _ in range(10)]
    assert waits[-1] > 5 / RATE, "who goes on all the same waits longer"


async def test_single_bytes_come_together(pipe: tuple[int, int]) -> None:
    parts: list[bytes] = []

    def read() -> int:
        parts.append(os.read(pipe[0], 1 << 16))
        return len(parts[-1])

    reader = PacedReader(pipe[0], read, spent())
    os.write(pipe[1], b"1")
    await until(lambda: bool(parts))
    for _ in range(1000):
        os.write(pipe[1], b"x")
    await until(lambda: len(b"".join(parts)) == 1001)
    assert len(parts) == 2
    reader.stop()
    os.write(pipe[1], b"2")
    await asyncio.sleep(5 / RATE)
    assert len(parts) == 2, "stopped is stopped, also while it waits"
    reader.start()
    await until(lambda: len(parts) == 3)
    reader.stop()


async def test_a_flood_wakes_the_loop_at_a_pace(pipe: tuple[int, int]) -> None:
    reads, done = 0, threading.Event()

    def read() -> int:
        nonlocal reads
        reads += 1
        return len(os.read(pipe[0], 1 << 10))

    def flood() -> None:
        while not done.is_set():
            try:
                os.write(pipe[1], b"x")
            except BlockingIOError:
                time.sleep(0.001)

    began = time.monotonic()
    reader = PacedReader(pipe[0], read)
    thread = threading.Thread(target=flood)
    thread.start()
    await until(lambda: reads > BURST + 20)
    done.set()
    thread.join()
    reader.stop()
    assert reads <= BURST + RATE * (time.monotonic() - began) + 1
