"""Unpacks and copies what strangers made, while they change it: archives, images, contexts, trees of living sandboxes.

::

    pagurus bench treefuzz [--json] [--cases N] [--seconds S] [--seed S]

A case is one of four: an archive, damaged or not, that is unpacked by the rules of the host, of a sandbox, of a root
file system or of a layer; an archive of an image (OCI, or as ``docker save`` writes it), through all that an import
does with it; a build context, chosen, hashed and packed; a living sandbox, whose files are read, listed, moved, copied
into, uploaded and downloaded to a directory that earlier cases have filled. Names of the tree, of the context and of
the sandbox's tree change places by renameat2 all the while, in the sandbox by a program that runs in it.

All of it lies on file systems of its own, in memory and for sandboxes. There, and on the host's, is bait: fanotify
notes whatever is done to it, also that it is only opened, and whatever this process writes, makes, moves or removes
anywhere on the host's file system. Its content, attributes and targets of links are looked for in all that was packed.

`cases`, `archives`, `images`, `contexts`, `sandboxes`: how many; `taken`, `refused`: what became of them; `packed`: how
many trees were packed; `escapes`: what happened outside, or was read there; `crashes`: errors of ours that are no
refusal; `events`: how many changes of anybody the watcher has seen; `seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from daemon.api import files as routes
from sandbox import paths
from sandbox.container.container import Container
from sandbox.errors import Invalid, PagurusError
from sandbox.image import store, unpacking
from sandbox.messages import Limits
from sandbox.sdk.sources.context import BuildContext, read_dockerfile
from sandbox.tree import archive, compressed, files, host_files, walk
from sandbox.tree.copy_into import TargetTree, copy_into
from sandbox.tree.pool import BtrfsPool
from sandbox.tree.safe_path import as_sandbox_root, directory
from tests.hostile import isolation, mutate_trees
from tests.hostile.watched_host import WatchedHost

LIMIT = 1 << 20  # bytes of one case
CHECK_INTERVAL = 200  # cases between two looks at the host
RENEW_INTERVAL = 2000  # cases after which the trees and the sandbox are new ones
POOL_SIZE = 1 << 30
MAX_PACKED = 8 << 20  # bytes; a link may have become one to the root of the sandbox
LIMITS = Limits(memory="128MiB", processes=16, disk="64MiB")
RACE = """
import ctypes, os, sys, time
libc, root = ctypes.CDLL(None), os.open(sys.argv[1], os.O_RDONLY)
pairs = [(b"a", b"link"), (b"a/b", b"link2"), (b"d", b"up"), (b"f", b"link")]
while True:
    for one, other in pairs:
        for _ in range(20): libc.syscall(316, root, one, root, other, 2)
    time.sleep(0.0002)
