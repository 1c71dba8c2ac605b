"""Which prepared states stay: those of an evaluation, while prompts that come once stream past."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.reuse import PreparedStateUse, remembered, to_forget


class Book:
    """What PreparedStates does with the rule, on a clock of its own."""

    def __init__(self, most: int):
        self.most, self.clock = most, itertools.count(1)
        self.states: dict[str, PreparedStateUse] = {}
        self.gone: dict[str, int] = {}
        self.made: list[str] = []

    def use(self, name: str) -> None:
        now, known = next(self.clock), self.states.get(name)
        if known is not None:
            self.states[name] = PreparedStateUse(name, known.made, now, known.again)
            return
        self.made.append(name)
        self.states[name] = PreparedStateUse(name, now, now, self.gone.pop(name, None) is not None)
        for each in to_forget(list(self.states.values()), self.most):
            del self.states[each]
            self.gone[each] = now
        kept = remembered([(when, each) for each, when in self.gone.items()], self.most)
        self.gone = {each: when for each, when in self.gone.items() if each in kept}


def test_an_evaluation_stays_while_prompts_stream_past() -> None:
    book, prompts = Book(64), itertools.count()
    for _ in range(10):
        for seed in range(20):
            book.use(f"evaluation {seed}")
        for _ in range(24):
            name = f"prompt {next(prompts)}"
            for _ in range(8):  # its group
                book.use(name)
    assert sum(name.startswith("evaluation") for name in book.made) <= 40  # by last use alone it would be 200 in time
    assert sum(name.startswith("prompt") for name in book.made) == 240
    assert all(f"evaluation {seed}" in book.states for seed in range(20))


def test_a_stream_leaves_three_quarters_to_what_comes_back() -> None:
    book = Book(8)
    for name in [*"abcdefghij", *"abcd"]:
        book.use(name)
    back = {name for name, state in book.states.items() if state.again}
    for number in range(100):
        book.use(f"once {number}")
    assert back and back <= set(book.states) and len(book.states) == 8


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 12))
def test_there_are_never_too_many_and_the_newest_stays(uses: list[int], most: int) -> None:
    book = Book(most)
    for number in uses:
        book.use(str(number))
        assert len(book.states) <= most and len(book.gone) <= max(1, most // 2)
        assert most == 1 or str(number) in book.states
