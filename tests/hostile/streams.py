"""Fuzzes what comes in: checkpoint streams of every kind of malice, into a real importer on a real pool.

::

    pagurus bench streams [--json] [--seconds S] [--mutations N] [--seed X] [--image DIR]

A child process takes the streams (tests/hostile/mutations.py: structure-aware, with the right hashes; half of them hold
the processes of a real sandbox, whose images are changed field by field), one after another, as the daemon would:
settings by the rules of new sandboxes, files on btrfs, pages and dump files in a store. What is taken in is then read
as the daemon reads it: verified, compared, exported again, removed. All of it lies on a file system of its own; the
parent watches every other one for what the child opens for writing, creates, moves or removes (fanotify, tried out
first by a file that the child does make), and compares sentinels beside the pool.

`mutations`, `taken`, `refused` (by error), `outside` (names touched elsewhere), `crashes` (exceptions that are no
answer, each with the number of its mutation), `hangs` (beyond TIMEOUT), `sentinels` (changed ones), `lost` (events of
the watcher), `descriptors` (left open at the end).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.checkpoint import Ours
from bench.harness import aftermath, command
from daemon.checkpoints.capture import Places
from daemon.host import create, mounts
from daemon.store import exports
from daemon.store.imports import Importer
from sandbox import paths
from sandbox.content.dumpfile import LEFT_OUT
from sandbox.content.pages import PageStore
from sandbox.content.transfer import TransferHeader
from sandbox.errors import NotFound, PagurusError
from sandbox.image.store import StoredImage
from sandbox.messages import ImageConfig, Verdict
from sandbox.tree import diff, hashing
from sandbox.tree.pool import BtrfsPool
from tests.hostile.mutate_images import Files
from tests.hostile.mutations import Stream, frames, mutate, seed
from tests.hostile.watcher import Watcher

TIMEOUT = 60.0  # seconds for one stream
SPACE = "6G"  # of the file system for all of it, in memory as far as it is used
DIGEST = "d" * 64
REPORT_INTERVAL = 200  # mutations
NEW_MOUNTS = 0x20000  # CLONE_NEWNS
CONTROL = "pagurus-streams-control"
DUMPED = "dumped"  # the file of the process images, beside the state


class Hung(BaseException):
    """One stream took longer than TIMEOUT."""


class Taker:
    """The daemon's side, without the daemon: an importer on a pool, and the readers of what it took in."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.pool = BtrfsPool(state, size=1 << 30).ensure()
        stored = state / "checkpoints"
        stored.mkdir(mode=0o700)
        (state / "dumps").mkdir()
        self.empty = state / "empty"
        self.empty.mkdir()
        self.places = Places(self.pool.sandboxes, self.pool.checkpoints, state / "dumps", stored)
        self.pages = PageStore(state / "pages")
        self.image = StoredImage(DIGEST, self.empty, ImageConfig())
        self.said = ""  # the last refusal

    def take(self, data: bytes, chance: random.Random) -> str:
        """What became of it: "taken", or the name of the error that answers it."""
        importer = Importer(self.places, self.pages, self.pool.need)
        try:
            step = chance.choice((1 << 20, 1 << 20, 4096, 977))
            for first in range(0, len(data), step):
                head = importer.feed(data[first : first + step])
                if head is not None:
                    importer.template = self._admitted(head, host_mounts=chance.random() < 0.1)
            row = importer.finish()
            importer.close()
            self._read(row, importer.head)
        except (PagurusError, OSError) as error:
            if isinstance(error, OSError):
                return f"OSError: {error.strerror}"
            self.said = str(error)
            return type(error).__name__
        finally:
            importer.abandon()
        return "taken"

    def _admitted(self, head: TransferHeader, *, host_mounts: bool) -> Any:
        if head.image_digest != DIGEST:
            raise NotFound("no such image")
        made = create.imported(head.template, self.image, host_mounts=host_mounts)
        mounts.checked(made.mounts)
        made.mounts = mounts.resolved(made.mounts, [self.state])
        return made

    def _read(self, row: Any, head: TransferHeader | None) -> None:
        """All that reads a checkpoint reads this one."""
        assert head is not None
        if row.files is not None:
            snapshot = self.places.snapshot(row.files)
            damage = hashing.damage(snapshot, hashing.Digest.load(self.places.digest(row.files)))
            assert not damage, damage
            diff.changes(self.empty, snapshot / "upper", self.empty)
        source = None if row.dump is None else self.places.packed(row.dump)
        for _ in exports.export(row, head, self.places, self.pages, source, None, None):
            pass


