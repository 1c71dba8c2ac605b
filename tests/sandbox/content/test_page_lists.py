"""Lists of pages as changes to former ones."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.content.page_hashes import HASH
from sandbox.content.page_lists import PageListDelta, changed, digest
from sandbox.content.transfer import FrameKind, PageList, Reader, TransferWriter
from sandbox.errors import Conflict, Protocol
from tests.daemon.store.test_transfer import HEAD

FEW = st.lists(st.integers(0, 3), max_size=40)


def hashes(numbers: list[int]) -> np.ndarray:
    return np.repeat(np.array(numbers, np.uint8), HASH).reshape(-1, HASH)


def frames(before: np.ndarray, now: np.ndarray) -> list[PageList]:
    """As they arrive at the other side."""
    writer, reader = TransferWriter(), Reader()
    places = changed(before, now)
    at = places.astype("<u4").tobytes()
    reported = writer.changed_pages_of("pages-1.img", len(now), digest(before), at, now[places].tobytes())
    result = reader.feed(b"".join([writer.start(HEAD), *reported, writer.end()]))
    return [value for kind, value in result if kind is FrameKind.LIST]


@given(FEW, FEW)
def test_what_changed_makes_the_new_list_of_the_old_one(before: list[int], now: list[int]) -> None:
    one, other = hashes(before), hashes(now)
    reported = PageListDelta.reported(frames(one, other))
    reported.need(one)
    assert (reported.over(one, reported.hashes) == other).all()
    assert len(reported.places) == len(now) - sum(a == b for a, b in zip(before, now, strict=False))
    assert len(set(reported.places.tolist())) == len(reported.places)


def test_changes_of_another_list_are_refused() -> None:
    reported = PageListDelta.reported(frames(hashes([1, 2, 3]), hashes([1, 2, 1])))
    with pytest.raises(Conflict):
        reported.need(hashes([1, 1, 3]))


def test_a_long_list_of_changes_comes_in_many_frames() -> None:
    before, now = np.zeros((70_000, HASH), np.uint8), np.ones((70_000, HASH), np.uint8)
    came = frames(before, now)
    assert len(came) == 3
    assert (PageListDelta.reported(came).over(before, now) == now).all()


@pytest.mark.parametrize(
    ("places", "count"),
    [([], 5), ([4], 5), ([3, 3], 5), ([7], 3), ([3, 9], 5), ([0], 1 << 28)],
)
def test_places_that_lead_nowhere_or_leave_gaps_are_refused(places: list[int], count: int) -> None:
    """Also a length that nothing stands for, before any memory is spent on it."""
    at = np.array(places, "<u4").tobytes()
    reported = PageListDelta.reported([PageList("pages-1.img", bytes(HASH * len(places)), at, count)])
    with pytest.raises(Protocol):
        reported.over(hashes([1, 2, 3]), reported.hashes)


def test_frames_of_one_list_agree_and_have_as_many_places_as_hashes() -> None:
    with pytest.raises(Protocol, match="two lengths"):
        PageListDelta.reported([PageList("pages-1.img", b"", b"", 1), PageList("pages-1.img", b"", b"", 2)])
    for wrong in (PageList("pages-1.img", bytes(HASH), b"", 1), PageList("pages-1.img", bytes(HASH), bytes(4), -1)):
        writer, reader = TransferWriter(), Reader()
        data = writer.start(HEAD) + writer.frame(FrameKind.LIST, msgspec.msgpack.encode(wrong))
        with pytest.raises(Protocol):
            list(reader.feed(data))
