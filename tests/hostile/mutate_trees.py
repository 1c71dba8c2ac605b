"""Makes what a stranger would have the host unpack or copy: archives, image layouts, build contexts, names.

Members of archives are packed once and put together anew for each case: packing takes longer than unpacking.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import tarfile
from pathlib import Path
from typing import Any, Literal

from sandbox.messages import CopyRequest
from sandbox.tree import archive

RULES = (archive.HOST, archive.IN_SANDBOX, archive.ROOT, archive.LAYER)
PARTS = ("a", "b", "d", "link", "link2", "up", "f", "new", ".wh.a", ".wh..wh..opq", "..", "victim.txt")
LINKS = {"link": "{bait}", "link2": "..", "up": "../../../../../../../../../../../..{bait}"}  # in each tree
DIRECTORIES = ("a/b", "d")
MEMBERS = 1500  # that are ready
RENEWED = 50  # of them, for each thousand cases
LAYOUTS = ("oci", "docker")
DOCUMENTS = ("index.json", "manifest.json", "config.json", "oci-layout", "layer.tar")
MODES = ("", "", "", "755", "u+s", "7777")
OWNERS = ("", "", "0", "1000:1000", "nobody", "70000:70000", "root:daemon")
PATTERNS = ("*", "**", "a*", "**/*.txt", "link/*", "up/**", "a/../link/*", "[", "./", "/")
_KINDS = (
    *(tarfile.REGTYPE,) * 4,
    *(tarfile.SYMTYPE,) * 4,
    *(tarfile.LNKTYPE, tarfile.DIRTYPE) * 2,
    *(tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.CONTTYPE),
)
_EXTENDED = ("size", "GNU.sparse.realsize", "GNU.sparse.map", "GNU.sparse.size", "mtime", "uid")
_TEXTS = ("GNU.sparse.name", "path", "linkpath", "SCHILY.xattr.user.x", "SCHILY.xattr.security.capability")
_FORMATS: tuple[Literal[1, 2], ...] = (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
_ENDING = bytes(2 * tarfile.BLOCKSIZE)


class TreeCases:
    """What the cases consist of. `bait`: paths of the host that an attacker would like to reach."""

    def __init__(self, seed: int, bait: list[str]) -> None:
        self.pick = random.Random(seed)
        self._bait = bait
        self._members = [self._member() for _ in range(MEMBERS)]

    def renew(self) -> None:
        """Pack some members anew."""
        for _ in range(RENEWED):
            self._members[self.pick.randrange(MEMBERS)] = self._member()

    def chance(self, share: float) -> bool:
        return self.pick.random() < share

    # ----------------------------------------------------------------- names

    def name(self) -> str:
        """Of a member, or of what is asked for."""
        pick = self.pick
        parts = pick.choices(PARTS, k=3)
        way = pick.randrange(8)
        if way < 3:
            return "/".join(parts[: pick.randint(1, 3)])
        if way == 3:
            return parts[0]
        if way == 4:
            return "../" * pick.randint(1, 20) + pick.choice(self._bait).lstrip("/")
        if way == 5:
            return pick.choice(self._bait)
        if way == 6:
            return f"link/{pick.choice(['victim.txt', 'dir/inner.txt', 'empty/new', 'new'])}"
        return f"a/{'x' * pick.randint(1, 300)}"

    def target(self) -> str:
        """Of a link."""
        pick = self.pick
        bait = pick.choice(self._bait)
        return pick.choice(
            [bait, "../" * 20 + bait.lstrip("/"), f"/proc/self/root{bait}", "..", ".", "/", "a", "link", self.name()]
        )

    # ----------------------------------------------------------------- archives

    def _member(self) -> bytes:
        """Header, extended headers and content of one member, as tar packs them; nothing for a name it cannot hold."""
        pick, out = self.pick, io.BytesIO()
        made = tarfile.TarInfo(self.name())
        made.type, made.mode = pick.choice(_KINDS), pick.choice([0o644, 0o6777, 0o1777, 0, 0o755])
        content = b""
        if made.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            made.linkname = self.target()
        elif made.type in (tarfile.REGTYPE, tarfile.CONTTYPE):
            content = pick.randbytes(pick.choice([0, 1, 511, 512, 513, 3000]))
        if self.chance(0.2):
            number = str(pick.choice([-1, 0, 1, 512, 4096, 1 << 40, 1 << 63, "x"]))
            made.pax_headers = {pick.choice(_EXTENDED): number, pick.choice(_TEXTS): self.target()}
            made.pax_headers |= {"GNU.sparse.major": pick.choice(["0", "1"]), "GNU.sparse.minor": "0"}
            content = content or b"2\n0\n512\n4096\n512\n".ljust(512, b"\0") + bytes(1024)
        made.size = len(content)
        with contextlib.suppress(ValueError):
            header = made.tobuf(pick.choice(_FORMATS), "utf-8", "surrogateescape")
            out.write(header + content + bytes(-len(content) % tarfile.BLOCKSIZE))
        return out.getvalue()

    def archive(self) -> bytes:
        """A tar stream; every third one is damaged, some are compressed."""
        data = self._damaged(b"".join(self.pick.choices(self._members, k=self.pick.randint(1, 5))) + _ENDING)
        return gzip.compress(data, 1) if self.chance(0.1) else data

    def _damaged(self, data: bytes) -> bytes:
        if self.chance(0.67):
            return data
        changed = bytearray(data)
        for _ in range(self.pick.randint(1, 4)):
            changed[self.pick.randrange(len(changed))] = self.pick.randrange(256)
        return bytes(changed[: self.pick.randrange(len(changed))] if self.chance(0.2) else changed)

    # ----------------------------------------------------------------- layouts of images

    def layout(self) -> bytes:
        """An archive of an image: OCI, or as ``docker save`` writes it, with links and odd documents."""
        layers = [self.archive() for _ in range(self.pick.randint(1, 3))]
        files = self._oci(layers) if self.pick.choice(LAYOUTS) == "oci" else self._docker(layers)
        members = []
        for name, content in files.items():
            way = self.pick.random()
            if way < 0.08:  # a link in place of a file
                members.append(packed(name, b"", tarfile.SYMTYPE, self.target()))
            elif way < 0.12:
                members.append(packed(name, b"", tarfile.LNKTYPE, self.pick.choice([self.target(), *files])))
            elif way < 0.15:
                members.append(packed(name, b"", tarfile.FIFOTYPE))
            elif way < 0.2:
                members.append(packed(name, self._damaged(content or b"{}")))
            else:
                members.append(packed(name, content))
        if self.chance(0.3):
            members.insert(self.pick.randrange(len(members) + 1), self.pick.choice(self._members))
        return self._damaged(b"".join(members) + _ENDING) if self.chance(0.2) else b"".join(members) + _ENDING

    def _oci(self, layers: list[bytes]) -> dict[str, bytes]:
        files: dict[str, bytes] = {}

        def blob(content: bytes) -> dict[str, Any]:
            digest = hashlib.sha256(content).hexdigest()
            files[f"blobs/sha256/{digest}"] = content
            stated = f"sha256:{digest}" if self.chance(0.95) else f"sha256:{self.target()}"
            return {"digest": stated, "size": len(content), "mediaType": "application/vnd.oci.image.layer.v1.tar"}

        manifest = {"schemaVersion": 2, "config": blob(self._config()), "layers": [blob(item) for item in layers]}
        index: Any = {"schemaVersion": 2, "manifests": [blob(_document(manifest))]}
        if self.chance(0.1):
            index = {"manifests": [blob(_document(index))]}
        return {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": _document(self._odd(index)), **files}

    def _docker(self, layers: list[bytes]) -> dict[str, bytes]:
        names = [self.name() if self.chance(0.2) else f"{number}/layer.tar" for number in range(len(layers))]
        config = self.target() if self.chance(0.1) else "config.json"
        manifest = [{"Config": config, "RepoTags": ["x:y"], "Layers": names}]
        files = {"manifest.json": _document(self._odd(manifest)), "config.json": self._config()}
        return files | dict(zip(names, layers, strict=True))

    def _config(self) -> bytes:
        return _document({"architecture": "amd64", "os": "linux", "config": self._odd({"Env": ["A=b"], "Cmd": ["sh"]})})

    def _odd(self, document: Any) -> Any:
        """Now and then another value where there was one."""
        if not self.chance(0.15):
            return document
        other = self.pick.choice([None, [], {}, "", -1, 1 << 70, self.target(), [self.target()] * 3, {"x": [None]}])
        if isinstance(document, dict) and document:
            return document | {self.pick.choice([*document]): other}
        return [other] if isinstance(document, list) else other

    # ----------------------------------------------------------------- build contexts

    def fill_context(self, directory: Path, links: Path) -> None:
        """A context whose files, Dockerfile and .dockerignore a stranger has made. `links`: the bait."""
        prepare(directory, links)
        for name in ("Dockerfile", ".dockerignore", "f", "a/f", "d/victim.txt"):
            with contextlib.suppress(OSError):  # one lies there already, or below a link
                way = self.pick.random()
                if way < 0.3:
                    (directory / name).symlink_to(self.target())
                elif way < 0.4:
                    os.mkfifo(directory / name)
                else:
                    fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
                    with os.fdopen(fd, "w") as file:
                        file.write("\n".join(self.pick.choices((*PATTERNS[:-4], "!a", "!link/*", "# x"), k=3)))

    def sources(self) -> list[str]:
        """Of one COPY."""
        return [self.pick.choice(PATTERNS) if self.chance(0.4) else self.name() for _ in range(self.pick.randint(1, 2))]

    def copy_request(self) -> CopyRequest:
        """What one COPY or ADD would have the daemon do."""
        target = f"/race/{self.name().lstrip('/')}"
        return CopyRequest(
            sources=self.sources(),
            target=target + ("/" if self.chance(0.5) else ""),
            owner=self.pick.choice(OWNERS),
            mode=self.pick.choice(MODES),
            parents=self.chance(0.2),
            exclude=[self.pick.choice(PATTERNS)] if self.chance(0.2) else [],
            unpack=self.chance(0.3),
            make_directory=self.chance(0.1),
        )


def prepare(tree: Path, bait: Path) -> None:
    """What lies in each tree before the first case: links to the bait, and what they change places with."""
    for name, where in LINKS.items():
        (tree / name).symlink_to(where.format(bait=bait))
    for name in DIRECTORIES:
        (tree / name).mkdir(parents=True)


def _document(content: Any) -> bytes:
    return json.dumps(content).encode()


def packed(
    name: str, content: bytes, kind: bytes = tarfile.REGTYPE, target: str = "", *, pax: dict[str, str] | None = None
) -> bytes:
    """One member of an archive."""
    made = tarfile.TarInfo(name)
    made.type, made.size, made.linkname, made.pax_headers = kind, len(content), target, pax or {}
    header = made.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return header + content + bytes(-len(content) % tarfile.BLOCKSIZE)
