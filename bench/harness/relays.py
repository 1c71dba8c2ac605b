"""Relays and publishers of weights in processes of their own, that a bench may kill."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout.weights.relay import Relay, serve
from rollout.weights.source import HttpSource, source_of
from rollout.weights.store import VersionStore


@contextmanager
def forked(act: Callable[[], None]) -> Iterator[int]:
    """`act` in a process of its own, killed at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def relay_process(directory: Path, port: int, upstream: str | None = None) -> Callable[[], None]:
    """A relay's whole life, for `forked`."""

    def act() -> None:
        source = source_of(upstream) if upstream else None
        asyncio.run(serve(Relay(VersionStore(directory), source), "127.0.0.1", port))

    return act


async def listening(port: int) -> None:
    source = HttpSource(f"http://127.0.0.1:{port}")
    await source.versions()
    await source.close()
