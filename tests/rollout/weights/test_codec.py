"""A segment as bytes: what is decoded is what was encoded, and nothing else is accepted."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.weights.codec import EncodedSegment, changed, decode, encode_changes, encode_complete, pays
from sandbox.errors import Invalid


def words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, count, dtype=np.uint16)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 400_000), st.floats(0, 1), st.integers(0, 2**32))
def test_changes_bring_the_old_words_to_the_new_ones(count: int, share: float, seed: int) -> None:
    old = words(seed, count)
    new = old.copy()
    chosen = np.random.default_rng(seed + 1).random(count) < share**4  # mostly few
    new[chosen] ^= np.random.default_rng(seed + 2).integers(0, 1 << 16, int(chosen.sum()), dtype=np.uint16)
    positions = changed(new, old)
    assert positions.tolist() == np.flatnonzero(new != old).tolist()
    got = decode(encode_changes(positions, new[positions], count), count)
    for _ in range(2):  # written twice is written once
        old[got.positions] = got.values
        assert (old == new).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 3_000_000), unique=True, max_size=50))
def test_gaps_of_any_length(spots: list[int]) -> None:
    positions = np.array(sorted(spots), dtype=np.int64)
    values = words(1, len(spots))
    got = decode(encode_changes(positions, values, 3_000_001), 3_000_001)
    assert got.positions is not None and got.positions.tolist() == positions.tolist()
    assert (got.values == values).all()


@pytest.mark.parametrize("gap", [0, 1, 65533, 65534, 65535, 65536, 131069, 131070, 131071])
def test_a_gap_at_each_edge(gap: int) -> None:
    positions = np.array([gap, gap + 1, 2 * gap + 2], dtype=np.int64)
    got = decode(encode_changes(positions, words(0, 3), 2 * gap + 3), 2 * gap + 3)
    assert got.positions is not None and got.positions.tolist() == positions.tolist()


@pytest.mark.parametrize("kind", ["noise", "weights"])
def test_a_whole_segment(kind: str) -> None:
    new = words(3, 100_001)
    if kind == "weights":  # as bfloat16: the high halves of small normal numbers
        new = (np.random.default_rng(3).normal(0, 0.02, 100_001).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
    raw = encode_complete(new)
    got = decode(raw, len(new))
    assert got.positions is None and (got.values == new).all()
    assert (len(raw) < 0.8 * new.nbytes) == (kind == "weights")


def test_few_changes_pay_and_many_do_not() -> None:
    assert pays(1, 100) and pays(66, 100) and not pays(67, 100)


def bad(**fields: object) -> bytes:
    good = msgspec.msgpack.decode(encode_changes(np.array([1, 5]), words(0, 2), 10), type=EncodedSegment)
    return msgspec.msgpack.encode(msgspec.structs.replace(good, **fields))


SQUEEZE = zstandard.ZstdCompressor().compress


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 100,
        bad(words=11),
        bad(count=11),
        bad(count=3),
        bad(gaps=SQUEEZE(np.array([1, 9], dtype=np.uint16).tobytes())),  # past the end
        bad(gaps=SQUEEZE(b"abc")),
        bad(gaps=b"no zstd"),
        bad(gaps=SQUEEZE(bytes(1 << 24))),  # expands to far more than so many positions need
        bad(high=SQUEEZE(bytes(1 << 24))),
        bad(low=SQUEEZE(b"a")),
        bad(packed=False),
        bad(kind="complete"),
    ],
)
def test_what_is_no_chunk_is_refused(raw: bytes) -> None:
    with pytest.raises(Invalid, match="cannot be read"):
        decode(raw, 10)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 10_000), st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_stays_inside(seed: int, spot: int, value: int) -> None:
    """The hash finds it before; here the decoder alone must neither crash nor name a place outside."""
    raw = bytearray(encode_changes(np.arange(0, 1000, 7), words(seed, 143), 1000))
    raw[spot % len(raw)] = value
    try:
        got = decode(bytes(raw), 1000)
    except Invalid:
        return
    assert got.positions is None or (len(got.positions) == len(got.values) and got.positions.max(initial=0) < 1000)
