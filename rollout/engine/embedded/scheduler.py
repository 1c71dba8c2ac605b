"""Which sequence occupies which row of the key/value cache, and what the next step computes.

Guarantee: a row belongs to at most one sequence; running rows are exactly 0..n, users' before rollouts' where the
engine serves these (`Colocation`), so that decoding needs no gather; positions ``[0, computed)`` of a sequence's row
hold keys and values of its tokens under the current weights. Pure: no I/O, no torch. The caller executes the copies
that are returned, in order, before anything else: by copying (rows), or by using the same blocks twice (paged).

::

    rows 0 .. u          users          finish(i): retain row i, then move row u-1 into the hole, and row n-1 to u-1
    rows u .. n          rollouts       finish(i): as well, with row n-1
    rows n .. slots      free
    rows slots .. end    retained prefixes of finished sequences, least recently used goes first

A trajectory's next turn starts with all tokens of its last one, which it finds among the retained rows. The members of
a group share their first prompt: one computes it, the others wait for that and begin with what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

MINIMUM_REUSE = 8  # tokens; below this a copy costs more than the prefill that it saves


@dataclass(eq=False)
class Sequence:
    """One request. `tokens` is the prompt followed by what has been sampled so far."""

    id: str
    tokens: list[int]
    max_tokens: int
    stops: frozenset[int] = frozenset()
    priority: int = 0  # lower goes first
    since: float = 0.0  # when it was requested; later, when its last token came
    prompt: int = field(init=False)  # length of the prompt
    row: int = -1  # -1: waiting
    computed: int = 0
    reused: int = 0

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def colocated(self) -> bool:
        """A rollout's, where the engine serves users."""
        return self.priority > 0

    @property
    def ready(self) -> bool:
        """All but the newest token are cached: the next step decodes it."""
        return self.computed == len(self.tokens) - 1 and self.computed > 0


@dataclass(frozen=True)
class CacheCopy:
    source: int
    target: int
    length: int


@dataclass(frozen=True)
class PrefillChunk:
    """Run positions start..end of this sequence."""

    sequence: Sequence
    start: int
    end: int

    @property
    def complete(self) -> bool:
        """After this piece the sequence's next token can be sampled."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True)
class EngineStep:
    copies: list[CacheCopy]
    prefill: list[PrefillChunk]
    decode: list[Sequence]


@dataclass
class RetainedSequence:
    tokens: list[int] = field(default_factory=list)  # those whose keys and values the row holds
    used: int = -1  # larger: used later


class StepBudget(Protocol):
    """How much a step does, where the engine is co-located (rollout.decide.engines.headroom)."""

    @property
    def users_prompt(self) -> int: ...

    @property
    def rollouts(self) -> int: ...

    @property
    def rollout_prompt(self) -> int: ...


def finish_reason(sequence: Sequence, length: int) -> str | None:
    """Why the sequence ends after its newest token; None: it continues. `length` is the cache's."""
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


def _pieces(sequences: Tokens[Sequence], budget: int) -> list[PrefillChunk]:
    """What is read of their prompts. A sequence with the beginning of an earlier one waits for that one, and has it
    then."""
    result = list[PrefillChunk]()
    for sequence in sequences:
        at = sequence.computed
        if (
            sequence.ready
            or budget <= 0
            or any(piece.start >= at and _gain(piece.sequence, sequence) for piece in result)
        ):
            continue
        result.append(PrefillChunk(sequence, at, min(len(sequence.tokens), at + budget)))
        budget -= result[-1].end - at
    return result


def _gain(source: Sequence, target: Sequence, limit: int | None = None) -> int:
    """How many tokens of `target` lie beyond what it has computed and are also (the first `limit`) of `source`; 0 where
    they are too few."""
    at = target.computed
    beyond = slice(at, at + MINIMUM_REUSE)
    if source.tokens[beyond] != target.tokens[beyond]:  # so for most pairs: it costs little to know
        return 0
    shared = min(common_prefix(source.tokens[:limit], target.tokens), len(target.tokens) - 1) - at
    return shared if shared >= MINIMUM_REUSE else 0


