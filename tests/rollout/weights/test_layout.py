"""Every word of every tensor is in exactly one piece; who reads what is what Megatron's axes say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.weights.layout import EVERYBODY, TensorSpec, axis, cut, rank_rows, slot_box
from sandbox.errors import Invalid

NAMES = [
    "model.embed_tokens.weight",
    "a.q_proj.weight",
    "a.o_proj.weight",
    "a.down_proj.weight",
    "a.norm.weight",
    "a.q_proj.bias",
]
SHAPES = st.one_of(
    st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 40), st.integers(1, 24)), st.just(()), st.just((3, 4, 5))
)


TENSOR = st.tuples(st.sampled_from(NAMES), SHAPES, st.sampled_from(["BF16", "F32"]))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(TENSOR, min_size=1, max_size=5, unique_by=lambda item: item[0]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 300),
)
def test_every_word_is_in_one_piece(tensors: list, ranks: int, slots: int, limit: int) -> None:
    specs = [TensorSpec(name, dtype, shape) for name, shape, dtype in tensors]
    layout = cut(specs, ranks=ranks, slots=slots, segment_words=limit)
    for number, spec in enumerate(layout.tensors):
        observed = np.zeros((spec.rows, spec.columns), dtype=int)
        for segment in layout.segments:
            for piece in segment.pieces:
                if piece.tensor != number:
                    continue
                observed[piece.top : piece.bottom, piece.left : piece.right] += 1
                first, last = rank_rows(spec.rows, segment.rank, ranks)
                assert first <= piece.top < piece.bottom <= last
        assert (observed == 1).all()
        assert spec.rows * spec.columns == math.prod(spec.shape) * (2 if spec.dtype == "F32" else 1)
    for segment in layout.segments:
        assert segment.words <= limit or len(segment.pieces) == 1


@pytest.mark.parametrize(("slots", "parts"), [(1, 1), (2, 2), (4, 2), (4, 1), (8, 4)])
def test_parts_share_only_what_everybody_needs(slots: int, parts: int) -> None:
    specs = [TensorSpec(name, "BF16", (16, 8)) for name in NAMES[:4]] + [TensorSpec("a.norm.weight", "BF16", (8,))]
    layout = cut(specs, slots=slots, segment_words=10_000)
    needed = [set(layout.needed(part, parts)) for part in range(parts)]
    everybody = {number for number, segment in enumerate(layout.segments) if segment.slot == EVERYBODY}
    assert set.union(*needed) == set(range(len(layout.segments)))
    for one in range(parts):
        for other in range(one):
            assert needed[one] & needed[other] == everybody


def test_axes_are_megatrons() -> None:
    assert [axis(name, (4, 4)) for name in NAMES] == [0, 0, 1, 1, None, None]
    assert axis("a.norm.weight", (4,)) is None
    assert slot_box(TensorSpec("a.o_proj.weight", "F32", (3, 8)), 1, 4) == (0, 3, 4, 8)
    assert slot_box(TensorSpec("a.q_proj.weight", "BF16", (6, 8)), 1, 4) is None  # six rows are no four slots
    assert slot_box(TensorSpec("a.q_proj.weight", "BF16", (6, 8)), EVERYBODY, 4) == (0, 6, 0, 8)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(Invalid, match="dtype F8_E4M3"):
        cut([TensorSpec("a", "F8_E4M3", (3,))])
    with pytest.raises(Invalid, match="rank 0 of 3 cannot read weights that are cut into 2 slots"):
        cut([TensorSpec("a", "BF16", (3,))], slots=2).needed(0, 3)
