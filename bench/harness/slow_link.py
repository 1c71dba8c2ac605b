"""A slow link between two clusters, as a process: TCP connections through it share a rate and are late by a delay.

Kernels without `netem` cannot delay packets; this delays bytes, so it does not show how TCP opens its window over a
long path.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

BLOCK = 1 << 16
IN_FLIGHT = 4 << 20  # bytes of one direction that are on their way


class _Link:
    def __init__(self, target: tuple[str, int], bytes_s: float, delay: float):
        self.target, self.bytes_s, self.delay = target, bytes_s, delay
        self._free = [0.0, 0.0]  # when each direction has sent what it was given

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        await asyncio.gather(self._carry(0, reader, far_writer), self._carry(1, far_reader, writer))

    async def _carry(self, direction: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        held = 0
        news = asyncio.Event()
        capacity = asyncio.Event()

        async def deliver() -> None:
            nonlocal held
            while True:
                while not waiting:
                    news.clear()
                    await news.wait()
                due, block = waiting.popleft()
                await asyncio.sleep(due - time.monotonic())
                if not block:
                    break
                writer.write(block)
                await writer.drain()
                held -= len(block)
                capacity.set()
            with suppress(OSError):
                writer.write_eof()

        delivering = asyncio.create_task(deliver())
        with suppress(ConnectionError):
            while True:
                block = await reader.read(BLOCK)
                now = time.monotonic()
                self._free[direction] = max(self._free[direction], now) + len(block) / self.bytes_s
                waiting.append((self._free[direction] + self.delay, block))
                held += len(block)
                news.set()
                if not block:
                    break
                while held > IN_FLIGHT:
                    capacity.clear()
                    await capacity.wait()
        with suppress(ConnectionError):
            await delivering
        writer.close()


def _run(port: Connection, target: tuple[str, int], bytes_s: float, delay: float) -> None:
    async def serve() -> None:
        link = _Link(target, bytes_s, delay)
        server = await asyncio.start_server(link.connect, "127.0.0.1", 0, limit=4 * BLOCK)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def slow_link(target_port: int, *, bits_s: float, delay: float) -> Iterator[int]:
    """A port behind which `target_port` is, `delay` seconds away each way, over a line of so many bits a second."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(theirs, ("127.0.0.1", target_port), bits_s / 8, delay), daemon=True
    )
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()
