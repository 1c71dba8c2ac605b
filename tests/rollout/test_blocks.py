"""Blocks of a paged cache: what each row reads there is what was written for it, whatever others do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.embedded.blocks import SIZE, BlockTables
from rollout.engine.embedded.scheduler import Scheduler, Sequence
from sandbox.errors import EngineFailed

ROWS, LONGEST = 4, 4 * SIZE


class Memory:
    """What lies in blocks, and what each row should find there."""

    def __init__(self, blocks: int):
        self.tables, self.content = BlockTables(ROWS, blocks), [[-1] * SIZE for _ in range(blocks)]
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.written = 0

    def write(self, row: int, start: int, count: int) -> None:
        copied = self.tables.extend(row, start, start + count, self.evict)
        if copied is not None:
            self.content[copied[1]] = list(self.content[copied[0]])
        for at in range(start, start + count):
            self.written += 1
            self.content[self.tables.tables[row][at // SIZE]][at % SIZE] = self.written
            self.rows[row][at:] = [self.written]

    def evict(self) -> int | None:
        held = [row for row in (2, 3) if self.tables.tables[row]]
        for row in held[:1]:
            self.rows[row] = []
        return held[0] if held else None

    def check(self) -> None:
        for row, expected in enumerate(self.rows):
            table = self.tables.tables[row]
            assert [self.content[table[at // SIZE]][at % SIZE] for at in range(len(expected))] == expected
        distinct = {block for table in self.tables.tables for block in table}
        assert self.tables.held(ROWS) == SIZE * len(distinct)


@given(st.data())
def test_rows_read_what_was_written_for_them_whoever_shares_their_blocks(data: st.DataObject) -> None:
    """Rows 0 and 1 run, and always have room; rows 2 and 3 are retained, and give way."""
    memory = Memory(2 * (LONGEST // SIZE) + 2)
    for _ in range(data.draw(st.integers(1, 40))):
        row, other = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3))
        act = data.draw(st.sampled_from(["write", "write", "share", "retain", "again", "release"]))
        there = len(memory.rows[row])
        if act == "write" and there < LONGEST:
            memory.write(row, there, data.draw(st.integers(1, LONGEST - there)))
        elif act == "again":
            memory.rows[row] = []
            memory.write(row, 0, data.draw(st.integers(1, LONGEST)))
        elif act == "share" and other != row and memory.rows[other]:
            length = data.draw(st.integers(1, len(memory.rows[other])))
            memory.tables.share(other, row, length)
            memory.rows[row] = memory.rows[other][:length]
        elif act == "retain" and other >= 2 and there:
            memory.tables.share(row, other, there)
            memory.rows[other] = list(memory.rows[row])
        elif act == "release":
            memory.tables.release([other])
            memory.rows[other] = []
        memory.check()
    memory.tables.release(range(ROWS))
    assert memory.tables.held(ROWS) == 0


def test_a_cache_that_is_full_of_what_runs_says_so() -> None:
    tables = BlockTables(1, 2)
    with pytest.raises(EngineFailed, match="larger --cache"):
        tables.extend(0, 0, 3 * SIZE, lambda: None)


def test_the_prefix_that_was_used_least_recently_gives_way_first() -> None:
    scheduler = Scheduler(slots=1, retained=3, length=64)
    for name in "ab":
        sequence = Sequence(name, [ord(name)] * 20, max_tokens=1)
        scheduler.add(sequence)
        scheduler.schedule()
        sequence.computed = 20
        (retained,) = scheduler.finish(sequence)
        if name == "a":
            first = retained.target
    assert scheduler.evict() == first
    assert scheduler.evict() == retained.target and scheduler.evict() is None


def test_what_rows_have_in_common_leaves_room_for_others() -> None:
    common = {1: 32, 2: 32}  # two rows of 24 tokens have all their blocks in common
    scheduler = Scheduler(slots=4, retained=0, length=64, cache=70, held=lambda rows: common.get(rows, 0))
    for n in range(3):
        scheduler.add(Sequence(str(n), [n] * 24, max_tokens=9))
    assert len(scheduler.schedule().prefill) == 2  # as long as nothing is known to be in common
    for item in scheduler.running:
        item.computed = 23
    assert [item.id for item in scheduler.schedule().decode] == ["0", "1"] and len(scheduler.running) == 3
