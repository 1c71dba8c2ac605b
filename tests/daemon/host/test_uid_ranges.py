"""User id ranges: never two at once, the one that was let go last comes last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.host.uid_ranges import FIRST, SIZE, IdRanges
from sandbox.errors import Conflict


def test_all_are_given_and_then_none() -> None:
    ranges = IdRanges(FIRST, FIRST + 3 * SIZE)
    ranges.claim(FIRST + SIZE)
    assert [ranges.take(), ranges.take()] == [FIRST, FIRST + 2 * SIZE]
    with pytest.raises(Conflict, match="in use"):
        ranges.take()
    ranges.release(FIRST)
    ranges.release(FIRST)
    assert ranges.take() == FIRST


def test_a_range_rests_before_it_is_given_again() -> None:
    ranges = IdRanges(FIRST, FIRST + 3 * SIZE)
    ranges.release(ranges.take())
    assert [ranges.take(), ranges.take(), ranges.take()] == [FIRST + SIZE, FIRST + 2 * SIZE, FIRST]


@given(st.lists(st.integers(0, 9), max_size=60))
def test_no_two_have_the_same(acts: list[int]) -> None:
    """An act above the number of those taken takes one more; below, lets that one go."""
    ranges, taken = IdRanges(FIRST, FIRST + 10 * SIZE), []
    for act in acts:
        if act < len(taken):
            ranges.release(taken.pop(act))
        else:
            taken.append(ranges.take())
        assert len(set(taken)) == len(taken)
        assert all((base - FIRST) % SIZE == 0 and FIRST <= base < FIRST + 10 * SIZE for base in taken)
