"""A segment of weights as bytes: whole, or as the words that changed.

Guarantee: `decode` gives exactly the words that were encoded, or raises; a change names a position and the new value,
never a difference, so that writing it twice is writing it once. Bytes of a stranger cost bounded memory.

Positions are written as gaps (16-bit words; 65535 stands for "so many more, and continue"), values as two planes, high
bytes and low bytes, each compressed by zstd: the high bytes (sign, exponent) of weights hardly differ.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from sandbox.errors import Invalid

Words = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]
LEVEL = 1
GO_ON = 65535  # a gap of so much, without a change at its end
WORTH = 0.92  # compress whole segments only where it saves more than a twelfth


class EncodedSegment(msgspec.Struct, array_like=True, tag_field=None):
    """publisher -> readers: one segment of one version."""

    kind: Literal["complete", "changes"]
    words: int  # of the segment
    count: int  # words that are given
    gaps: bytes  # zstd; of a whole segment empty
    high: bytes  # zstd
    low: bytes  # zstd, or as it is where that was no longer
    packed: bool = True  # `high` and `low` are compressed planes, not one plain array in `low`


class SegmentDelta(msgspec.Struct, frozen=True):
    """Words to write: ``segment[positions] = values``. `positions` None: all of them, in order."""

    positions: Positions | None
    values: Words


def changed(new: Words, old: Words) -> Positions:
    """Positions at which two segments differ, ascending. Eight bytes are compared at once."""
    complete = len(new) // 4 * 4
    hot = np.flatnonzero(new[:complete].view(np.uint64) != old[:complete].view(np.uint64))
    near = (hot[:, None] * 4 + np.arange(4)).ravel()
    near = near[new[near] != old[near]]
    tail = complete + np.flatnonzero(new[complete:] != old[complete:])
    return np.concatenate((near, tail)).astype(np.int64, copy=False)


def pays(count: int, words: int) -> bool:
    """Whether so many changes can be shorter than the whole segment: each costs two bytes or more."""
    return count * 3 <= words * 2


def encode_changes(positions: Positions, values: Words, words: int) -> bytes:
    """``segment[positions] = values`` of a segment of `words` words; positions ascend."""
    high, low = _planes(values)
    return msgspec.msgpack.encode(
        EncodedSegment(
            "changes", words, len(values), _squeeze(_gaps(positions).tobytes()), _squeeze(high), _squeeze(low)
        )
    )


def encode_complete(new: Words) -> bytes:
    """All of a segment."""
    high, low = _planes(new)
    squeezed = _squeeze(high)
    if len(squeezed) + len(low) < WORTH * new.nbytes:
        return msgspec.msgpack.encode(EncodedSegment("complete", len(new), len(new), b"", squeezed, _squeeze(low)))
    return msgspec.msgpack.encode(EncodedSegment("complete", len(new), len(new), b"", b"", new.tobytes(), packed=False))


def decode(raw: bytes | bytearray, words: int) -> SegmentDelta:
    """What a chunk writes into a segment of `words` words. Raises Invalid for anything else."""
    try:
        chunk = msgspec.msgpack.decode(raw, type=EncodedSegment)
        if chunk.words != words or not 0 <= chunk.count <= words:
            raise ValueError(f"it is of {chunk.words} words, not {words}")
        values = _values(chunk)
        if chunk.kind == "complete":
            if chunk.count != words:
                raise ValueError("it is not whole")
            return SegmentDelta(None, values)
        return SegmentDelta(_positions(chunk), values)
    except (ValueError, msgspec.MsgspecError, zstandard.ZstdError) as error:
        raise Invalid(f"a chunk of weights cannot be read: {error}", hint="fetch it again") from None


def _gaps(positions: Positions) -> Words:
    steps = np.diff(positions, prepend=-1) - 1
    more, rest = np.divmod(steps, GO_ON)
    gaps = np.full(len(positions) + int(more.sum()), GO_ON, dtype=np.uint16)
    gaps[np.cumsum(more + 1) - 1] = rest
    return gaps


def _positions(chunk: EncodedSegment) -> Positions:
    limit = chunk.count + chunk.words // GO_ON + 1
    raw = _expand(chunk.gaps, 2 * limit)
    gaps = np.frombuffer(raw, dtype=np.uint16)
    ends = gaps != GO_ON
    positions: Positions = np.cumsum(gaps.astype(np.int64) + ends)[ends] - 1
    if len(positions) != chunk.count or (chunk.count and positions[-1] >= chunk.words):
        raise ValueError("its positions do not fit")
    return positions


def _planes(words: Words) -> tuple[bytes, bytes]:
    pairs = words.view(np.uint8).reshape(-1, 2)
    return pairs[:, 1].tobytes(), pairs[:, 0].tobytes()


def _values(chunk: EncodedSegment) -> Words:
    if not chunk.packed:
        if len(chunk.low) != 2 * chunk.count:
            raise ValueError("its values do not fit")
        return np.frombuffer(chunk.low, dtype=np.uint16)
    pairs = np.empty((chunk.count, 2), dtype=np.uint8)
    for plane, packed in ((1, chunk.high), (0, chunk.low)):
        raw = _expand(packed, chunk.count)
        if len(raw) != chunk.count:
            raise ValueError("its values do not fit")
        pairs[:, plane] = np.frombuffer(raw, dtype=np.uint8)
    return pairs.reshape(-1).view(np.uint16)


def _squeeze(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(raw)


def _expand(packed: bytes, limit: int) -> bytes:
    """At most so many bytes: what a frame says of itself is not believed."""
    if zstandard.frame_content_size(packed) > limit:
        raise ValueError("it expands to more than it may")
    return zstandard.ZstdDecompressor().decompress(packed, max_output_size=limit)
