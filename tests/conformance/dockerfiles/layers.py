"""Odd layers of images: each case is a list of layers, each layer a list of entries. Not a test module."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from tests.support.registry import ARCHITECTURE

KINDS = {
    "file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "sym": tarfile.SYMTYPE, "link": tarfile.LNKTYPE,
    "fifo": tarfile.FIFOTYPE, "char": tarfile.CHRTYPE, "block": tarfile.BLKTYPE,
}  # fmt: skip
PACKINGS = {
    "": bytes,
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "two gzip members": lambda data: gzip.compress(data[:700], mtime=0) + gzip.compress(data[700:], mtime=0),
    "zstd": zstandard.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@dataclass(frozen=True)
class Entry:
    """One entry of a layer's tar."""

    name: str
    kind: str = "file"
    to: str = ""
    data: bytes = b""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    time: float = 1_000_000
    pax: dict[str, str] = field(default_factory=dict)

    @property
    def header(self) -> tarfile.TarInfo:
        made = tarfile.TarInfo(self.name)
        made.type, made.linkname, made.mtime = KINDS[self.kind], self.to, self.time
        made.mode = self.mode or (0o755 if self.kind == "dir" else 0o644)
        made.uid, made.gid, made.size, made.pax_headers = self.uid, self.gid, len(self.data), dict(self.pax)
        made.devmajor, made.devminor = (1, 3) if self.kind in ("char", "block") else (0, 0)
        return made


def f(name: str, data: bytes = b"x", **more: object) -> Entry:
    return Entry(name, data=data, **more)  # type: ignore[arg-type]


def d(name: str, **more: object) -> Entry:
    return Entry(name, "dir", **more)  # type: ignore[arg-type]


def s(name: str, to: str, **more: object) -> Entry:
    return Entry(name, "sym", to, **more)  # type: ignore[arg-type]


def h(name: str, to: str, **more: object) -> Entry:
    return Entry(name, "link", to, **more)  # type: ignore[arg-type]


