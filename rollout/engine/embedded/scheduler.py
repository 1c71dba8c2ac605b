"""Which sequence occupies which row of the key/value cache, and what the next step computes.

Owns: admission, batching, reuse of cached prefixes, the rows. Does not own: tensors, sampling, clocks, requests.
Guarantee: a row belongs to at most one sequence; running rows are exactly 0..n, so that decoding needs no gather;
positions ``[0, computed)`` of a sequence's row hold keys and values of its tokens under the current weights.
Pure: no I/O, no torch. The caller executes the copies that are returned, in order, before anything else.

::

    rows 0 .. n          running        finish(i): retain row i, then move row n-1 into the hole
    rows n .. slots      free
    rows slots .. end    retained prefixes of finished sequences, least recently used goes first

A trajectory's next turn starts with all tokens of its last one, and the members of a group share their first
prompt: both find their prefix among the retained rows and prefill only what is new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

MINIMUM_REUSE = 8  # tokens; below this a copy costs more than the prefill that it saves


@dataclass(eq=False)
class Sequence:
    """One request. `tokens` is the prompt followed by what has been sampled so far."""

    id: str
    tokens: list[int]
    max_tokens: int
    stops: frozenset[int] = frozenset()
    priority: int = 0  # lower goes first
    prompt: int = field(init=False)  # length of the prompt
    row: int = -1  # -1: waiting
    computed: int = 0
    reused: int = 0

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def ready(self) -> bool:
        """All but the newest token are cached: the next step decodes it."""
        return self.computed == len(self.tokens) - 1 and self.computed > 0


@dataclass(frozen=True)
class Copy:
    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Piece:
    """Run positions start..end of this sequence."""

    sequence: Sequence
    start: int
    end: int

    @property
    def complete(self) -> bool:
        """After this piece the sequence's next token can be sampled."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True)
class Step:
    copies: list[Copy]
    prefill: list[Piece]
    decode: list[Sequence]


@dataclass
class _Retained:
    tokens: list[int] = field(default_factory=list)  # those whose keys and values the row holds
    used: int = -1  # larger: used later


def finish_reason(sequence: Sequence, length: int) -> str | None:
    """Why the sequence ends after its newest token; None: it goes on. `length` is the cache's."""
    if sequence.tokens[-1] in sequence.stops:
        return "stop"
    generated = len(sequence.tokens) - sequence.prompt
    return "length" if generated >= sequence.max_tokens or len(sequence.tokens) >= length else None


def common_prefix(left: Tokens[int], right: Tokens[int]) -> int:
    """Length of the longest common prefix, by bisection over slices (they compare at C speed)."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Scheduler:
    def __init__(self, *, slots: int, retained: int, length: int, prefill_budget: int = 1024):
        if min(slots, length, prefill_budget) < 1 or retained < 0:
            raise ValueError("slots, length and prefill_budget must be positive")
        self.slots, self.length, self.prefill_budget = slots, length, prefill_budget
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._retained = {slots + index: _Retained() for index in range(retained)}
        self._clock = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        if not 0 < sequence.prompt < self.length:
            raise ValueError(f"a prompt of {sequence.prompt} tokens does not fit: 1 to {self.length - 1} do")
        at = len(self.waiting)
        while at and self.waiting[at - 1].priority > sequence.priority:
            at -= 1
        self.waiting.insert(at, sequence)

    def schedule(self) -> Step:
        """Admit what fits, then plan one step: one token for every ready row, prefill up to the budget."""
        copies = [copy for copy in map(self._admit, self._admissible()) if copy is not None]
        prefill: list[Piece] = []
        budget = self.prefill_budget
        for sequence in self.running:
            if not sequence.ready and budget > 0:
                end = min(len(sequence.tokens), sequence.computed + budget)
                prefill.append(Piece(sequence, sequence.computed, end))
                budget -= end - sequence.computed
        return Step(copies, prefill, [sequence for sequence in self.running if sequence.ready])

    def finish(self, sequence: Sequence, *, retain: bool = True) -> list[Copy]:
        """Take a running sequence out; its row is retained for a prefix to come, the last row fills the hole."""
        copies = []
        if retain and sequence.computed >= MINIMUM_REUSE and self._retained:
            target = self._victim(sequence.tokens)
            copies.append(Copy(sequence.row, target, sequence.computed))
            self._retained[target] = _Retained(sequence.tokens[: sequence.computed], self._tick())
        last = self.running.pop()
        if last is not sequence:
            if last.computed:
                copies.append(Copy(last.row, sequence.row, last.computed))
            self.running[sequence.row] = last
            last.row = sequence.row
        sequence.row = -1
        return copies

    def abort(self, sequence: Sequence) -> list[Copy]:
        """Forget a sequence, running or waiting."""
        if sequence.row >= 0:
            return self.finish(sequence, retain=False)
        self.waiting.remove(sequence)
        return []

    def invalidate(self) -> None:
        """The weights changed: nothing cached is valid. Running sequences keep their rows and are run again."""
        for sequence in self.running:
            sequence.computed = 0
        for row in self._retained:
            self._retained[row] = _Retained()

    def _admissible(self) -> list[Sequence]:
        count = min(self.slots - len(self.running), len(self.waiting))
        return [self.waiting.popleft() for _ in range(count)]

    def _admit(self, sequence: Sequence) -> Copy | None:
        sequence.row = len(self.running)
        self.running.append(sequence)
        best, source = 0, -1
        for row, entry in self._retained.items():
            shared = min(common_prefix(entry.tokens, sequence.tokens), len(sequence.tokens) - 1)
            if shared > best:
                best, source = shared, row
        if best < MINIMUM_REUSE:
            return None
        self._retained[source].used = self._tick()
        sequence.computed = sequence.reused = best
        return Copy(source, sequence.row, best)

    def _victim(self, tokens: list[int]) -> int:
        """The retained row to overwrite: one that these tokens continue, else the least recently used."""
        for row, entry in self._retained.items():
            if entry.tokens and len(entry.tokens) <= len(tokens) and tokens[: len(entry.tokens)] == entry.tokens:
                return row
        return min(self._retained, key=lambda row: self._retained[row].used)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
