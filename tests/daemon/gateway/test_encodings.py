"""Compressed bodies: what they unpack to, and what they may not."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard

from daemon.gateway.encodings import decode
from sandbox.errors import Invalid

BODY = b'{"messages": []}' * 1000
_GZIP = gzip.compress(BODY, mtime=0)  # the same bytes, and so the same name of a test, in every process


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("", BODY),
        ("identity", BODY),
        ("gzip", _GZIP),
        ("x-gzip", _GZIP),
        ("GZip", gzip.compress(BODY[:99], mtime=0) + gzip.compress(BODY[99:], mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("zstd", zstandard.compress(BODY)),
        ("zstd", zstandard.ZstdCompressor(level=19, write_content_size=False).compress(BODY)),
        ("zstd", zstandard.compress(BODY[:99]) + zstandard.compress(BODY[99:])),
    ],
)
def test_bodies_come_as_they_were(encoding: str, data: bytes) -> None:
    assert decode(encoding, data, limit=len(BODY)) == BODY
    if encoding not in ("", "identity"):
        with pytest.raises(Invalid, match="more than"):
            decode(encoding, data, limit=len(BODY) - 1)


@pytest.mark.parametrize(
    ("encoding", "data", "why"),
    [
        ("br", b"x", "not read"),
        ("gzip, zstd", b"x", "not read"),
        ("gzip", b"{}", "no gzip"),
        ("gzip", b"", "ends early"),
        ("gzip", _GZIP[:-1], "ends early"),
        ("gzip", _GZIP + b"{}", "no gzip"),
        ("zstd", b"", "ends early"),
        ("zstd", b"{}{}{}", "no zstd"),
        ("zstd", zstandard.compress(BODY)[:-1], "ends early"),
        ("zstd", zstandard.compress(BODY) + b"{}{}{}", "no zstd"),
        # A window of 2 GiB, which a decoder would have to make memory for
        ("zstd", b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00", "no zstd"),
    ],
)
def test_what_is_no_body_is_refused(encoding: str, data: bytes, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        decode(encoding, data, limit=1 << 20)


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress)],
)
def test_a_bomb_takes_no_memory(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    bomb = pack(bytes(256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(Invalid, match="more than"):
            decode(encoding, bomb, limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
