"""Tar streams whose headers are bounded, and files with holes in them.

Guarantee: whatever the stream says, its headers take a bounded part of memory and its members a bounded number; the
pieces of a file with holes lie in order within the file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from typing import IO, cast

from sandbox.errors import Invalid
from sandbox.tree.holes import data_ranges

MAX_HEADER = 1 << 20  # bytes of one extended header
MAX_HEADERS = 4 << 20  # bytes of all that stands before one member, maps of sparse files included
MAX_CHAIN = 16  # extended headers before one member
MAX_SHARED = 64 << 10  # bytes of headers that hold for all members after them
MAX_ENTRIES = 2_000_000
MAX_EMPTY = 16  # reads behind the end of the stream
MAX_PIECES = 50_000  # of a file with holes; smaller holes of a file with more are sent as zeros
_MIN_HOLE = 64 << 10  # bytes of the smallest hole that is worth a header
MAX_TIME = Decimal(1 << 40)  # seconds; what file systems can hold
_BLOCK = tarfile.BLOCKSIZE


class HeaderLimit:
    """A stream of which the headers before one member are bounded."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._empty = 0
        self.left: int | None = None  # bytes that may be read now; None: any number
        self.chain = 0
        self.shared = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._empty = 0 if data else self._empty + 1
        if self._empty > MAX_EMPTY:  # the library would read on, to the end of what a header has promised
            raise tarfile.ReadError("unexpected end of data")
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                raise tarfile.ReadError(f"headers of more than {MAX_HEADERS} bytes before one member")
        return data


class _Header(tarfile.TarInfo):
    """A header whose extensions are bounded: the library reads all of them into memory, each by a deeper call, and
    keeps what holds for all members."""

    _EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME)

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        meter: HeaderLimit = archive.fileobj.fileobj  # type: ignore[attr-defined]
        if self.size < 0 or (self.type in (*self._EXTENDED, tarfile.GNUTYPE_LONGLINK) and self.size > MAX_HEADER):
            raise tarfile.ReadError(f"a header of a size of {self.size} bytes")
        meter.shared += self.size if self.type == tarfile.XGLTYPE else 0
        if meter.shared > MAX_SHARED:
            raise tarfile.ReadError(f"more than {MAX_SHARED} bytes of headers for all members")
        if meter.chain > MAX_CHAIN:
            raise tarfile.ReadError(f"more than {MAX_CHAIN} headers before one member")
        if meter.chain == 0:
            meter.left = MAX_HEADERS
        meter.chain += 1
        try:
            return super()._proc_member(archive)  # type: ignore[misc,no-any-return]
        finally:
            meter.chain -= 1
            if meter.chain == 0:
                meter.left = None


class Reader:
    """The members of a stream, in their order. Raises tarfile.TarError, and what reading the stream raises."""

    def __init__(self, stream: IO[bytes]) -> None:
        with _damage():  # the first member is read already
            self._archive = tarfile.open(  # type: ignore[call-overload]  # noqa: SIM115 - it is a context manager itself
                fileobj=HeaderLimit(stream), mode="r|", tarinfo=_Header
            )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        members = iter(self._archive)
        for count in itertools.count():
            with _damage():
                member = next(members, None)
            if member is None:
                return
            self._archive.members = []  # a long stream is not kept in memory
            if count >= MAX_ENTRIES:
                raise Invalid(f"the archive has more than {MAX_ENTRIES} entries", hint="split it into several archives")
            if member.size < 0:  # an extended header may say so
                raise tarfile.ReadError(f"a file of {member.size} bytes")
            yield member

    def content(self, member: tarfile.TarInfo, size: int) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of a regular file's data, at most `size` bytes at a time. Holes are left out."""
        stream = self._archive.fileobj
        assert stream is not None
        stream.seek(member.offset_data)
        for offset, left in pieces(member):
            while left:
                part = stream.read(min(left, size))
                if not part:
                    raise tarfile.ReadError("unexpected end of data")
                yield offset, part
                offset, left = offset + len(part), left - len(part)


def time_of(member: tarfile.TarInfo) -> int:
    """When a member was changed, in nanoseconds, which the float of the library does not hold; within file systems'."""
    with contextlib.suppress(ArithmeticError, ValueError):
        return int(min(max(Decimal(member.pax_headers.get("mtime", member.mtime)), Decimal(0)), MAX_TIME) * 10**9)
    return 0


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """What the library says of headers that it cannot make sense of is a damaged archive, not only its own errors."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise tarfile.ReadError(str(error)) from error


def pieces(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    """(offset, bytes) of the data of a regular file. Raises tarfile.ReadError for a map that no file can have."""
    holes = cast("list[tuple[int, int]] | None", member.sparse)
    if holes is None:
        return [(0, member.size)]
    result = [(offset, size) for offset, size in holes if size]  # the last one may only say where the end is
    behind = 0
    for offset, size in result:
        if offset < behind or size < 0:
            raise tarfile.ReadError("the map of a file with holes is out of order")
        behind = offset + size
    if behind > member.size:
        raise tarfile.ReadError("a file with holes has data behind its end")
    return result


# --------------------------------------------------------------------------- files with holes


def data_of(file: int, size: int) -> list[tuple[int, int]] | None:
    """(offset, bytes) of what an open file holds, if leaving out its holes is worth it."""
    if os.fstat(file).st_blocks * 512 + _MIN_HOLE > size:
        return None
    smallest = _MIN_HOLE
    while len(result := _ranges(file, size, smallest)) > MAX_PIECES:
        smallest *= 16
    return result if sum(length for _, length in result) + smallest <= size else None


def _ranges(file: int, size: int, smallest: int) -> list[tuple[int, int]]:
    """Ranges of data between which lie holes of at least so many bytes; one more than MAX_PIECES at most."""
    result: list[tuple[int, int]] = []
    for start, end in data_ranges(file):
        start, end = min(start, size), min(end, size)
        if result and start - sum(result[-1]) < smallest:
            result[-1] = (result[-1][0], end - result[-1][0])
        elif start < end:
            result.append((start, end - start))
        if len(result) > MAX_PIECES:
            break
    return result


def sparse_header(header: tarfile.TarInfo, result: list[tuple[int, int]]) -> bytes:
    """Make `header` that of a file with holes, in the format that GNU tar calls 1.0; what comes before its data."""
    numbers = [len(result), *(number for piece in result for number in piece)]
    described = b"".join(b"%d\n" % number for number in numbers)
    described += bytes(-len(described) % _BLOCK)
    header.pax_headers = {
        **header.pax_headers,
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": header.name,
        "GNU.sparse.realsize": str(header.size),
    }
    directory, _, name = header.name.rpartition("/")
    header.name = f"{directory}/GNUSparseFile.0/{name}" if directory else f"GNUSparseFile.0/{name}"
    header.size = len(described) + sum(length for _, length in result)
    return described