def _first(pair: tuple[int, Sequence]) -> int:
    return pair[0]


class Scheduler:
    def __init__(
        self,
        *,
        slots: int,
        retained: int,
        length: int,
        prefill_budget: int = 1024,
        colocates: bool = False,
        cache: int | None = None,
        held: Callable[[int], int] | None = None,
    ):
        """`colocates`: requests of a priority above 0 are rollouts', which get at most half of the slots. `cache`:
        tokens
        of all running sequences together; the newest are put back and run again when there are more. `held`: what so
        many rows take of it, where these have some of it in common."""
        if min(slots, length, prefill_budget) < 1 or retained < 0:
            raise ValueError("slots, length and prefill_budget must be positive")
        self.slots, self.length, self.prefill_budget = slots, length, prefill_budget
        self.colocates, self.cache, self._in_rows = colocates, cache, held
        self.sequences = slots  # that run at once
        self.preemptions = self.reused = 0  # sequences put back; tokens that were not computed again
        self.running: list[Sequence] = []
        self.users = 0  # of those that run, the first so many
        self.waiting: deque[Sequence] = deque()
        self._retained = {slots + index: RetainedSequence() for index in range(retained)}
        self._clock = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def colocated_slots(self) -> int:
        return max(1, self.slots // 2)

    def add(self, sequence: Sequence) -> None:
        if not 0 < sequence.prompt < self.length:
            raise ValueError(f"a prompt of {sequence.prompt} tokens does not fit: 1 to {self.length - 1} do")
        at = len(self.waiting)
        while at and self.waiting[at - 1].priority > sequence.priority:
            at -= 1
        self.waiting.insert(at, sequence)

    def schedule(self, share: StepBudget | None = None) -> EngineStep:
        """Admit what fits, then plan one step: one token for every ready row, prefill up to the budget.

        `share`: how much of that, where the engine is co-located.
        """
        copies = self._fit()
        copies += [copy for sequence in self._admissible() for copy in self._admit(sequence)]
        copies += self._shared()
        users, colocated = self.running[: self.users], self.running[self.users :]
        if share is None:
            return EngineStep(
                copies, _pieces(self.running, self.prefill_budget), [item for item in self.running if item.ready]
            )
        prefill = _pieces(users, share.users_prompt) + _pieces(colocated, share.rollout_prompt)
        decode = [item for item in users if item.ready] + [item for item in colocated if item.ready][: share.rollouts]
        return EngineStep(copies, prefill, decode)

    def finish(self, sequence: Sequence, *, retain: bool = True) -> list[CacheCopy]:
        """Take a running sequence out; its row is retained for a prefix to come, the last rows fill the hole."""
        copies = []
        if retain and sequence.computed >= MINIMUM_REUSE and self._retained:
            target = self._victim(sequence.tokens)
            copies.append(CacheCopy(sequence.row, target, sequence.computed))
            self._retained[target] = RetainedSequence(sequence.tokens[: sequence.computed], self._tick())
        hole = sequence.row
        if hole < self.users:
            self.users -= 1
            copies += self._move(self.users, hole)
            hole = self.users
        copies += self._move(len(self.running) - 1, hole)
        self.running.pop()
        sequence.row = -1
        return copies

    def abort(self, sequence: Sequence) -> list[CacheCopy]:
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
            self._retained[row] = RetainedSequence()

    def evict(self) -> int | None:
        """The row of the retained prefix that was used least recently, which is forgotten; None: there are none."""
        held = [row for row, entry in self._retained.items() if entry.tokens]
        row = min(held, key=lambda row: self._retained[row].used, default=None)
        if row is not None:
            self._retained[row] = RetainedSequence()
        return row

    def capacity(self, waiting: Tokens[Sequence]) -> int:
        """How many of these could begin now, in this order."""
        running, held = len(self.running), self._held()
        for count, sequence in enumerate(waiting):
            if not self._fits(sequence, running + count, held):
                return count
            held += len(sequence.tokens) + 1
        return len(waiting)

    def _fits(self, sequence: Sequence, running: int, held: int) -> bool:
        """Next to so many sequences and their tokens. Alone, each does."""
        full = self.cache is not None and running > 0 and held + len(sequence.tokens) >= self.cache
        return running < self.sequences and not full

    def _held(self) -> int:
        """Tokens, with the one that each running sequence gets in this step. After all copies were executed."""
        complete = sum(len(sequence.tokens) for sequence in self.running) + len(self.running)
        if self._in_rows is None:
            return complete
        return complete - sum(sequence.computed for sequence in self.running) + self._in_rows(len(self.running))

    def _fit(self) -> list[CacheCopy]:
        """Puts back the newest until the others fit."""
        copies = list[CacheCopy]()
        while self.cache is not None and len(self.running) > 1 and self._held() > self.cache:
            newest = self.running[-1]
            copies += self.finish(newest, retain=False)
            newest.computed = newest.reused = 0
            self.waiting.insert(sum(other.priority < newest.priority for other in self.waiting), newest)
            self.preemptions += 1
        return copies

    def _admissible(self) -> Iterator[Sequence]:
        """Users come first, for `add` puts them there."""
        held = self._held()
        while self.waiting and self._fits(self.waiting[0], len(self.running), held):
            colocated = self.colocates and self.waiting[0].colocated
            if colocated and len(self.running) - self.users >= self.colocated_slots:
                return
            held += len(self.waiting[0].tokens) + 1
            yield self.waiting.popleft()

    def _admit(self, sequence: Sequence) -> list[CacheCopy]:
        """Into a row of its own, with what is known of its beginning."""
        copies = []
        self.running.append(sequence)
        row = len(self.running) - 1
        if not (self.colocates and sequence.colocated):
            copies += self._move(self.users, row)
            row, self.users = self.users, self.users + 1
        self.running[row], sequence.row = sequence, row
        best, source = 0, -1
        for retained, entry in self._retained.items():
            shared = min(common_prefix(entry.tokens, sequence.tokens), len(sequence.tokens) - 1)
            if shared > best:
                best, source = shared, retained
        if best < MINIMUM_REUSE:
            return copies
        self._retained[source].used = self._tick()
        return [*copies, self._reuse(source, sequence, best)]

    def _shared(self) -> list[CacheCopy]:
        """What one running sequence has computed, no other one that begins like it computes again."""
        copies = []
        for late in self.running:
            if late.ready:
                continue
            ahead = [item for item in self.running if item.computed >= late.computed + MINIMUM_REUSE]
            gain, early = max(
                ((_gain(item, late, item.computed), item) for item in ahead), key=_first, default=(0, late)
            )
            if gain:
                copies.append(self._reuse(early.row, late, late.computed + gain))
        return copies

    def _reuse(self, row: int, sequence: Sequence, length: int) -> CacheCopy:
        self.reused += length - sequence.computed
        sequence.computed = sequence.reused = length
        return CacheCopy(row, sequence.row, length)

    def _move(self, source: int, target: int) -> list[CacheCopy]:
        if source == target:
            return []
        moved = self.running[target] = self.running[source]
        moved.row = target
        return [CacheCopy(source, target, moved.computed)] if moved.computed else []

    def _victim(self, tokens: list[int]) -> int:
        """The retained row to overwrite: one that these tokens continue, else the least recently used."""
        for row, entry in self._retained.items():
            if entry.tokens and len(entry.tokens) <= len(tokens) and tokens[: len(entry.tokens)] == entry.tokens:
                return row
        return min(self._retained, key=lambda row: self._retained[row].used)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