"""
PREPARE = """
import os
os.makedirs('/race/a/b'); os.mkdir('/race/d'); open('/race/f', 'w').write('x')
for name, target in {links!r}.items(): os.symlink(target, '/race/' + name)
"""


@contextlib.contextmanager
def raced(tree: Path) -> Iterator[None]:
    racer = subprocess.Popen([sys.executable, "-c", RACE, str(tree)])
    try:
        yield
    finally:
        racer.kill()
        racer.wait()


class PackedBytes(io.BytesIO):
    """As many as are looked at."""

    def write(self, data: Any) -> int:
        if self.tell() > MAX_PACKED:
            raise Invalid("more is packed than is looked at")
        return super().write(data)


class TreeFuzzer:
    """Does each case, and counts what becomes of it."""

    def __init__(self, place: Path, cases: mutate_trees.TreeCases, far: WatchedHost, near: WatchedHost) -> None:
        self.counts: Counter[str] = Counter({name: 0 for name in ("cases", "taken", "refused", "packed", *KINDS)})
        self.crashes: Counter[str] = Counter()
        self.escapes: list[str] = []
        self.sandbox: Container | None = None
        self._cases, self._place, self._bait = cases, place, far.bait
        self._secrets = [each.secret.encode() for each in (far, near)]

    def case(self) -> None:
        """One more."""
        kind = self._cases.pick.choices([*KINDS], [weight for weight, _ in KINDS.values()])[0]
        self.counts["cases"] += 1
        self.counts[kind] += 1
        try:
            KINDS[kind][1](self)
            self.counts["taken"] += 1
        except PagurusError:
            self.counts["refused"] += 1
        except Exception as error:  # noqa: BLE001 - what it is, is what this asks for
            *_, place = [
                item for item in traceback.extract_tb(error.__traceback__) if "/sandbox/" in item.filename
            ] or traceback.extract_tb(error.__traceback__)
            text = f"{kind}: {Path(place.filename).name}:{place.lineno}: {type(error).__name__}: {error}"
            self.crashes[text[:160]] += 1

    def some(self, count: int) -> None:
        """In a thread: who acts as a sandbox's root changes what belongs to the thread."""
        for _ in range(count):
            self.case()

    def _see(self, what: str, packed: bytes) -> None:
        self.counts["packed"] += 1
        if any(secret in packed for secret in self._secrets):
            self.escapes.append(f"the host's content is in {what}")

    # ----------------------------------------------------------------- the kinds

    def archives(self) -> None:
        data, rules = self._cases.archive(), self._cases.pick.choice(mutate_trees.RULES)
        with directory(self._place / "tree") as root:
            try:
                with compressed.decompressed(io.BytesIO(data)) as stream:
                    archive.unpack(stream, root, limit=LIMIT, rules=rules)
            finally:
                if self._cases.chance(0.05):
                    with contextlib.suppress(PagurusError):
                        out = PackedBytes()
                        archive.pack(root, "/", out)
                        self._see("a tree", out.getvalue())

    def images(self) -> None:
        with host_files.fresh_directory(self._place) as directory:
            (directory / "source").write_bytes(self._cases.layout())
            tree = directory / "tree"
            tree.mkdir()
            unpacking.fill(directory / "source", tree)
            store.normalise(tree)

    def contexts(self) -> None:
        root = self._place / "context"
        with contextlib.suppress(PagurusError):
            self._see("a Dockerfile", read_dockerfile(root, None).encode("utf-8", "surrogateescape"))
        chosen = BuildContext.of(root).select(self._cases.sources(), 1)
        chosen.digest()
        out = PackedBytes()
        chosen.pack(out)
        self._see("a context", out.getvalue())

    def sandboxes(self) -> None:
        assert self.sandbox is not None
        self._cases.pick.choice([self._files, self._upload, self._download, self._copy])(self.sandbox)

    def _files(self, made: Container) -> None:
        inside, base, name = made.inside, made.spec.uid_base, f"/race/{self._cases.name()}"
        act = self._cases.pick.randrange(6)
        if act == 0:
            self._see("a file", files.read(inside, name, limit=LIMIT))
        elif act == 1:
            files.status(inside, base, name)
        elif act == 2:
            self._see("names", repr(files.entries(inside, base, name)).encode())
        elif act == 3:
            files.make_directory(inside, base, name)
        elif act == 4:
            files.move(inside, base, name, f"/race/{self._cases.name()}")
        else:
            files.write(inside, base, name, io.BytesIO(b"mine"))

    def _upload(self, made: Container) -> None:
        sent = os.memfd_create("archive", os.MFD_CLOEXEC)
        os.write(sent, self._cases.archive())
        os.lseek(sent, 0, os.SEEK_SET)
        path = f"/race/{self._cases.name()}"
        routes.unpack(made.inside, made.spec.uid_base, path, sent, LIMIT)

    def _download(self, made: Container) -> None:
        out = PackedBytes()
        with made.inside.opened() as root:
            archive.pack(root, f"/race/{self._cases.pick.choice(['', 'a', 'd', 'link', 'up'])}", out)
        self._see("a download", out.getvalue())
        below = "" if self._cases.chance(0.5) else self._cases.name()
        with host_files.target(self._place / "tree", below) as into:
            host_files.unpack(io.BytesIO(out.getvalue()), into, limit=LIMIT)

    def _copy(self, made: Container) -> None:
        with (
            directory(self._place / "context") as source,
            made.inside.opened() as root,
            as_sandbox_root(made.spec.uid_base),
        ):
            copy_into(source, TargetTree(root, made.spec.uid_base), self._cases.copy_request(), limit=LIMIT)

    # ----------------------------------------------------------------- the trees

    @asynccontextmanager
    async def trees(self, world: isolation.World) -> AsyncIterator[None]:
        """A tree, a context and a sandbox, new ones, which change as long as the block runs."""
        tree, context = self._place / "tree", self._place / "context"
        tree.mkdir()
        context.mkdir()
        mutate_trees.prepare(tree, self._bait)
        (tree / "f").touch()
        self._cases.fill_context(context, self._bait)
        made = self.sandbox = await isolation.container(world, LIMITS, isolation.FIRST_UID)
        try:
            links = {name: target.format(bait=self._bait) for name, target in mutate_trees.LINKS.items()}
            done = await made.exec(["python3", "-c", PREPARE.format(links=links)])
            assert done.exit_code == 0, done.stderr
            await made.exec(["sh", "-c", 'setsid python3 -c "$1" /race >/dev/null 2>&1 &', "sh", RACE])
            with raced(tree), raced(context):
                yield
        finally:
            await isolation.remove(made)
        for item in (tree, context):
            walk.remove_path(item)


