"""What a sandbox, or a client who may use some, does to starve its neighbours.

Each is a block of code: what it prepares comes before its ``yield``, what it does goes on until the block is left, and
nothing of it is left behind then. It says what it saw, so that an attack that did nothing is no success.

As a program, ``python -m tests.hostile.starving SOCKET IMAGE PORT NAME`` carries one out: it prints a line when the
attack goes on, ends it when its standard input ends, and then prints how often it did something and what it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox import Client, Limits, Network, PagurusError, Sandbox
from sandbox.messages import Gateway, Mount, Upstream

LIMITS = Limits(memory="512MiB", processes=64, cpus=0.25, disk="512MiB")
SIZE = 1 << 40  # bytes of a file that is one hole
FILES = 40_000
DEPTH = 600
DIFFS = 24
CONNECTIONS = 2100
BEGUN = b"begun\n"
NEVER_EXEC = (
    "import ctypes, time\n"
    "if ctypes.CDLL(None).syscall(56, 0x4000 | 17, 0, 0, 0, 0) == 0:\n"  # CLONE_VFORK: its parent waits for an exec
    "    while True: time.sleep(1000)"
)


@dataclass
class Ground:
    """Where an attack takes place."""

    client: Client
    image: str
    port: int  # where the daemon listens by TCP as well
    saw: list[str] = field(default_factory=list)  # what the attack did and was told; each only once
    acts: int = 0  # how often it did something

    def report(self, what: object) -> None:
        self.acts += 1
        if (text := str(what)[:160]) not in self.saw and len(self.saw) < 8:
            self.saw.append(text)

    @contextlib.asynccontextmanager
    async def attackers(self, count: int, limits: Limits = LIMITS, **more: Any) -> AsyncIterator[list[Sandbox]]:
        """So many sandboxes, removed at the end."""
        made: list[Sandbox] = []
        try:
            for _ in range(count):
                made.append(await self.client.create(self.image, limits=limits, **more))
            yield made
        finally:
            await asyncio.gather(*(item.remove() for item in made))

    @contextlib.asynccontextmanager
    async def always(self, *acts: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        """Each act again and again, all at once, until the block is left."""

        async def repeat(act: Callable[[], Awaitable[object]]) -> None:
            while True:
                try:
                    self.report(await act())
                except PagurusError as error:  # being refused is what an attacker meets
                    self.report(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(repeat(item)) for item in acts]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


Attack = Callable[[Ground], contextlib.AbstractAsyncContextManager[None]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Callable[[Ground], AsyncIterator[None]]], None]:
    """Register an attack under a name that says what it does."""

    def register(function: Callable[[Ground], AsyncIterator[None]]) -> None:
        ATTACKS[name] = contextlib.asynccontextmanager(function)

    return register


def saved(sandbox: Sandbox) -> Callable[[], Awaitable[str]]:
    """One checkpoint of an attacker in which no command can be started any more."""

    async def act() -> str:
        made = await sandbox.captured(await sandbox.checkpoint())
        return f"a checkpoint: {made.state}{': ' + made.error if made.error else ''}"

    return act


def turn(sandbox: Sandbox, command: str) -> Callable[[], Awaitable[str]]:
    """One turn of an attacker, until it is captured; what became of it."""

    async def act() -> str:
        done = await sandbox.exec(command, timeout=10)
        if done.checkpoint is None:
            return "no checkpoint"
        made = await sandbox.captured(done)
        return f"a turn: {made.state}{': ' + made.error if made.error else ''}"

    return act


# ------------------------------------------------------------------ queue of checkpoints


@attack("vfork children that never execute, in four sandboxes")
async def _vfork(ground: Ground) -> AsyncIterator[None]:
    async with ground.attackers(4) as made:
        for item in made:
            await item.exec(f"setsid python3 -c '{NEVER_EXEC}' >/dev/null 2>&1 & sleep 0.3")
        async with ground.always(*(turn(item, "sleep 0.01 & date > /tmp/now") for item in made)):
            yield


@attack("a fork bomb in each of four sandboxes")
async def _bomb(ground: Ground) -> AsyncIterator[None]:
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    async with ground.attackers(4) as made:
        for item in made:
            await item.exec(f"setsid python3 -c '{bomb}' >/dev/null 2>&1 & sleep 0.3")
        async with ground.always(*map(saved, made)):
            yield


@attack("processes and threads up to the limit, in four sandboxes")
async def _threads(ground: Ground) -> AsyncIterator[None]:
    threads = (
        "import threading, time\n"
        "try:\n"
        " for n in range(1000): threading.Thread(target=time.sleep, args=(9999,), daemon=True).start()\n"
        "except RuntimeError: pass\n"
        "while True: time.sleep(0.01)"  # so that each checkpoint has processes to dump
    )
    limits = Limits(memory="512MiB", processes=400, cpus=0.25, disk="512MiB")
    async with ground.attackers(4, limits) as made:
        for item in made:
            await item.exec(f"setsid python3 -c '{threads}' >/dev/null 2>&1 & sleep 1")
        async with ground.always(*map(saved, made)):
            yield


@attack("40 sparse memfds of four tebibytes in each of four sandboxes")
async def _sparse(ground: Ground) -> AsyncIterator[None]:
    memfds = (
        "import os, time\n"
        "for n in range(40): os.ftruncate(os.memfd_create(str(n)), 1 << 42)\n"
        "while True: time.sleep(0.01)"
    )
    async with ground.attackers(4) as made:
        for item in made:
            await item.exec(f"setsid python3 -c '{memfds}' >/dev/null 2>&1 & sleep 0.5")
        async with ground.always(*map(saved, made)):
            yield


# ------------------------------------------------------------------ long work


@attack("verify a checkpoint with a hole of one tebibyte")
async def _holes(ground: Ground) -> AsyncIterator[None]:
    async with ground.attackers(1) as (mine,):
        made = await mine.checkpoint()
        await mine.exec(f"truncate -s {SIZE} /big")
        made = await mine.checkpoint()
        async with ground.always(lambda: _verified(ground, made.id)):
            yield


async def _verified(ground: Ground, checkpoint: str) -> str:
    result = await ground.client.store.verify(checkpoint)
    return f"verified: {[report.damage for report in result]}"


@attack("diffs of a tree of 600 nested directories")
async def _nested(ground: Ground) -> AsyncIterator[None]:
    nest = f"import os\nfor n in range({DEPTH}): os.mkdir('directory'); os.chdir('directory')"
    async with ground.attackers(1) as (mine,):
        before = await mine.checkpoint()
        await mine.exec(["python3", "-c", nest])
        made = await mine.checkpoint()
        async with ground.always(lambda: _count(mine, before.id), lambda: _verified(ground, made.id)):
            yield


async def _count(sandbox: Sandbox, checkpoint: str) -> str:
    return f"a diff: {len(await sandbox.diff(checkpoint)) > 0}"


@attack("24 diffs of 40,000 files")
async def _diffs(ground: Ground) -> AsyncIterator[None]:
    many = f"mkdir /many; cd /many; for d in $(seq 40); do mkdir $d; (cd $d; touch $(seq {FILES // 40})); done"
    async with ground.attackers(1) as (mine,):
        before = await mine.checkpoint()
        await mine.exec(many, timeout=300)
        async with ground.always(*[lambda: _count(mine, before.id)] * DIFFS):
            yield


# ------------------------------------------------------------------ connections


@attack("2,100 half-open TCP connections")
async def _half_open(ground: Ground) -> AsyncIterator[None]:
    sockets = []
    try:
        for _ in range(CONNECTIONS):
            made = socket.socket()
            made.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                made.connect(("127.0.0.1", ground.port))
            sockets.append(made)
            if len(sockets) % 64 == 0:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        for made in sockets:
            with contextlib.suppress(OSError):
                made.send(b"GET /v1/health HTTP/1.1\r\n")  # and no more
        ground.report(f"{len(sockets)} connections")
        yield
    finally:
        for made in sockets:
            made.close()


# ------------------------------------------------------------------ space


@attack("scratch space filled beyond the disk limit")
async def _scratch(ground: Ground) -> AsyncIterator[None]:
    limits = Limits(memory="512MiB", processes=64, cpus=0.25, disk="64MiB")
    fill = "dd if=/dev/zero of=/scratch/f bs=1M count=32 conv=notrunc 2>&1 | tail -n 1 >/dev/null; date > /tmp/now"
    mounts = [Mount.scratch("/scratch", size="32MiB")]
    async with (
        ground.attackers(2, limits, mounts=mounts) as made,
        ground.always(*(turn(item, fill) for item in made)),
    ):
        yield


# ------------------------------------------------------------------ the daemon's attention


QUESTIONS = (  # by UDP, and by connections that say nothing
    "import socket\n"
    "one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); one.connect(('127.0.0.53', 53))\n"
    "while True:\n"
    " try:\n"
    "  for n in range(100): one.send(b'x')\n"
    "  two = socket.socket(); two.setblocking(False); two.connect_ex(('127.0.0.53', 53)); two.close()\n"
    " except OSError: pass"
)


@attack("questions to the resolver without a pause, from four sandboxes")
async def _questions(ground: Ground) -> AsyncIterator[None]:
    async with ground.attackers(4, network=Network.allow(names=["example.org"])) as made:
        for item in made:
            await item.exec(f'setsid python3 -c "{QUESTIONS}" >/dev/null 2>&1 & sleep 0.3')
            ground.report((await item.exec("pgrep -c python3 || true")).stdout)
        yield


@attack("output in single bytes, of eight commands in each of four sandboxes")
async def _output(ground: Ground) -> AsyncIterator[None]:
    program = "import os\nwhile True: os.write(1, b'x')"
    shell = "; ".join(['python3 -c "$program" &'] * 8).replace("&;", "&")
    async with ground.attackers(4) as made:
        acts = [turn(item, f"program={shlex.quote(program)}; {shell} wait") for item in made]
        async with ground.always(*acts):
            yield


DRIBBLE = (
    "import socket, selectors\n"
    "head = b'POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 9999999\\r\\n\\r\\n'\n"
    "open_ = []\n"
    "while True:\n"
    " try:\n"
    "  if len(open_) < 24:\n"
    "   made = socket.create_connection(('127.0.0.1', 4010)); made.setsockopt(6, 1, 1); made.sendall(head)\n"
    "   open_.append(made)\n"
    "  for made in open_: made.send(b' ')\n"
    " except OSError:\n"
    "  for made in open_: made.close()\n"
    "  open_ = []"
)


@attack("bodies in single bytes to the gateway, from four sandboxes")
async def _bodies(ground: Ground) -> AsyncIterator[None]:
    upstream = Upstream(url="http://127.0.0.1:9")
    await ground.client.gateway.put("nobody", upstream)
    async with ground.attackers(4, gateway=Gateway(upstream="nobody", port=4010)) as made:
        for item in made:
            await item.exec(f'setsid python3 -c "{DRIBBLE}" >/dev/null 2>&1 & sleep 0.3')
        yield


def free_port() -> int:
    """A port of this host that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def carry_out(path: Path, image: str, port: int, name: str) -> tuple[int, list[str]]:
    """One attack on the daemon at `path`, until standard input ends: how often it did something, and what it saw."""
    async with Client(path, timeout=60.0) as client:
        ground = Ground(client, image, port)
        async with ATTACKS[name](ground):
            sys.stdout.buffer.write(BEGUN)
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.buffer.read)
    return ground.acts, ground.saw


if __name__ == "__main__":
    print(json.dumps(asyncio.run(carry_out(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))))
