"""Archives, compressed or not, recognized by their content.

Guarantee: no program is run, and what is damaged is said to be.
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

MAX_WINDOW = 1 << 27  # bytes that an archive of zstd may refer back to
_BLOCK = 512
_BROKEN = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError)


@contextlib.contextmanager
def decompressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """What is in a file, from its beginning, whatever its name or media type. Raises Invalid where it breaks."""
    try:
        with _plain(file) as stream:
            yield stream
    except (*_BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's; what bz2 cannot read has no number
            raise
        raise Invalid(f"the archive is damaged: {error}", hint="fetch it again") from error


@contextlib.contextmanager
def archive(file: int) -> Iterator[IO[bytes] | None]:
    """The tar stream in an open file; None: there is none. Raises Invalid where it breaks."""
    with os.fdopen(os.dup(file), "rb") as raw:
        if not _holds(raw):
            yield None
            return
        with decompressed(raw) as stream:
            yield stream


def _holds(file: IO[bytes]) -> bool:
    try:
        with _plain(file) as stream:
            block = b""
            while len(block) < _BLOCK and (part := stream.read(_BLOCK - len(block))):
                block += part
        if len(block) < _BLOCK or block == bytes(_BLOCK):
            return False
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, *_BROKEN, OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _plain(file: IO[bytes]) -> Iterator[IO[bytes]]:
    file.seek(0)
    magic = file.read(6)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        with gzip.open(file) as stream:
            yield cast("IO[bytes]", stream)
    elif magic[:3] == b"BZh":
        with bz2.open(file) as packed:
            yield cast("IO[bytes]", packed)
    elif magic == b"\xfd7zXZ\x00":
        with lzma.open(file) as squeezed:
            yield cast("IO[bytes]", squeezed)
    elif magic[:4] == b"\x28\xb5\x2f\xfd":
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        with reader.stream_reader(file, read_across_frames=True, closefd=False) as frames:
            yield cast("IO[bytes]", frames)
    else:
        yield file
