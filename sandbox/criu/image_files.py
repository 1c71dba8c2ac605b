"""CRIU's image files as protobuf records: fast enough for the path of a restore.

Guarantee: `write` of what `read` returned gives the same bytes; a private copy is replaced, never written through.
"""

from __future__ import annotations

import functools
import importlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from sandbox.criu import Record, rpc
from sandbox.errors import CheckpointFailed

_SIZE = struct.Struct("<I")
_COMMON_MAGICS = {0x54564319, 0x55105940}  # of images and of service files: a second magic number follows


@functools.cache
def messages() -> ModuleType:
    """pycriu's message classes, by their protobuf names."""
    rpc.images()
    return importlib.import_module("pycriu.images.pb")


@dataclass
class CriuImageFile:
    """An image in memory: `entries` may be changed."""

    magic: bytes
    entries: list[Record] = field(default_factory=list)

    def content(self) -> bytes:
        parts = [self.magic]
        for entry in self.entries:
            payload = entry.SerializeToString()
            parts += (_SIZE.pack(len(payload)), payload)
        return b"".join(parts)

    def write(self, path: Path) -> None:
        """Replace the file `path`, so that a hard-linked original stays as it is."""
        path.unlink(missing_ok=True)
        path.write_bytes(self.content())


def new(kind: str, *entries: Record) -> CriuImageFile:
    """An image of a kind, by the name of its magic number, without the service files' second one."""
    rpc.images()
    from pycriu.images import magic

    by_name = magic.by_name
    return CriuImageFile(_SIZE.pack(by_name["IMG_COMMON"]) + _SIZE.pack(by_name[kind]), list(entries))


def parse(content: bytes, *kinds: type[Record]) -> CriuImageFile:
    """The records of an image; the first is of ``kinds[0]``, the next of ``kinds[1]`` and so on, the last repeats."""
    size = 8 if _SIZE.unpack_from(content)[0] in _COMMON_MAGICS else 4
    image = CriuImageFile(content[:size])
    at = size
    while at < len(content):
        (length,) = _SIZE.unpack_from(content, at)
        at += _SIZE.size
        if at + length > len(content):
            raise CheckpointFailed("an image is cut short", hint="the checkpoint is damaged")
        kind = kinds[min(len(image.entries), len(kinds) - 1)]
        image.entries.append(kind.FromString(content[at : at + length]))
        at += length
    return image


def read(path: Path, *kinds: type[Record]) -> CriuImageFile | None:
    """The image at `path`, or None where there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return parse(content, *kinds)


def text(value: str | bytes) -> str:
    """A name of an image as the file functions take it: protobuf gives one that is not UTF-8 as bytes."""
    return os.fsdecode(value) if isinstance(value, bytes) else value


def files(content: bytes) -> CriuImageFile:
    """The table of open files (files.img)."""
    return parse(content, messages().file_entry)
