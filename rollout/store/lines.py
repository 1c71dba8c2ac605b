"""Compressed files of JSON lines: what logs are kept in.

Guarantee: what is complete in a file of a killed process can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from sandbox.errors import Invalid


class Lines:
    """``lines = Lines(path); lines.append(struct); lines.close()``"""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._writer = zstandard.ZstdCompressor(3).stream_writer(self._file, closefd=True)

    def append(self, value: msgspec.Struct) -> None:
        self._writer.write(msgspec.json.encode(value) + b"\n")
        self._writer.flush(zstandard.FLUSH_BLOCK)
        self._file.flush()

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


def read(path: Path) -> Iterator[bytes]:
    """The complete lines of one file."""
    rest = b""
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        while chunk := _chunk(reader, path):
            *complete, rest = (rest + chunk).split(b"\n")
            yield from complete


def _chunk(reader: zstandard.ZstdDecompressionReader, path: Path) -> bytes:
    try:
        return reader.read(1 << 16)
    except zstandard.ZstdError as error:
        raise Invalid(
            f"{path} is damaged: {error}", hint="restore it from a copy, or begin another run with --fresh"
        ) from error
