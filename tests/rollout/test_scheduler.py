"""Rows, batching and prefix reuse of the embedded engine, without tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.engines.headroom import HeadroomStep as Share
from rollout.engine.embedded.scheduler import (
    MINIMUM_REUSE,
    CacheCopy,
    Scheduler,
    Sequence,
    common_prefix,
    finish_reason,
)


class Rows:
    """What the cache would hold: for each row the tokens whose keys and values lie there."""

    def __init__(self, scheduler: Scheduler, count: int, length: int):
        self.rows: list[list[int | None]] = [[None] * length for _ in range(count)]

    def copy(self, copies: list[CacheCopy]) -> None:
        for copy in copies:
            self.rows[copy.target][: copy.length] = self.rows[copy.source][: copy.length]

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        self.rows[sequence.row][start:end] = sequence.tokens[start:end]

    def check(self, scheduler: Scheduler) -> None:
        for index, sequence in enumerate(scheduler.running):
            assert sequence.row == index
            assert self.rows[index][: sequence.computed] == sequence.tokens[: sequence.computed]
            if scheduler.colocates:
                assert sequence.colocated == (index >= scheduler.users)


def run_step(scheduler: Scheduler, rows: Rows, token: int, share: Share | None = None) -> list[Sequence]:
    """One step, every sampled token is `token`; the sequences that finished."""
    plan = scheduler.schedule(share)
    rows.copy(plan.copies)
    drawn = list(plan.decode)
    for sequence in plan.decode:
        rows.write(sequence, sequence.computed, sequence.computed + 1)
        sequence.computed += 1
    for piece in plan.prefill:
        rows.write(piece.sequence, piece.start, piece.end)
        piece.sequence.computed = piece.end
        if piece.complete:
            drawn.append(piece.sequence)
    done = []
    for sequence in drawn:
        sequence.tokens.append(token)
        if finish_reason(sequence, scheduler.length):
            rows.copy(scheduler.finish(sequence))
            done.append(sequence)
    rows.check(scheduler)
    return done


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([5, 6], None), ([5, 9], "stop"), ([5, 6, 6], "length"), ([5, 6, 9], "stop"), ([5] * 8, "length")],
)
def test_finish_reason(tokens: list[int], expected: str | None) -> None:
    sequence = Sequence("a", [5], max_tokens=2, stops=frozenset({9}))
    sequence.tokens = tokens
    assert finish_reason(sequence, 8) == expected


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_the_longest(left: list[int], right: list[int]) -> None:
    size = common_prefix(left, right)
    assert left[:size] == right[:size]
    assert size == min(len(left), len(right)) or left[size] != right[size]


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    scheduler = Scheduler(slots=1, retained=0, length=4)
    for tokens in ([], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="does not fit"):
            scheduler.add(Sequence("a", tokens, 1))


def test_next_turn_prefills_only_what_is_new() -> None:
    scheduler = Scheduler(slots=2, retained=2, length=64)
    rows = Rows(scheduler, 4, 64)
    first = Sequence("a", list(range(10, 30)), max_tokens=3)
    scheduler.add(first)
    while not run_step(scheduler, rows, 7):
        pass
    turn = Sequence("b", [*first.tokens, 40, 41], max_tokens=1)
    scheduler.add(turn)
    (piece,) = scheduler.schedule().prefill
    assert turn.reused == len(first.tokens) - 1  # the last sampled token was never run
    assert (piece.start, piece.end) == (turn.reused, len(turn.tokens))


def test_weights_that_change_leave_nothing_cached() -> None:
    scheduler = Scheduler(slots=2, retained=2, length=64)
    rows = Rows(scheduler, 4, 64)
    sequence = Sequence("a", list(range(20)), max_tokens=9)
    scheduler.add(sequence)
    run_step(scheduler, rows, 7)
    scheduler.invalidate()
    plan = scheduler.schedule()
    assert plan.decode == [] and [(p.start, p.end) for p in plan.prefill] == [(0, 21)]


@given(st.data())
def test_any_interleaving_keeps_rows_apart_and_finishes_everything(data: st.DataObject) -> None:
    slots, retained, colocates = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3)), data.draw(st.booleans())
    budget = data.draw(st.integers(1, 30))
    scheduler = Scheduler(
        slots=slots,
        retained=retained,
        length=40,
        prefill_budget=budget,
        colocates=colocates,
        cache=data.draw(st.none() | st.integers(1, 90)),
    )
    shares = st.builds(Share, st.integers(0, 30), st.integers(0, 3), st.integers(0, 30)) if colocates else st.none()
    rows = Rows(scheduler, slots + retained, 40)
    alive: dict[str, Sequence] = {}
    finished = 0
    for number in range(data.draw(st.integers(1, 8))):
        size = data.draw(st.integers(1, 30))
        stem = data.draw(st.sampled_from([[1, 2], [1, 3]])) * 15
        limit, priority = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 1))
        sequence = Sequence(str(number), stem[:size], max_tokens=limit, priority=priority)
        scheduler.add(sequence)
        alive[sequence.id] = sequence
        for _ in range(data.draw(st.integers(0, 4))):
            for done in run_step(scheduler, rows, data.draw(st.integers(1, 3)), data.draw(shares)):
                del alive[done.id]
                finished += 1
        if alive and data.draw(st.booleans()):
            victim = alive.pop(data.draw(st.sampled_from(sorted(alive))))
            rows.copy(scheduler.abort(victim))
            rows.check(scheduler)
        if data.draw(st.integers(0, 5)) == 0:
            scheduler.invalidate()
    for _ in range(2000):
        if scheduler.idle:
            break
        for done in run_step(scheduler, rows, 2, Share(30, 4, 30) if colocates else None):
            del alive[done.id]
    assert scheduler.idle and not alive


def test_short_prefixes_are_not_worth_a_copy() -> None:
    scheduler = Scheduler(slots=2, retained=2, length=64)
    rows = Rows(scheduler, 4, 64)
    scheduler.add(Sequence("a", [1] * (MINIMUM_REUSE - 1), max_tokens=1))
    run_step(scheduler, rows, 5)
    scheduler.add(Sequence("b", [1] * 20, max_tokens=1))
    assert scheduler.schedule().copies == []


def test_rollouts_get_half_of_the_slots_and_what_users_leave_of_a_step() -> None:
    scheduler = Scheduler(slots=4, retained=0, length=64, colocates=True)
    rows = Rows(scheduler, 4, 64)
    for n in range(3):
        scheduler.add(Sequence(f"rollout {n}", [n + 1] * 9, max_tokens=9, priority=1))
    run_step(scheduler, rows, 7, Share(0, 0, 12))
    scheduler.add(Sequence("user", [9] * 5, max_tokens=9))
    plan = scheduler.schedule(Share(5, 1, 2))
    rows.copy(plan.copies)
    assert [item.id for item in scheduler.running] == ["user", "rollout 1", "rollout 0"]
    assert [(piece.sequence.id, piece.start, piece.end) for piece in plan.prefill] == [
        ("user", 0, 5), ("rollout 1", 3, 5),
    ]  # fmt: skip
    assert [item.id for item in plan.decode] == ["rollout 0"]
