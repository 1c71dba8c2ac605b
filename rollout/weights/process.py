"""`PullerProcess`: a puller in a process of its own, of the lowest priority, next to an engine that generates.

Guarantee: fetching, decoding and hashing take neither the interpreter nor, where cores are short, the time of who
generates. One process at a time has a mirror (a lock of the kernel); a child ends with its parent; one that was killed
is started again, and the mirror says how far it came.

::

    engine: pull(7) ──Order──▶ child: fetch ▸ decode ▸ write into the mirror ▸ check
                    ◀──Report── and a file with the changes, for the weights in memory
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from rollout.weights.mirror import Mirror, Write
from rollout.weights.puller import PullCost, PulledVersion, Puller
from rollout.weights.source import source_of
from sandbox import structs
from sandbox.errors import Conflict, EngineFailed, Invalid, NotEqual, NotFound, PagurusError, Unauthorized
from sandbox.paths import CHECKOUT

LOCK = ".lock"
CHANGES = ".changes"
NICE = 19
TIMEOUT = 30.0  # seconds for which the process before us may still have the mirror
MAX_LINE = 1 << 20
KINDS: dict[str, type[PagurusError]] = {
    kind.__name__: kind for kind in (Conflict, EngineFailed, Invalid, NotEqual, NotFound, Unauthorized)
}


class Order(msgspec.Struct):
    """parent -> child: bring the mirror to this version; None: to the newest."""

    version: int | None = None


class PullReport(msgspec.Struct, kw_only=True):
    """child -> parent. `kind` and `error` where it failed; `changes`: whether the file has what `since` needs."""

    version: int = -1
    digest: str = ""
    since: str | None = None
    changes: bool = False
    hops: int = 0
    spent: PullCost = msgspec.field(default_factory=PullCost)
    kind: str | None = None
    error: str = ""


class _Change(msgspec.Struct, array_like=True):
    name: str
    positions: bytes | None
    values: bytes


class PullerProcess:
    """``puller = PullerProcess("https://relay:8100", directory, name="engine-3"); pulled = await puller.pull()``"""

    def __init__(self, place: str, mirror: Path, *, name: str, untie: bool = False, changes: bool = True):
        """`changes`: see `Puller`. The token of a relay is in the environment: PAGURUS_WEIGHTS_TOKEN."""
        self.place, self.mirror, self.name, self.untie, self.changes = place, mirror, name, untie, changes
        self._child: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def pull(self, version: int | None = None) -> PulledVersion:
        """As `Puller.pull`; cancelling this ends the child, and the mirror then has no version until the next pull."""
        async with self._asking:
            for _ in range(2):  # one that was killed is started again
                report = await self._request(Order(version))
                if report is not None:
                    break
            else:
                raise EngineFailed("the process that pulls weights dies", hint="read the engine's log")
            if report.kind is not None:
                raise KINDS.get(report.kind, EngineFailed)(report.error)
            writes = await asyncio.to_thread(_read_changes, self.mirror) if report.changes else None
        return PulledVersion(
            version=report.version,
            digest=report.digest,
            since=report.since,
            writes=writes,
            hops=report.hops,
            spent=report.spent,
        )

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def first(self, version: int | None = None) -> PulledVersion:
        """The same in this process: no engine generates yet, and a process more would only have to start first."""
        await asyncio.to_thread(self.mirror.mkdir, parents=True, exist_ok=True)
        async with _owned(self.mirror):
            puller = _puller(self.place, self.mirror, self.name, self.untie, self.changes)
            try:
                return await puller.pull(version)
            finally:
                await puller.close()

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()

    async def _request(self, order: Order) -> PullReport | None:
        """None: the child died."""
        try:
            child = await self._living()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(msgspec.json.encode(order) + b"\n")
            await child.stdin.drain()
            line = await child.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except BaseException:
            await asyncio.shield(self.close())  # its answer to this order must not be taken for the next one's
            raise
        if not line:
            await self.close()
            return None
        return msgspec.json.decode(line, type=PullReport)

    async def _living(self) -> asyncio.subprocess.Process:
        if self._child is None or not self.running:
            search = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH")) if part)
            argv = [sys.executable, "-m", "rollout.weights.process", "--source", self.place]
            argv += ["--mirror", str(self.mirror), "--name", self.name, *(["--untie"] if self.untie else [])]
            argv += [] if self.changes else ["--no-changes"]
            self._child = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": search},
                limit=MAX_LINE,
            )
        return self._child


def _write_changes(mirror: Path, writes: list[Write]) -> None:
    changes = [
        _Change(item.name, None if item.positions is None else item.positions.tobytes(), item.values.tobytes())
        for item in writes
    ]
    (mirror / CHANGES).write_bytes(msgspec.msgpack.encode(changes))


def _read_changes(mirror: Path) -> list[Write]:
    path = mirror / CHANGES
    changes = msgspec.msgpack.decode(path.read_bytes(), type=list[_Change])
    path.unlink()
    return [
        Write(
            item.name,
            None if item.positions is None else np.frombuffer(bytearray(item.positions), dtype=np.int64),
            np.frombuffer(bytearray(item.values), dtype=np.uint16),
        )
        for item in changes
    ]


# ---------------------------------------------------------------------- the child


async def _serve(puller: Puller) -> None:
    async for order in _orders():
        try:
            pulled = await puller.pull(order.version)
            if pulled.writes is not None:
                await asyncio.to_thread(_write_changes, puller.mirror.directory, pulled.writes)
            report = PullReport(
                version=pulled.version,
                digest=pulled.digest,
                since=pulled.since,
                changes=pulled.writes is not None,
                hops=pulled.hops,
                spent=pulled.spent,
            )
        except PagurusError as error:
            report = PullReport(kind=type(error).__name__, error=str(error))
        except OSError as error:  # a full disk, say: the caller gets the error
            report = PullReport(kind="EngineFailed", error=f"the mirror cannot be written: {error}")
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()


async def _orders() -> AsyncIterator[Order]:
    """The parent's request. The child ends at once when the parent has: no other will use what it pulls."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def read() -> None:
        for line in iter(sys.stdin.buffer.readline, b""):
            loop.call_soon_threadsafe(lines.put_nowait, line)
        os._exit(0)

    threading.Thread(target=read, name="orders", daemon=True).start()
    while True:
        yield msgspec.json.decode(await lines.get(), type=Order)


