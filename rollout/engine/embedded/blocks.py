"""Which blocks of a paged cache hold a row's keys and values: what rows have in common is held once.

Guarantee: a block that several rows use is never written to; a row that would, gets a copy of it first. Pure: no I/O,
no torch.

::

    row 3   [17] [4] [9]          `share(3, 5, 37)`: blocks of 16 positions; row 5 uses the same three
    row 5   [17] [4] [9]
    row 5   [17] [4] [9 -> 21]    `extend(5, 37, 38)`: position 37 lies in a block of two rows: block 9 is copied to 21
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sandbox.errors import EngineFailed

SIZE = 16  # positions of a block


class BlockTables:
    def __init__(self, rows: int, blocks: int):
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self._users = [0] * blocks
        self._free = list(reversed(range(blocks)))  # the last one goes first: memory that was never used stays so

    def held(self, rows: int) -> int:
        """Positions of all blocks that the first `rows` rows use; what several of them use counts once."""
        return SIZE * len(set().union(*self.tables[:rows]))

    def share(self, source: int, target: int, length: int) -> None:
        """Row `target` has the first `length` positions of row `source`."""
        blocks = self.tables[source][: -(-length // SIZE)]
        for block in blocks:
            self._users[block] += 1
        self.release([target])
        self.tables[target] = blocks

    def release(self, rows: Iterable[int]) -> None:
        """These rows hold nothing."""
        for row in rows:
            blocks, self.tables[row] = self.tables[row], []
            for block in blocks:
                self._drop(block)

    def own(self, row: int) -> list[int]:
        """The blocks of a row that no other row uses."""
        return [block for block in self.tables[row] if self._users[block] == 1]

    def extend(self, row: int, start: int, end: int, evict: Callable[[], int | None]) -> tuple[int, int] | None:
        """Room for positions start..end, which are written next; what is before `start` stays. Block and copy, where
        one has to be copied. `evict`: a row that may be released, to make room."""
        if start == 0:
            self.release([row])
        table, copied, first = self.tables[row], None, start // SIZE
        if first < len(table) and self._users[table[first]] > 1:
            copied = (table[first], self._take(evict))
            self._drop(table[first])
            table[first] = copied[1]
        while len(table) * SIZE < end:
            table.append(self._take(evict))
        return copied

    def _take(self, evict: Callable[[], int | None]) -> int:
        while not self._free:
            row = evict()
            if row is None:
                raise EngineFailed("no block of the cache is free", hint="give the engine a larger --cache")
            self.release([row])
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            self._free.append(block)
