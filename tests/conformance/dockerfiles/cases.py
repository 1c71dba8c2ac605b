"""The corpus of Dockerfiles: what a case is, the context that all share, the images that they begin with.

Not a test module. A context is the same on each machine, times included; a case adds files of its own.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import re
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

TIME = 1_000_000  # seconds: mtime of everything in a context
APPLETS = [
    "sh",
    "cat",
    "chgrp",
    "chmod",
    "chown",
    "cp",
    "cut",
    "date",
    "dirname",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "grep",
    "gunzip",
    "gzip",
    "head",
    "id",
    "ln",
    "ls",
    "mkdir",
    "mkfifo",
    "mktemp",
    "mv",
    "printenv",
    "printf",
    "pwd",
    "readlink",
    "realpath",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "sleep",
    "sort",
    "stat",
    "tail",
    "tar",
    "tee",
    "test",
    "touch",
    "tr",
    "true",
    "truncate",
    "uname",
    "uniq",
    "wc",
    "which",
    "xargs",
    "adduser",
    "addgroup",
    "install",
    "unzip",
    "md5sum",
    "sha256sum",
    "dd",
    "awk",
]
_DIRECTORIES = {
    "etc": 0o755, "tmp": 0o1777, "srv": 0o755, "srv/deep": 0o700, "usr": 0o755, "usr/bin": 0o755, "dev": 0o755,
    "proc": 0o555, "sys": 0o555, "run": 0o755, "root": 0o700, "var": 0o755, "var/lib": 0o755, "home": 0o755,
}  # fmt: skip
_FILES = {
    "etc/passwd": b"root:x:0:0::/root:/bin/sh\napp:x:100:200::/:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "etc/group": b"root:x:0:\nstaff:x:300:app\n",
    "etc/hosts": b"127.0.0.1 localhost\n",
    "etc/resolv.conf": b"nameserver 127.0.0.1\n",
    "srv/file": b"old",
}
_LINKS = {"bin": "usr/bin", "way": "/srv", "dangling": "/new/place", "circle": "circle", "var/run": "/run"}

#: Images that are built by the reference, saved, and loaded here: their configuration matters.
DRESSED = """FROM box
ENV APP_HOME=/opt/app PATH=/opt/app/bin:$PATH EMPTY=
WORKDIR $APP_HOME
USER app
LABEL maintainer="somebody" version=1
EXPOSE 80 53/udp
VOLUME /data
HEALTHCHECK --interval=30s --retries=2 CMD true
STOPSIGNAL SIGINT
ENTRYPOINT ["/bin/echo"]
CMD ["from", "base"]
"""
TRIGGERS = """FROM box
ENV A=1
ONBUILD ARG WHO=nobody
ONBUILD ENV B=$A-$WHO
ONBUILD COPY note /triggered/
ONBUILD RUN echo $B > /triggered/b
"""
SHELLED = 'FROM box\nSHELL ["/bin/sh", "-ec"]\nMAINTAINER me\n'
#: The runtime layer of sandboxes has an /etc as well, which must not show.
LOCKED = "FROM box\nRUN chown 3:4 /etc && chmod 2751 /etc && touch -d @5000 /etc\n"
DERIVED = {"locked": LOCKED, "dressed": DRESSED, "triggers": TRIGGERS, "shelled": SHELLED}


@dataclass(frozen=True)
class Case:
    """A Dockerfile and what is around it. `files` come into the context: a text, bytes, or None for a directory."""

    text: str
    files: dict[str, str | bytes | None] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    contexts: dict[str, str] = field(default_factory=dict)  # of --build-context: a name, a directory of the context
    secrets: dict[str, str] = field(default_factory=dict)
    target: str = ""
    title: str = ""

    @property
    def name(self) -> str:
        """Readable, and another one for each case."""
        text = self.title or self.text.removeprefix("FROM plain\n").removeprefix("FROM box\n")
        mark = hashlib.blake2s(repr(self).encode("utf-8", "surrogateescape"), digest_size=3).hexdigest()
        return re.sub(r"[^\w.=+*!/:${}-]+", "-", text).strip("-")[-80:] + f"-{mark}"


def write_context(directory: Path, case: Case) -> None:
    """Fill an empty directory."""
    (directory / "app/sub").mkdir(parents=True)
    (directory / "empty").mkdir()
    files: dict[str, bytes] = {
        "app/a.py": b"a", "app/run": b"r", "app/sub/b.md": b"b", "note": b"note", "zeros": bytes(10240),
        "requirements.txt": b"x==1\n", ".env": b"K=V\n", "with blank": b"w", "p.tgz": archive("gz"), "p.tar": archive(),
        "p.txz": archive("xz"), "p.tzst": archive("zst"), "plain.gz": gzip.compress(b"no tar" * 500, mtime=0),
        "README.md": b"read\n",
    }  # fmt: skip
    for path, content in {**files, "Dockerfile": case.text, **case.files}.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            place.mkdir()
        else:
            place.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
    os.link(directory / "note", directory / "note2")
    links = {"app/abs": "/etc/passwd", "app/rel": "a.py", "link": "app", "flink": "app/a.py", **case.links}
    for link, target in links.items():
        (directory / link).symlink_to(target)
    for path, mode in {"app/run": 0o755, "app/sub": 0o750, "app/a.py": 0o640, **case.modes}.items():
        (directory / path).chmod(mode)
    for made in sorted(directory.rglob("*"), reverse=True):
        os.utime(made, (TIME, TIME), follow_symlinks=False)
    os.utime(directory, (TIME, TIME))


def archive(kind: str = "") -> bytes:
    """A tar with owners, modes, links and times of its own."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, mode, link in (("x", 0o750, ""), ("x/y", 0o4755, ""), ("x/z", 0o644, "x/y"), ("x/l", 0o777, "y")):
            member = tarfile.TarInfo(name)
            member.uid, member.gid, member.mode, member.mtime = 5, 6, mode, 2_000_000
            if name == "x":
                member.type = tarfile.DIRTYPE
            elif link:
                member.type, member.linkname = (tarfile.LNKTYPE if "/" in link else tarfile.SYMTYPE), link
            else:
                member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
    data = out.getvalue()
    if kind == "gz":
        return gzip.compress(data, mtime=0)
    if kind == "xz":
        return lzma.compress(data)
    return zstandard.compress(data) if kind == "zst" else data


def write_base(place: Path, busybox: Path | None) -> None:
    """The archive of the image ``plain``, or with a busybox of ``box``."""
    with tarfile.open(place, "w") as tar:

        def add(name: str, mode: int, kind: bytes, data: bytes = b"", link: str = "") -> None:
            member = tarfile.TarInfo(name)
            member.mode, member.type, member.linkname, member.size = mode, kind, link, len(data)
            member.mtime = TIME
            tar.addfile(member, io.BytesIO(data))

        for name, mode in _DIRECTORIES.items():
            add(name, mode, tarfile.DIRTYPE)
        for name, data in _FILES.items():
            add(name, 0o600 if name == "srv/file" else 0o644, tarfile.REGTYPE, data)
        for name, link in _LINKS.items():
            add(name, 0o777, tarfile.SYMTYPE, link=link)
        if busybox is not None:
            add("usr/bin/busybox", 0o755, tarfile.REGTYPE, busybox.read_bytes())
            for name in APPLETS:
                add(f"usr/bin/{name}", 0o777, tarfile.SYMTYPE, link="busybox")