@asynccontextmanager
async def _owned(directory: Path) -> AsyncIterator[None]:
    """This process alone writes into the mirror. Raises Conflict when another one keeps it."""
    deadline = time.monotonic() + TIMEOUT
    with (directory / LOCK).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Conflict(f"another engine has the mirror {directory}", hint="give each its own") from None
                await asyncio.sleep(0.05)
        yield


def _puller(place: str, mirror: Path, name: str, untie: bool, changes: bool) -> Puller:
    source = source_of(place, token=os.environ.get("PAGURUS_WEIGHTS_TOKEN"))
    return Puller(source, Mirror(mirror, untie=untie), name=name, changes=changes)


async def _child(options: argparse.Namespace) -> None:
    os.nice(NICE)
    async with _owned(options.mirror):
        await _serve(_puller(options.source, options.mirror, options.name, options.untie, options.changes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Pull weights into a mirror, as the parent asks on standard input.")
    parser.add_argument("--source", required=True, help="directory or URL of versions")
    parser.add_argument("--mirror", type=Path, required=True)
    parser.add_argument("--name", required=True, help="of the reader, in its lease")
    parser.add_argument("--untie", action="store_true", help="write a tied head as a tensor of its own")
    parser.add_argument("--no-changes", dest="changes", action="store_false", help="the engine reads the mirror alone")
    options = parser.parse_args()
    options.mirror.mkdir(parents=True, exist_ok=True)
    structs.learn()
    try:
        asyncio.run(_child(options))
    except PagurusError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
