"""Unpacks archives that a stranger made and damaged, into trees that another process changes: is the host touched?

::

    pagurus bench treefuzz [--json] [--cases N] [--seconds S] [--seed S]

Each case is a tar stream of a few members (names that lead upwards or to the bait, links of both kinds, whiteouts,
files with holes, extended headers), every third one damaged at some bytes, some compressed. It is unpacked into a tree
that earlier cases have filled, by the rules of the host, of a sandbox, of a root file system or of a layer, while names
of that tree change places by renameat2 as fast as a process can. Bait on the host is watched by fanotify and compared.

`cases`: how many; `taken`, `refused`: what became of them; `escapes`: what happened to the bait or next to the tree;
`crashes`: errors of ours that are no refusal; `packed`: how many trees were packed again meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import os
import random
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.harness import aftermath, command
from sandbox.errors import PagurusError
from sandbox.image import oci
from sandbox.tree import archive, host_files, walk
from sandbox.tree.safe_path import directory
from tests.hostile.watched_host import WatchedHost

LIMIT = 1 << 20  # bytes of one case
CHECK_INTERVAL = 200  # cases between two looks at the host
RENEW_INTERVAL = 1000  # cases after which the tree is emptied
RULES = (host_files.RULES, archive.IN_SANDBOX, archive.ROOT, archive.LAYER)
KINDS = (
    *(tarfile.REGTYPE,) * 4,
    *(tarfile.SYMTYPE,) * 4,
    *(tarfile.LNKTYPE, tarfile.DIRTYPE) * 2,
    *(tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.CONTTYPE),
)
RACE = """
import ctypes, os, sys
libc, root = ctypes.CDLL(None), os.open(sys.argv[1], os.O_RDONLY)
pairs = [(b"a", b"link"), (b"a/b", b"link2"), (b"d", b"up")]
while True:
    for one, other in pairs:
        for _ in range(50): libc.syscall(316, root, one, root, other, 2)
"""


class CaseMaker:
    """Makes the stream of each case."""

    def __init__(self, seed: int, bait: list[str]) -> None:
        self._random = random.Random(seed)
        self._bait = bait

    def _name(self) -> str:
        pick = self._random
        parts = pick.choices(
            ["a", "b", "d", "link", "link2", "up", "f", ".wh.a", ".wh..wh..opq", "..", "victim.txt"], k=3
        )
        return pick.choice(
            [
                "/".join(parts[: pick.randint(1, 3)]),
                "/".join(parts),
                parts[0],
                "../" * pick.randint(1, 20) + pick.choice(self._bait).lstrip("/"),
                pick.choice(self._bait),
                f"link/{pick.choice(['victim.txt', 'dir/inner.txt', 'empty/new', 'new'])}",
                f"a/{'x' * pick.randint(1, 300)}",
            ]
        )

    def _target(self) -> str:
        pick = self._random
        bait = pick.choice(self._bait)
        return pick.choice(
            [bait, "../" * 20 + bait.lstrip("/"), f"/proc/self/root{bait}", "..", ".", "/", "a", "link", self._name()]
        )

    def _member(self, out: tarfile.TarFile) -> None:
        pick = self._random
        made = tarfile.TarInfo(self._name())
        made.type, made.mode = pick.choice(KINDS), pick.choice([0o644, 0o6777, 0o1777, 0, 0o755])
        content = b""
        if made.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            made.linkname = self._target()
        elif made.type in (tarfile.REGTYPE, tarfile.CONTTYPE):
            content = pick.randbytes(pick.choice([0, 1, 511, 512, 513, 3000]))
        if pick.random() < 0.2:
            number = str(pick.choice([-1, 0, 1, 512, 4096, 1 << 40, 1 << 63, "x"]))
            made.pax_headers = {
                pick.choice(
                    ["size", "GNU.sparse.realsize", "GNU.sparse.map", "GNU.sparse.size", "mtime", "uid"]
                ): number,
                "GNU.sparse.major": pick.choice(["0", "1"]),
                "GNU.sparse.minor": "0",
                pick.choice(["GNU.sparse.name", "path", "linkpath", "SCHILY.xattr.user.x"]): self._target(),
            }
            content = content or b"2\n0\n512\n4096\n512\n".ljust(512, b"\0") + bytes(1024)
        made.size = len(content)
        out.addfile(made, io.BytesIO(content))

    def make(self) -> bytes:
        pick, out = self._random, io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=pick.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])) as tar:
            for _ in range(pick.randint(1, 5)):
                with contextlib.suppress(ValueError):  # a name that the format cannot hold
                    self._member(tar)
        data = bytearray(out.getvalue())
        if pick.random() < 0.33:
            for _ in range(pick.randint(1, 4)):
                data[pick.randrange(len(data))] = pick.randrange(256)
        return gzip.compress(data, 1) if pick.random() < 0.1 else bytes(data)

    def rules(self) -> archive.Rules:
        return self._random.choice(RULES)

    def packs(self) -> bool:
        return self._random.random() < 0.05


@contextlib.contextmanager
def raced(tree: Path) -> Iterator[None]:
    racer = subprocess.Popen([sys.executable, "-c", RACE, str(tree)])
    try:
        yield
    finally:
        racer.kill()
        racer.wait()


def run(cases: int, seconds: float, seed: int) -> dict[str, object]:
    watched = WatchedHost()
    work = aftermath.directory("pagurus-treefuzz-", "/var/tmp")
    maker = CaseMaker(seed, watched.paths())
    counts: Counter[str] = Counter(cases=0, taken=0, refused=0, packed=0)
    escapes: list[str] = []
    crashes: Counter[str] = Counter()
    ending = time.monotonic() + seconds
    while counts["cases"] < cases and time.monotonic() < ending and not escapes:
        tree = work / "tree"
        tree.mkdir()
        for name, target in (("link", str(watched.bait)), ("link2", ".."), ("up", "../" * 20 + str(watched.bait)[1:])):
            (tree / name).symlink_to(target)
        for name in ("a/b", "d"):
            (tree / name).mkdir(parents=True)
        with raced(tree):
            for _ in range(min(RENEW_INTERVAL, cases - counts["cases"])):
                counts["cases"] += 1
                _try(maker, tree, counts, crashes)
                if counts["cases"] % CHECK_INTERVAL == 0:
                    if time.monotonic() > ending:
                        break
                    escapes += watched.findings(set())
        walk.remove_path(tree)
        escapes += watched.findings(set()) + [f"next to the tree: {path.name}" for path in work.iterdir()]
    watched.close()
    walk.remove_path(work)
    return {**counts, "escapes": escapes, "crashes": dict(crashes)}


def _try(maker: CaseMaker, tree: Path, counts: Counter[str], crashes: Counter[str]) -> None:
    data, rules = maker.make(), maker.rules()
    try:
        with directory(tree) as root, oci.decompressed(io.BytesIO(data)) as stream:
            archive.unpack(stream, root, limit=LIMIT, rules=rules)
        counts["taken"] += 1
    except PagurusError:
        counts["refused"] += 1
    except Exception as error:  # noqa: BLE001 - what it is, is what this asks for
        crashes[f"{type(error).__name__}: {error}"[:120]] += 1
    if maker.packs():
        with contextlib.suppress(PagurusError), directory(tree) as root, open(os.devnull, "wb") as out:
            archive.pack(root, "/", out)
            counts["packed"] += 1


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    options: argparse.Namespace = parser.parse_args(arguments)
    result = run(options.cases, options.seconds, options.seed)
    command.show(result, options)
    return 1 if result["escapes"] or result["crashes"] else 0