# --------------------------------------------------------------------------- the child


def child(state: Path, options: argparse.Namespace) -> None:
    """Takes streams until its time is over. Prints one JSON object per REPORT_INTERVAL, the last with ``done``."""
    os.environ["TMPDIR"] = str(state)
    dumped: Files = msgspec.msgpack.decode((state.parent / DUMPED).read_bytes())
    taker = Taker(state)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    sys.stdin.readline()  # the watcher knows us by now
    Path(options.control).touch()
    Path(options.control).unlink()
    print(json.dumps({"control": True}), flush=True)
    sys.stdin.readline()
    before = len(os.listdir("/proc/self/fd"))
    answers: Counter[str] = Counter()
    troubles: list[str] = []
    hangs = 0
    end, number = time.monotonic() + options.seconds, 0
    signal.signal(signal.SIGALRM, _hung)
    while number < options.mutations and time.monotonic() < end:
        number += 1
        try:
            signal.setitimer(signal.ITIMER_REAL, TIMEOUT)
            answers[one(taker, dumped, options.seed, number)] += 1
        except Hung:
            hangs += 1
            troubles.append(f"{number}: hung")
        except Exception:  # noqa: BLE001 - whatever it is, it is what the fuzzer looks for
            troubles.append(f"{number}: {traceback.format_exc()[-1500:]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if number % REPORT_INTERVAL == 0:
            report(number, answers, troubles, hangs, before)
    report(number, answers, troubles, hangs, before, done=True)


def one(taker: Taker, dumped: Files, chosen: int, number: int) -> str:
    """One mutation; the same for the same numbers."""
    chance = random.Random(f"{chosen}/{number}")
    checkpoint = f"c-{number:012x}"
    template = {"image": "debian", "image_digest": DIGEST}
    stream: Stream = seed(chance, DIGEST, template, checkpoint, dumped)
    if not stream.images:
        stream.head["verdict"] = Verdict.FILES.value
    if number % 20:  # each twentieth is whole, and must be taken
        mutate(stream, chance)
        return taker.take(frames(stream, chance), chance)
    said = taker.take(frames(stream, random.Random("quiet")), chance)
    if said != "taken":
        raise AssertionError(f"a stream without a mutation was not taken: {said} {taker.said}")
    return said


def report(
    number: int, answers: Counter[str], troubles: list[str], hangs: int, before: int, done: bool = False
) -> None:
    left = len(os.listdir("/proc/self/fd")) - before
    result = {"mutations": number, "answers": answers, "crashes": troubles, "hangs": hangs, "descriptors": left}
    print(json.dumps({**result, "done": done}), flush=True)


def _hung(_number: int, _frame: object) -> None:
    raise Hung


# --------------------------------------------------------------------------- the parent


async def dump(image: Path) -> Files:
    """What a checkpoint of a small sandbox holds of its processes."""
    with aftermath.TemporaryDirectory("pagurus-streams-", "/dev/shm") as name:
        async with Ours(Path(name), image) as ours, ours.sandbox("sleep 1000 >/dev/null 2>&1 &") as container:
            place = ours.checkpointer.captures / "dumped"
            await ours.checkpointer.capture(container, place, on_frozen=lambda: None)
            return {path.name: path.read_bytes() for path in place.iterdir() if not path.name.endswith(LEFT_OUT)}


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A file system of its own for everything that may be written, in a mount namespace that nobody copies."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace: run as root")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    directory = aftermath.directory("pagurus-streams-")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SPACE},mode=700", "streams", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", "--recursive", directory], check=True)
        directory.rmdir()


