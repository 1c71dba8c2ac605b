"""Archives as ADD knows them: a tar, compressed or not, recognized by its content.

Owns: which program compressed a file, and whether a tar is in it. Does not own: unpacking
(:mod:`sandbox.tree.archive`). Guarantee: no program is run, and no more memory is used than a window has.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, cast

import zstandard

from sandbox.errors import Invalid

MAX_MEMORY = 256 << 20  # bytes that unpacking may take
_BLOCK = 512
BROKEN = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError)


@contextlib.contextmanager
def archive(file: int) -> Iterator[IO[bytes] | None]:
    """The tar stream in an open file from its beginning; None: there is none. Raises Invalid where it breaks."""
    with contextlib.ExitStack() as stack:
        if not _holds(file):
            yield None
            return
        try:
            yield stack.enter_context(_plain(file))
        except (*BROKEN, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise Invalid(f"the archive is damaged: {error}") from error


def _holds(file: int) -> bool:
    try:
        with _plain(file) as stream:
            block = b""
            while len(block) < _BLOCK and (part := stream.read(_BLOCK - len(block))):
                block += part
        if len(block) < _BLOCK or block == bytes(_BLOCK):
            return False
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, *BROKEN, OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _plain(file: int) -> Iterator[IO[bytes]]:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as raw:
        magic = raw.peek(6)[:6]
        if magic[:2] == b"\x1f\x8b":
            with gzip.open(raw) as stream:
                yield cast("IO[bytes]", stream)
        elif magic[:3] == b"BZh":
            with bz2.open(raw) as packed:
                yield cast("IO[bytes]", packed)
        elif magic == b"\xfd7zXZ\x00":
            with lzma.LZMAFile(raw) as squeezed:
                yield cast("IO[bytes]", squeezed)
        elif magic[:4] == b"\x28\xb5\x2f\xfd":
            with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
                raw, read_across_frames=True
            ) as frames:
                yield cast("IO[bytes]", frames)
        else:
            yield raw