Layers = list[list[Entry]]
BASE = [d("a"), f("a/one", b"1"), f("a/two", b"2"), d("a/sub"), f("a/sub/three", b"3"), s("l", "a"), f("top", b"t")]
CASES: dict[str, Layers] = {
    "one layer": [BASE],
    "an empty layer": [BASE, [], [f("b")]],
    "no entries at all": [[]],
    "whiteout of a file": [BASE, [f("a/.wh.one", b"")]],
    "whiteout of a directory": [BASE, [f(".wh.a", b"")]],
    "whiteout of what is not there": [BASE, [f("a/.wh.none", b""), f("n/.wh.none", b"")]],
    "whiteout of a link": [BASE, [f(".wh.l", b"")]],
    "whiteout through a link": [BASE, [f("l/.wh.one", b"")]],
    "whiteout before its own file": [BASE, [f("a/.wh.one", b""), f("a/one", b"new")]],
    "whiteout behind its own file": [BASE, [f("a/one", b"new"), f("a/.wh.one", b"")]],
    "whiteout before a directory": [BASE, [f(".wh.a", b""), d("a"), f("a/new", b"n")]],
    "whiteout behind a directory": [BASE, [d("a"), f("a/new", b"n"), f(".wh.a", b"")]],
    "whiteout in the same layer alone": [[f("a", b"1"), f(".wh.a", b"")]],
    "opaque first": [BASE, [d("a"), f("a/.wh..wh..opq", b""), f("a/new", b"n")]],
    "opaque last": [BASE, [d("a"), f("a/new", b"n"), f("a/.wh..wh..opq", b"")]],
    "opaque with a directory of its own": [BASE, [d("a"), f("a/.wh..wh..opq", b""), d("a/sub"), f("a/sub/new", b"n")]],
    "opaque of the root": [BASE, [f(".wh..wh..opq", b""), f("new", b"n")]],
    "opaque without its directory": [BASE, [f("a/.wh..wh..opq", b"")]],
    "markers of aufs": [BASE, [f(".wh..wh.aufs", b""), d(".wh..wh.plnk"), f(".wh..wh.plnk/1.2", b"p"), f("b")]],
    "a directory becomes a file": [BASE, [f("a", b"file")]],
    "a file becomes a directory": [BASE, [d("top"), f("top/x")]],
    "a link becomes a directory": [BASE, [d("l"), f("l/x")]],
    "a directory becomes a link": [BASE, [s("a", "/top")]],
    "a file becomes a link": [BASE, [s("top", "a/one")]],
    "a directory gets another mode": [BASE, [d("a", mode=0o700, uid=5, gid=6, time=2_000_000)]],
    "files through a link to a directory": [BASE, [f("l/new", b"n")]],
    "files through an absolute link": [[d("a"), s("abs", "/a"), f("abs/x")]],
    "hard link within a layer": [[f("a", b"1"), h("b", "a")]],
    "hard link across layers": [BASE, [h("b", "a/one"), h("c", "a/one")]],
    "hard link to a file replaced in its layer": [BASE, [f("a/one", b"new"), h("b", "a/one")]],
    "hard link with a mode of its own": [[f("a", b"1", mode=0o4755), h("b", "a", mode=0o600, uid=7, time=3_000_000)]],
    "hard link to a symbolic link": [[f("a", b"1"), s("b", "a"), h("c", "b")]],
    "hard link by an absolute name": [[f("a", b"1"), h("b", "/a")]],
    "hard link by a dotted name": [[f("./a", b"1"), h("./b", "./a")]],
    "hard link to itself": [[f("a", b"1"), h("a", "a")]],
    "hard link to nothing": [[h("a", "none")]],
    "the same file twice": [[f("a", b"1", mode=0o600), f("a", b"22", mode=0o644)]],
    "the same directory twice": [[d("a", mode=0o700, uid=5), f("a/x"), d("a", mode=0o755, uid=6, time=2_000_000)]],
    "file, then directory of its name": [[f("a", b"1"), d("a"), f("a/x")]],
    "directory, then file of its name": [[d("a"), f("a/x"), f("a", b"1")]],
    "no directories named": [[f("a/b/c/d", b"1", uid=5, gid=6)]],
    "a directory behind what is in it": [[f("a/b", b"1"), d("a", mode=0o500, uid=5, time=2_000_000)]],
    "absolute names": [[d("/a"), f("/a/b", b"1")]],
    "dotted names": [[d("./"), d("./a/"), f("./a/./b", b"1"), f(".//c", b"1")]],
    "names that go up": [[d("a"), f("a/../b", b"1")]],
    "names that leave": [[f("../b", b"1")]],
    "names with slashes at the end": [[d("a/"), f("a/b", b"1")]],
    "names of all kinds": [[f("a b", b""), f("back\\slash", b""), f("new\nline", b""), f("é", b""), f("-dash", b"")]],
    "a name that is no UTF-8": [[f("\udcff\udcfe", b"1")]],
    "long names": [[f("/".join(["d" * 60] * 6), b"1"), s("l" * 200, "t" * 300), f("n" * 255, b"2")]],
    "a long hard link": [[f("x" * 150, b"1"), h("y" * 150, "x" * 150)]],
    "a very deep directory": [[d("/".join(["d"] * 100)), f("/".join(["d"] * 100 + ["f"]), b"1")]],
    "owners": [[f("a", b"", uid=1000, gid=1000), f("b", b"", uid=65535, gid=65534), s("c", "a", uid=5, gid=6)]],
    "large owners": [[f("a", b"", uid=100_000, gid=2_000_000)]],
    "modes": [
        [
            f("a", b"", mode=0o4755),
            f("b", b"", mode=0o2755),
            d("c", mode=0o1777),
            d("e", mode=0o2775),
            f("g", b"", mode=0o7777),
        ]
    ],
    "modes without a bit": [[Entry("a", mode=0o100000), d("b", mode=0o40001), f("b/c", b"1")]],
    "times": [[f("a", b"", time=0), f("b", b"", time=1.5), f("c", b"", time=1_400_000_000.123456789), d("e", time=5)]],
    "times before 1970": [[f("a", b"", time=-5)]],
    "times of links": [[s("a", "b", time=5)]],
    "fifo": [[Entry("p", "fifo", mode=0o640, uid=5, gid=6)]],
    "devices": [[Entry("c", "char"), Entry("b", "block"), f("x")]],
    "attributes": [
        [
            f("a", pax={"SCHILY.xattr.user.note": "hello", "SCHILY.xattr.user.empty": ""}),
            d("b", pax={"SCHILY.xattr.user.note": "dir"}),
        ]
    ],
    "capabilities": [[f("a", pax={"SCHILY.xattr.security.capability": "\x01\0\0\x02\0\x04" + "\0" * 14})]],
    "capabilities and an owner": [
        [f("a", uid=5, pax={"SCHILY.xattr.security.capability": "\x01\0\0\x02\0\x04" + "\0" * 14})]
    ],
    "attributes of overlay": [
        [d("a"), f("a/x")],
        [d("a", pax={"SCHILY.xattr.trusted.overlay.opaque": "y"}), f("a/y")],
    ],
    "attributes as libarchive has them": [[f("a", pax={"LIBARCHIVE.xattr.user.note": "aGVsbG8="})]],
    "a global header": [[f("a", pax={"comment": "one"})]],
    "contents": [[f("a", b""), f("b", b"b" * 511), f("c", b"c" * 512), f("d", b"d" * 513), f("e", bytes(200_000))]],
    "links to nowhere": [[s("a", "/none/../../x"), s("b", ""), s("c", "c"), s("e", "x" * 4000)]],
    "an entry called .": [[d("."), f("a")]],
    "an entry called /": [[d("/", mode=0o711), f("a")]],
    "whiteout with a link's name": [BASE, [s(".wh.top", "x")]],
    "three layers": [BASE, [f("a/.wh.one", b""), f("b", b"2")], [f("a/one", b"again"), f(".wh.b", b"")]],
    "a whiteout brought back": [BASE, [f(".wh.a", b"")], [d("a"), f("a/late", b"l")]],
}


