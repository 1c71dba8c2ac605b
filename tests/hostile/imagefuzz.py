"""Changes the process images of real sandboxes field by field, and restores them: does anything of the host change?

::

    pagurus bench imagefuzz [--json] [--mutations N] [--seconds S] [--seed S] [--programs files,unix,...] [--image DIR]

Real programs that hold files, deleted files and directories, sockets, watches, terminals and memory are dumped. Each
mutation changes one to four fields, records or files of such a dump (`tests/hostile/mutate_images.py`) and is judged by
the gate that is before each restore. Of every `STEP` mutations two are restored by CRIU in the real path, over a fresh
snapshot of the tree: one that the gate lets through, and one that it refuses, with the gate held open, so that CRIU's
private root is tried by itself. Bait on the host and fanotify tell what CRIU did outside.

`mutations`, `refused`, `passed`: what the gate said. `restores`: through CRIU, `restored` of them to the end; `open` of
them with the gate held open. `timed_out`, `open_timed_out`: stopped after EXIT_TIMEOUT seconds; `waited` says what had
been
changed. `died`: CRIU crashed although the gate had let it pass. `escapes`: what changed on the host. `crashes`: errors
of ours that are no refusal. `slowest_ms`: of the gate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from bench.checkpoint import Ours
from bench.harness import aftermath, command
from sandbox import paths
from sandbox.container.container import Container
from sandbox.criu import restore as restoring
from sandbox.criu.gate import gate
from sandbox.criu.gate.images import CriuImages, ImageRefused
from sandbox.errors import PagurusError
from sandbox.tree import btrfs
from tests.conformance.equality import programs
from tests.hostile.mutate_images import Files, Mutator
from tests.hostile.watched_host import Observed, WatchedHost

STEP = 250  # mutations of which two are restored
EXIT_TIMEOUT = 6.0  # seconds for a restore
PROGRAMS = "ghosts,files,unix,fifo,shared,watch,terminal,passed,users"
TREE = (
    "mkdir -p /z/real/dir /victim; echo x > /z/real/file; ln -s {bait} /out; ln -s / /loop; ln -s .. /z/up; "
    "ln -s /proc/1/root{bait} /byproc; ln -s {bait}/victim.txt /z/link; "
)
#: Holds a deleted directory, a deleted file, a file by its second name, a FIFO, a socket and a link.
GHOSTS = """
cat > /z/hold.py <<'E'
import os, signal, socket
os.mkdir('/victim/gone'); a = os.open('/victim/gone', 0); os.rmdir('/victim/gone')
b = open('/victim/victim.txt', 'w+'); b.write('mine' * 9999); b.flush(); os.unlink('/victim/victim.txt')
os.mkfifo('/victim/fifo'); c = os.open('/victim/fifo', os.O_RDWR); os.unlink('/victim/fifo')
d = socket.socket(socket.AF_UNIX); d.bind('/victim/socket'); d.listen()
os.symlink('/etc', '/victim/link'); e = os.open('/victim/link', os.O_PATH | os.O_NOFOLLOW); os.unlink('/victim/link')
f = open('/z/real/file'); os.chdir('/z/real/dir')
open('/z/ready', 'w').close()
while True: signal.pause()
E
python3 /z/hold.py >/dev/null 2>&1 &
while [ ! -e /z/ready ]; do sleep 0.02; done
"""


@dataclass
class Dumped:
    """One program's images, and the sandbox that they are restored into."""

    name: str
    container: Container
    images: Files
    tree: Path
    mounted: Path | None = None


@dataclass
class Tally:
    mutations: int = 0
    refused: int = 0
    passed: int = 0
    restores: int = 0
    open: int = 0
    restored: int = 0
    timed_out: int = 0
    open_timed_out: int = 0
    died: int = 0
    slowest_ms: float = 0.0
    escapes: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        limit = sorted(self.reasons.items(), key=lambda item: -item[1])[:12]
        return {**vars(self), "slowest_ms": round(self.slowest_ms, 1), "reasons": dict(limit)}


