"""Which prepared states stay: those of an evaluation, while prompts that come once stream past."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.reuse import PreparedStateUse, remembered, to_forget


class Ledger:
    """What PreparedStates does with the rule, on a clock of its own."""

    def __init__(self, limit: int):
        self.limit, self.clock = limit, itertools.count(1)
        self.states: dict[str, PreparedStateUse] = {}
        self.gone: dict[str, int] = {}
        self.made: list[str] = []

    def use(self, name: str) -> None:
        now, existing = next(self.clock), self.states.get(name)
        if existing is not None:
            self.states[name] = PreparedStateUse(name, existing.made, now, existing.again)
            return
        self.made.append(name)
        self.states[name] = PreparedStateUse(name, now, now, self.gone.pop(name, None) is not None)
        for item in to_forget(list(self.states.values()), self.limit):
            del self.states[item]
            self.gone[item] = now
        retained = remembered([(when, item) for item, when in self.gone.items()], self.limit)
        self.gone = {item: when for item, when in self.gone.items() if item in retained}


def test_an_evaluation_stays_while_prompts_stream_past() -> None:
    ledger, prompts = Ledger(64), itertools.count()
    for _ in range(10):
        for seed in range(20):
            ledger.use(f"evaluation {seed}")
        for _ in range(24):
            name = f"prompt {next(prompts)}"
            for _ in range(8):  # its group
                ledger.use(name)
    assert sum(name.startswith("evaluation") for name in ledger.made) <= 40  # by last use alone it would be 200 in time
    assert sum(name.startswith("prompt") for name in ledger.made) == 240
    assert all(f"evaluation {seed}" in ledger.states for seed in range(20))


def test_a_stream_leaves_three_quarters_to_what_comes_back() -> None:
    ledger = Ledger(8)
    for name in [*"abcdefghij", *"abcd"]:
        ledger.use(name)
    back = {name for name, state in ledger.states.items() if state.again}
    for number in range(100):
        ledger.use(f"once {number}")
    assert back and back <= set(ledger.states) and len(ledger.states) == 8


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 12))
def test_there_are_never_too_many_and_the_newest_stays(uses: list[int], limit: int) -> None:
    ledger = Ledger(limit)
    for number in uses:
        ledger.use(str(number))
        assert len(ledger.states) <= limit and len(ledger.gone) <= max(1, limit // 2)
        assert limit == 1 or str(number) in ledger.states
