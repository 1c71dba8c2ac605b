"""Compressed request bodies of agents, decoded within a limit.

Pure. Guarantee: no step unpacks more than STEP bytes beyond what was there before, whatever the data promises, and a
body that ends early or has something behind its end is refused.
"""

from __future__ import annotations

import zlib

import zstandard

from sandbox.errors import Invalid

ENCODINGS = ("identity", "gzip", "deflate", "zstd")
STEP = 1 << 20  # bytes that one step of gzip may unpack
ZSTD_STEP = 256  # bytes of zstd that one step reads: each 4 may unpack to 128 KiB
MIN_WINDOW = 8 << 20  # bytes that every decoder of zstd must be able to look back
GZIP, ZLIB = 31, 15  # what zlib calls them


def decode(encoding: str, data: bytes, *, limit: int) -> bytes:
    """`data` without its encoding. Raises Invalid where it cannot be read or is larger than `limit`.

    >>> decode("gzip", zlib.compress(b"{}", wbits=GZIP), limit=2)
    b'{}'
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return data
    try:
        if encoding in ("gzip", "x-gzip"):
            return _zlib(data, GZIP, limit)
        if encoding == "deflate":
            return _zlib(data, ZLIB, limit)
        if encoding == "zstd":
            return _zstd(data, limit)
    except (zlib.error, zstandard.ZstdError) as error:
        raise Invalid(
            f"the body is no {encoding}: {error}", hint="send it without Content-Encoding, or as gzip, deflate or zstd"
        ) from None
    raise Invalid(f"bodies encoded as {encoding[:50]!r} are not read", hint=f"known are {', '.join(ENCODINGS)}")


def _zlib(data: bytes, kind: int, limit: int) -> bytes:
    """One stream or, as gzip allows, several behind each other."""
    parts = _Parts(limit)
    while True:
        stream = zlib.decompressobj(wbits=kind)
        parts.add(stream.decompress(data, STEP))
        while stream.unconsumed_tail:
            parts.add(stream.decompress(stream.unconsumed_tail, STEP))
        if not stream.eof:
            parts.add(stream.flush())
        if not stream.eof:
            raise Invalid("the compressed body ends early", hint="send it without Content-Encoding, or complete")
        data = stream.unused_data
        if not data:
            return parts.joined()


def _zstd(data: bytes, limit: int) -> bytes:
    """One frame or several. A frame that looks back further than it may be large is refused at once."""
    parts = _Parts(limit)
    decompressor = zstandard.ZstdDecompressor(max_window_size=max(limit, MIN_WINDOW))
    while True:
        stream, at = decompressor.decompressobj(), 0
        while not stream.eof and at < len(data):
            parts.add(stream.decompress(data[at : at + ZSTD_STEP]))
            at += ZSTD_STEP
        if not stream.eof:
            raise Invalid("the compressed body ends early", hint="send it without Content-Encoding, or complete")
        data = stream.unused_data + data[at:]
        if not data:
            return parts.joined()


class _Parts:
    """What is unpacked so far."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            raise Invalid(f"the body unpacks to more than {self._limit} bytes", hint="shorten the conversation")
        self._parts.append(part)

    def joined(self) -> bytes:
        return b"".join(self._parts)