class Fuzz:
    def __init__(self, ours: Ours, host: WatchedHost, seed: int):
        self.ours = ours
        self.host = host
        self.draw = random.Random(seed)
        links = ["/out", "/loop", "/z/up", "/byproc", "/z/link", "/proc/1/root", "/proc/self/cwd", "/z/real", "/victim"]
        self.mutator = Mutator(self.draw, [*host.paths(), *links, *(f"{one}/victim.txt" for one in links), "/", "/etc"])
        self.tally = Tally()
        self.dumps: list[Dumped] = []

    async def add(self, name: str, script: str) -> None:
        """Dump a program; its sandbox stays, without processes."""
        ours = self.ours
        container = await Container.create(ours.spec())
        trees: list[Path] = []
        place = ours.checkpointer.captures / f"fuzz-{name}"
        try:
            done = await container.exec(["/bin/sh", "-c", TREE.format(bait=self.host.bait) + "\n" + script], timeout=60)
            if done.exit_code:
                raise PagurusError(f"{name}: {done.stderr[-300:]!r}")
            await ours.checkpointer.capture(
                container,
                place,
                on_frozen=lambda: trees.append(ours.snapshot(container.tree, readonly=True)),
            )
            images = await asyncio.to_thread(_read, place)
            await ours.checkpointer.forget(container)
            await container.kill()
        except BaseException:
            await container.destroy()
            raise
        self.dumps.append(Dumped(name, container, images, trees[0]))

    async def close(self) -> None:
        for dumped in self.dumps:
            await self.ours.checkpointer.forget(dumped.container)
            await dumped.container.destroy()

    async def step(self, size: int) -> None:
        """Judge `size` mutations of one program and restore two of them."""
        dumped = self.draw.choice(self.dumps)
        await self._fresh_tree(dumped)
        passed, refused = await asyncio.to_thread(self._judge, dumped, size)
        for files, held_open in ((passed, False), (refused, True)):
            if files is not None:
                await self._restore(dumped, files, held_open)

    def _judge(self, dumped: Dumped, size: int) -> tuple[Files | None, Files | None]:
        """Of the mutations that pass and of those that are refused, one each."""
        tally = self.tally
        chosen: list[Files | None] = [None, None]
        with gate.trees(*dumped.container.trees()) as opened:
            for _ in range(size):
                files = self.mutator.changed(dumped.images)
                began = time.perf_counter()
                try:
                    gate.passes(
                        CriuImages({name: len(content) for name, content in files.items()}, files.__getitem__), opened
                    )
                    tally.passed += 1
                    place = 0
                except ImageRefused as refusal:
                    tally.refused += 1
                    reason = " ".join(word for word in refusal.reason.split() if not any(map(str.isdigit, word)))[:60]
                    tally.reasons[reason] = tally.reasons.get(reason, 0) + 1
                    place = 1
                except Exception as error:  # noqa: BLE001  a finding: the gate may only refuse
                    tally.crashes.append(f"gate: {type(error).__name__}: {error}"[:300])
                    continue
                finally:
                    tally.mutations += 1
                    tally.slowest_ms = max(tally.slowest_ms, (time.perf_counter() - began) * 1e3)
                if chosen[place] is None or self.draw.random() < 0.02:
                    chosen[place] = files
        return chosen[0], chosen[1]

    async def _fresh_tree(self, dumped: Dumped) -> None:
        ours, old = self.ours, dumped.mounted
        await dumped.container.kill()
        dumped.mounted = ours.snapshot(dumped.tree, readonly=False)
        await dumped.container.remount(dumped.mounted)
        if old is not None:
            ours.trees.remove(old)
            btrfs.delete_subvolume(old)

    async def _restore(self, dumped: Dumped, files: Files, held_open: bool) -> None:
        tally, container = self.tally, dumped.container
        await self._fresh_tree(dumped)
        place = self.ours.checkpointer.captures / "fuzzed"
        if not await asyncio.to_thread(_write, place, files):
            return
        tally.restores += 1
        tally.open += held_open
        with Observed(container.cgroup.path) as observed:
            try:
                if held_open:
                    with mock.patch.object(gate, "passes", lambda *_, **__: None):
                        await self.ours.checkpointer.restore(container, place)
                else:
                    await self.ours.checkpointer.restore(container, place)
                tally.restored += 1
            except PagurusError as error:
                late = "gave no answer" in str(error)
                if late and not held_open:
                    changed = [
                        name for name in {**dumped.images, **files} if dumped.images.get(name) != files.get(name)
                    ]
                    tally.waited.append(f"{dumped.name}, {' '.join(changed)}: {error}"[:400])
                tally.timed_out += late and not held_open
                tally.open_timed_out += late and held_open
                tally.died += "died without" in str(error) and not held_open
            except Exception as error:  # noqa: BLE001  a finding, unless the gate would have kept it away
                if not held_open:
                    tally.crashes.append(f"restore: {type(error).__name__}: {error}"[:300])
            await container.kill()
        await asyncio.to_thread(shutil.rmtree, place)
        result = await asyncio.to_thread(self.host.findings, observed.pids)
        if result:
            gates = "gate held open" if held_open else "through the gate"
            tally.escapes += [f"{dumped.name}, {gates}: {one}"[:300] for one in result]


def _read(place: Path) -> Files:
    return {path.name: path.read_bytes() for path in place.iterdir() if path.suffix == ".img"}


def _write(place: Path, files: Files) -> bool:
    """Whether these files can lie in one directory."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    if any("/" in name for name in files):
        return False
    for name, content in files.items():
        (place / name).write_bytes(content)
    return True


async def run(options: argparse.Namespace) -> dict[str, Any]:
    restoring.TIMEOUT = EXIT_TIMEOUT
    directory = aftermath.directory("pagurus-imagefuzz-", "/dev/shm")
    host = WatchedHost()
    existing = {"ghosts": GHOSTS, **{name: start for name, (start, _) in programs().items()}}
    began = reported = time.monotonic()
    try:
        async with Ours(directory, options.image) as ours:
            fuzz = Fuzz(ours, host, options.seed)
            try:
                for name in options.programs.split(","):
                    await fuzz.add(name, existing[name])
                while fuzz.tally.mutations < options.mutations and time.monotonic() - began < options.seconds:
                    await fuzz.step(min(STEP, options.mutations - fuzz.tally.mutations))
                    if time.monotonic() - reported > 60:
                        reported = time.monotonic()
                        print(json.dumps(fuzz.tally.metrics()), file=sys.stderr, flush=True)
            finally:
                await fuzz.close()
    finally:
        host.close()
        shutil.rmtree(directory, ignore_errors=True)
    return {**fuzz.tally.metrics(), "seconds": round(time.monotonic() - began), "load": os.getloadavg()[0]}


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", default=PROGRAMS)
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    options = parser.parse_args(arguments)
    result = asyncio.run(run(options))
    command.show(result, options)
    return 1 if result["escapes"] or result["crashes"] else 0