def sentinels(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """What lies beside the state, as it is."""
    result = {}
    for path in sorted(directory.iterdir()):
        status = path.stat()
        result[path.name] = (status.st_mode, status.st_mtime_ns, path.read_bytes())
    return result


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    state, alongside = directory / "state", directory / "alongside"
    state.mkdir(mode=0o700)
    alongside.mkdir()
    for name in ("passwd", "secret", "etc"):
        (alongside / name).write_text(name)
    was = sentinels(alongside)
    control = Path(tempfile.gettempdir()) / f"{CONTROL}-{os.getpid()}"
    command = [sys.executable, "-m", "pagurus", "bench", "streams", "--child", str(state), "--control", str(control)]
    command += ["--seconds", str(options.seconds), "--mutations", str(options.mutations), "--seed", str(options.seed)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process, Watcher(elsewhere(directory)) as watcher:
        last = follow(process, watcher, control.name)
    watcher_said = sorted(watcher.reported)[:50]
    return {
        "mutations": last.get("mutations", 0),
        "taken": last.get("answers", {}).get("taken", 0),
        "refused": {name: count for name, count in last.get("answers", {}).items() if name != "taken"},
        "outside": watcher_said,
        "events": watcher.events,
        "lost": watcher.lost,
        "crashes": last.get("crashes", []) + ([] if last.get("done") else ["the child is gone"]),
        "hangs": last.get("hangs", 0),
        "sentinels": [name for name, value in sentinels(alongside).items() if was.get(name) != value],
        "descriptors": last.get("descriptors", -1),
        "seed": options.seed,
    }


def elsewhere(directory: Path) -> list[Path]:
    """One directory on each other file system that somebody writes to."""
    result: dict[int, Path] = {}
    own = directory.stat().st_dev
    for candidate in ("/", "/tmp", "/var/tmp", "/run", "/dev/shm", "/dev", "/home", "/root", tempfile.gettempdir()):
        path = Path(candidate)
        if path.is_dir() and path.stat().st_dev != own:
            result.setdefault(path.stat().st_dev, path)
    return list(result.values())


def follow(process: subprocess.Popen[bytes], watcher: Watcher, control: str) -> dict[str, Any]:
    """Read what the child says, and what it does, to the end. Raises RuntimeError when the watcher sees nothing."""
    assert process.stdin is not None and process.stdout is not None
    last: dict[str, Any] = {}
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    while True:
        selector.select(timeout=0.2)
        watcher.poll()
        if not selector.select(timeout=0):
            continue
        line = process.stdout.readline()
        if not line:
            return last
        said = json.loads(line)
        if "ready" in said:
            watcher.pids.add(said["ready"])
        elif "control" in said:
            watcher.poll()
            if not any(control in item for item in watcher.reported):
                process.kill()
                raise RuntimeError("the watcher does not see what the child makes: it proves nothing")
            watcher.reported.clear()
        else:
            last = said
            newest = "".join(said["crashes"][-1:])
            print(
                f"{said['mutations']} mutations, {len(said['crashes'])} crashes {newest}", file=sys.stderr, flush=True
            )
            continue
        process.stdin.write(b"go\n")
        process.stdin.flush()


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--mutations", type=int, default=1 << 40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    parser.add_argument("--only", type=int, help="take this one mutation, and show what comes of it")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--control", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        child(options.child, options)
        return 0
    dumped = asyncio.run(dump(options.image))
    with place() as directory:
        (directory / DUMPED).write_bytes(msgspec.msgpack.encode(dumped))
        if options.only is not None:
            (directory / "state").mkdir(mode=0o700)
            taker = Taker(directory / "state")
            print(one(taker, dumped, options.seed, options.only), taker.said)
            return 0
        result = run(options, directory)
    command.show(result, options)
    bad = result["outside"] or result["crashes"] or result["hangs"] or result["sentinels"] or result["lost"]
    return 1 if bad or result["descriptors"] else 0