KINDS: dict[str, tuple[int, Callable[[TreeFuzzer], None]]] = {
    "archives": (70, TreeFuzzer.archives),
    "images": (8, TreeFuzzer.images),
    "contexts": (10, TreeFuzzer.contexts),
    "sandboxes": (12, TreeFuzzer.sandboxes),
}


async def _run(cases: int, seconds: float, seed: int, pool: BtrfsPool, memory: Path) -> dict[str, object]:
    place = memory / "place"
    place.mkdir(mode=0o700)
    world = isolation.World(pool, (paths.state() / "images/debian").resolve(), memory)
    far, near = WatchedHost(reads=True), WatchedHost(str(place.parent), reads=True)
    maker = mutate_trees.TreeCases(seed, [*far.paths(), *near.paths()])
    fuzzer = TreeFuzzer(place, maker, far, near)
    counts, began = fuzzer.counts, time.monotonic()

    def over() -> bool:
        return counts["cases"] >= cases or time.monotonic() > began + seconds or bool(fuzzer.escapes)

    try:
        for watched in (far, near):
            os.setxattr(watched.bait / "victim.txt", "user.pagurus", watched.secret.encode())
            watched.findings(set())
        while not over():
            maker.renew()
            async with fuzzer.trees(world):
                far.findings(set())  # making a sandbox writes to the host
                for _ in range(RENEW_INTERVAL // CHECK_INTERVAL):
                    await asyncio.to_thread(fuzzer.some, min(CHECK_INTERVAL, cases - counts["cases"]))
                    fuzzer.escapes += far.findings({os.getpid()}) + near.findings(set())
                    if over():
                        break
            fuzzer.escapes += [f"next to the tree: {path.name}" for path in place.iterdir()]
    finally:
        far.close()
        near.close()
    result = {"escapes": fuzzer.escapes, "crashes": dict(fuzzer.crashes), "events": far.events}
    return {**counts, **result, "seconds": round(time.monotonic() - began, 1)}


def run(cases: int, seconds: float, seed: int) -> dict[str, object]:
    state = aftermath.directory("pagurus-treefuzz-", "/var/tmp")
    memory = state / "memory"
    memory.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=1g", "treefuzz", str(memory)], check=True)
    pool = BtrfsPool(state, size=POOL_SIZE).ensure()
    try:
        return asyncio.run(_run(cases, seconds, seed, pool, memory))
    finally:
        pool.close()
        subprocess.run(["umount", str(memory)], check=True)
        shutil.rmtree(state)


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    options: argparse.Namespace = parser.parse_args(arguments)
    result = run(options.cases, options.seconds, options.seed)
    command.show(result, options)
    return 1 if result["escapes"] or result["crashes"] else 0
