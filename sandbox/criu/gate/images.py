"""CRIU's images as the gate reads them: each parsed once, and the bounds that the rules of processes and files share.

Guarantee: pure (no I/O, no clock): `read` is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from sandbox.criu import image_files
from sandbox.errors import CheckpointFailed

IDS = 65_536  # uids and gids of a sandbox
PIDS = 1 << 22
MAX_NAME = 255
MAX_FILES = 1 << 20
PAGE = 4096
OPEN_FLAGS = 0o37776003  # what stays in the flags of an open file: neither O_CREAT, O_EXCL, O_NOCTTY nor O_TRUNC
REG, PIPE, FIFO, NS, FANOTIFY, TTY = 1, 2, 3, 14, 12, 11
VIEW_MOUNT = "pagurus-view-"  # likewise of what it sees of the kernel, before its name (container/kernel_views.py)
EXTERNAL_MOUNT = "pagurus-mount-"  # the key of a directory of the host in the images, before its number


class ImageRefused(Exception):
    """An image says what no sandbox of ours may. `hint` says what the user may do."""

    def __init__(self, reason: str, hint: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True)
class ImagePath:
    """A path of the images: where it lies and what it must be."""

    path: bytes  # in the sandbox: absolute, without "." or ".."
    mount: str  # mount point: "/", or the target of a directory of the host
    id: int  # of the file in files.img
    mode: int = 0  # of the file; 0: not known
    link: bool = False  # the file itself is a symbolic link
    ghost: int = 0  # CRIU's number of a deleted file; 0: it has none
    root: str = ""  # of a service, from which links on the way lead


@dataclass
class GateLookups:
    """What the gate must look up in the tree before these images are restored."""

    present: list[ImagePath] = field(default_factory=list)  # opened by its path
    ghosts: list[ImagePath] = field(default_factory=list)  # made there for a moment, by its path or a name next to it
    sockets: list[ImagePath] = field(default_factory=list)  # bound from inside: links are followed, within the tree
    watched: list[ImagePath] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)  # targets of directories of the host, by their number
    #: Mount points of services -> which directory of the sandbox's tree that is.
    second: dict[str, str] = field(default_factory=dict)

    def in_tree(self, path: bytes, mount: str) -> tuple[bytes, str]:
        """Where the host finds a path that lies on this mount: the path, and the mount there."""
        if mount not in self.second:
            return path, mount
        return raw(self.second[mount]).rstrip(b"/") + path[len(raw(mount).rstrip(b"/")) :] or b"/", "/"

    @property
    def paths(self) -> int:
        return len(self.present) + len(self.ghosts) + len(self.sockets) + len(self.watched)


class CriuImages:
    """Images by file name, each parsed once. `read(name)` gives the bytes of one, `sizes` the names and sizes.

    Images of the same `identity` have the same content; without one nothing is known of that.
    """

    def __init__(
        self, sizes: Mapping[str, int], read: Callable[[str], bytes], identity: frozenset[object] | None = None
    ):
        self.sizes = sizes
        self.identity = identity
        self._read = read
        self._parsed: dict[str, list[Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.sizes

    def of(self, stem: str) -> Iterator[tuple[int, str]]:
        """Number and name of each image ``STEM-NUMBER.img``."""
        for name in self.sizes:
            head, _, tail = name.rpartition("-")
            if head == stem:
                yield int(tail.removesuffix(".img")), name

    def content(self, name: str) -> bytes:
        return self._read(name)

    def table(self, name: str, *kinds: str) -> list[Any]:
        """All records of an image that consists of nothing else; [] when it is not there."""
        if name not in self.sizes:
            return []
        result = self._parsed.get(name)
        if result is None:
            types = [getattr(image_files.messages(), kind) for kind in kinds]
            try:
                result = image_files.parse(self._read(name), *types).entries
            except (DecodeError, struct.error, CheckpointFailed, IndexError) as error:
                raise ImageRefused(f"{name} cannot be read: {error}") from None
            self._parsed[name] = result
        return result

    def one(self, name: str, kind: str) -> Any:
        """The only record of an image."""
        result = self.table(name, kind)
        need(len(result) == 1, f"{name} has {len(result)} records instead of one")
        return result[0]

    def records(self, name: str, kind: str, extra: Callable[[Any], int]) -> Iterator[Any]:
        """Records that are followed by `extra` bytes each."""
        if name not in self.sizes:
            return
        content, at, message = self._read(name), 8, getattr(image_files.messages(), kind)
        try:
            while at < len(content):
                (size,) = struct.unpack_from("<I", content, at)
                need(at + 4 + size <= len(content), f"{name} is cut short")
                record = message.FromString(content[at + 4 : at + 4 + size])
                at += 4 + size + extra(record)
                need(at <= len(content), f"{name} is cut short")
                yield record
        except (DecodeError, struct.error) as error:
            raise ImageRefused(f"{name} cannot be read: {error}") from None


def need(truth: object, reason: str, hint: str = "") -> None:
    if not truth:
        raise ImageRefused(reason, hint)


def printable(path: bytes) -> str:
    """A path in a message."""
    return repr(path.decode("utf-8", "replace"))[1:-1][:200]


def raw(text: str | bytes) -> bytes:
    """A name as the kernel has it: protobuf gives one that is not UTF-8 as bytes."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def below(path: str | bytes, directory: str | bytes) -> bool:
    """Whether a path is `directory` or lies below it."""
    path, directory = raw(path), raw(directory)
    return directory == b"/" or path == directory or path.startswith(directory + b"/")
