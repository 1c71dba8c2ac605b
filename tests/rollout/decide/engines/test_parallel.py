"""Preemptions say over how many GPUs an engine is spread, and how many sequences share the embedded engine's cache."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.simulate import parallel
from rollout.decide.engines.parallel import Planner, degree
from rollout.engine.embedded.core import Core, SamplingSequence
from sandbox.paths import CHECKOUT

MODEL = CHECKOUT / "examples" / "frozen_lake" / "start"


@pytest.mark.parametrize(
    ("now", "preemptions", "expected"),
    [
        (1, [0], 1),
        (1, [0, 1], 2),  # more than none
        (2, [100, 105], 2),  # not more than 1.05 times as many
        (2, [100, 106], 4),
        (8, [1, 9], 8),  # there are no more
        (4, [9, 5, 5, 5, 5, 5], 4),  # fewer, but not none
        (4, [0, 0, 0, 0], 4),  # the first is of the step before it was 4
        (4, [7, 0, 0, 0, 0], 2),
        (4, [7, 3, 0, 0, 0, 0], 2),
        (1, [0, 0, 0, 0, 0], 1),
    ],
)
def test_the_degree_of_the_next_step(now: int, preemptions: list[int], expected: int) -> None:
    assert degree(now, preemptions, limit=8) == expected


@given(st.lists(st.integers(0, 50), max_size=60))
def test_it_is_a_power_of_two_and_changes_by_one_factor(preemptions: list[int]) -> None:
    planner = Planner(8)
    for item in preemptions:
        before = planner.degree
        planner.ended(item)
        assert planner.degree in (1, 2, 4, 8) and planner.degree / before in (0.5, 1, 2)


def test_the_embedded_engine_puts_back_what_its_cache_has_no_room_for_and_then_takes_fewer_at_once() -> None:
    def answers(cache: int | None) -> tuple[Core, dict[str, list[int]]]:
        core, draw, done = Core(MODEL, version="0", slots=8, length=96, retained=0, cache=cache), random.Random(0), []
        for version in range(3):
            for n in range(8):
                tokens = [draw.randrange(3, 300) for _ in range(10)]
                core.add(SamplingSequence(f"{version}/{n}", tokens, 40, temperature=0, stops=frozenset()))
            for _ in range(2000):
                if core.scheduler.idle:
                    break
                done += core.step()
                assert cache is None or sum(len(item.tokens) for item in core.scheduler.running) <= cache
            core.label(str(version + 1))
        return core, {item.id: item.output for item in done}

    free, plain = answers(None)
    tight, same = answers(220)
    assert free.statistics.preemptions == 0 and free.scheduler.sequences == 8
    assert tight.statistics.preemptions > 0 and tight.scheduler.sequences == 4
    assert same == plain and len(plain) == 24


def test_simulated_the_planner_is_near_the_best_fixed_degree_where_lengths_change() -> None:
    result = parallel.metrics(0, steps=24)
    assert result["over_best_fixed"] > 0.9 and result["over_worst_fixed"] > 1.2
    assert result["control"] == pytest.approx(1.0, abs=0.02)
