"""Pages that lie in several files, read as if they were one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sandbox.content.layers import PAGE, SpreadPages

_RUNS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=8)


def _bytes(layer: int) -> bytes:
    return b"".join(bytes([16 * layer + page]) * PAGE for page in range(9))


@given(_RUNS, st.data())
def test_any_part_is_that_of_the_whole(runs: list[tuple[int, int, int]], data: st.DataObject) -> None:
    sources = [_bytes(layer) for layer in range(3)]
    whole = b"".join(sources[layer][place * PAGE : (place + count) * PAGE] for count, layer, place in runs)
    rows = np.array([[0, count, layer, place] for count, layer, place in runs], np.int64)
    pages = SpreadPages([memoryview(source) for source in sources], rows)
    first = data.draw(st.integers(0, pages.size // PAGE))
    count = data.draw(st.integers(0, pages.size // PAGE - first))
    assert pages.size == len(whole)
    assert b"".join(pages.parts(first * PAGE, count * PAGE)) == whole[first * PAGE : (first + count) * PAGE]


def test_a_file_is_written_from_its_parts(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(_bytes(1))
    one = SpreadPages.of_file(tmp_path / "one")
    two = SpreadPages([memoryview(_bytes(0)), *one.sources], np.array([[0, 2, 0, 3], [7, 1, 1, 8]], np.int64))
    two.write(tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == _bytes(0)[3 * PAGE : 5 * PAGE] + _bytes(1)[8 * PAGE :]
    one.close()
    one.close()