def layer(entries: list[Entry]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            tar.addfile(entry.header, io.BytesIO(entry.data))
    return out.getvalue()


def sparse(folder: Path, form: str) -> bytes:
    """A layer that GNU tar made of a file with holes. `form`: posix with a version, or gnu."""
    import subprocess

    folder.mkdir()
    with (folder / "holes").open("wb") as file:
        file.truncate(3 << 20)
        for where in (0, 1 << 20, (3 << 20) - 3):
            file.seek(where)
            file.write(b"end")
    options = ["--format=gnu"] if form == "gnu" else ["--format=posix", f"--sparse-version={form}"]
    fixed = ["--owner=5", "--group=6", "--numeric-owner", "--mtime=@1000000"]
    command = ["tar", "-C", str(folder), "-S", *options, *fixed, "-cf", "-", "holes"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def save(place: Path, layers: list[bytes], packing: str = "") -> None:
    """An archive as `docker save` writes it."""
    packed = [PACKINGS[packing](each) for each in layers]
    about = {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {"Env": ["A=b"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in layers]},
        "history": [{"created_by": "test"} for _ in layers],
    }
    config = json.dumps(about).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    files = {f"{number}/layer.tar": data for number, data in enumerate(packed)}
    manifest = [{"Config": name, "RepoTags": ["odd:latest"], "Layers": [*files]}]
    with tarfile.open(place, "w") as tar:
        for path, data in {"manifest.json": json.dumps(manifest).encode(), name: config, **files}.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
