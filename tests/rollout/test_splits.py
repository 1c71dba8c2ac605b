"""Splits: what is held out is never trained on, whatever the seed, the data and the mixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.environments import splits
from rollout.environments.mixture import Draw, Mixture, MixturePart
from rollout.environments.splits import HELD_OUT, Items
from rollout.environments.verifiers import VerifiersEnvironment
from rollout.service.role import SEEDS
from sandbox.errors import Conflict, Invalid, NotFound

TWELVE = Path(__file__).parents[2] / "examples" / "harbor_tasks"
TASK = (
    "from rollout import Environment, Observation\n"
    "class Own(Environment):\n"
    "    image = ''\n"
    "    async def reset(self, sandbox, seed): return Observation(text='')\n"
    "    async def step(self, sandbox, action): return Observation(text='', done=True)\n"
)
KEYS = st.lists(st.integers(0, 40).map(str), min_size=2, max_size=60)
PARTS = st.lists(KEYS, min_size=1, max_size=4)


def trained_and_held(split: splits.Split, keys: list[str], seed: int) -> tuple[set[str], set[str]]:
    first = (seed * SEEDS) % HELD_OUT
    trained = {keys[split.of((first + n) % HELD_OUT)[0]] for n in range(3 * len(keys))}
    return trained, {keys[split.of(HELD_OUT + n)[0]] for n in range(3 * len(keys))}


@given(PARTS, st.integers(-(10**6), 10**9), st.floats(0.01, 0.9))
def test_no_item_is_trained_on_and_held_out(parts: list[list[str]], seed: int, share: float) -> None:
    named = [Items(part=str(n), kind="rows", keys=keys) for n, keys in enumerate(parts)]
    try:
        made = splits.make(named, share)
    except Invalid:
        return
    trained: set[str] = set()
    held: set[str] = set()
    for split, keys in zip(made, parts, strict=True):
        if split.held:
            mine, others = trained_and_held(split, keys, seed)
            assert mine | others | {keys[n] for n in split.left_out} == set(keys)
            trained, held = trained | mine, held | others
    assert held and not trained & held


@given(KEYS, st.lists(st.integers(20, 60).map(str), min_size=1, max_size=20), st.integers(0, 5000))
def test_rows_of_their_own_file_are_held_out_with_all_that_equal_them(
    keys: list[str], evaluated: list[str], seed: int
) -> None:
    named = Items(part="a", kind="rows", keys=[*keys, *evaluated], evaluated=len(evaluated))
    if set(keys) <= set(evaluated):
        with pytest.raises(Invalid, match="nothing left to train on"):
            splits.make([named])
        return
    (split,) = splits.make([named])
    trained, held = trained_and_held(split, [*keys, *evaluated], seed)
    assert held == set(evaluated) and trained == set(keys) - set(evaluated)


@given(st.integers(-(10**6), 10**12))
def test_seeds_of_training_never_reach_those_of_evaluations(seed: int) -> None:
    (split,) = splits.make([Items(part="a", kind="seeds")])
    trained = [split.of(((seed * SEEDS) + n) % HELD_OUT)[1] for n in range(50)]
    assert all(0 <= item < HELD_OUT for item in trained) and len(set(trained)) == 50
    assert [split.of(HELD_OUT + n)[1] for n in range(3)] == [HELD_OUT + n for n in range(3)]


@pytest.mark.parametrize("seed", [0, 1, 1000, 1234, 10**7])
def test_what_a_run_draws_is_disjoint_from_what_it_evaluates_on(seed: int, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(10)))
    own = str(tmp_path / "own.py")
    mixture = Mixture(
        [
            MixturePart(task=own, name="rows", rows=str(tmp_path / "a.jsonl")),
            MixturePart(task=own, name="seeds"),
            MixturePart(task=str(TWELVE), name="tasks"),
            MixturePart(task=str(TWELVE), name="the same tasks"),
        ]
    )

    def played(number: int) -> str:
        env, at = mixture.of(number)
        return str(env.row or getattr(env, "task", None) or at)

    draw = Draw(mixture, seed * SEEDS, [0] * 4)
    trained = {played(next(draw)) for _ in range(400)}
    held = {played(number) for number in mixture.held_out(72)}
    assert not trained & held
    assert len(held) == 1 + 18 + 1  # a row, seeds, a task


def test_tasks_of_verifiers_are_split_by_what_they_ask() -> None:
    class Data:
        def __init__(self, prompt: str):
            self.prompt, self.system_prompt, self.name, self.idx = prompt, None, None, 0

    class Task:
        def __init__(self, prompt: str):
            self.data = Data(prompt)

    pytest.importorskip("verifiers", reason="make setup-verifiers")
    tasks = [Task(f"what is {n % 20} + 1?") for n in range(40)]
    kind = type("Sums", (VerifiersEnvironment,), {"tasks": tasks})
    keys = kind.identities()
    assert keys is not None and len(set(keys)) == 20
    (split,) = splits.make([Items(part="sums", kind="tasks", keys=keys)])
    trained, held = trained_and_held(split, keys, 3)
    assert len(held) == 2 and not trained & held


def test_all_items_are_played_once_before_any_is_again() -> None:
    (split,) = splits.make([Items(part="a", kind="tasks", keys=[str(n) for n in range(23)])])
    count = 23 - len(split.held)
    first, second = ([split.of(at + n)[0] for n in range(count)] for at in (0, count))
    assert sorted(first) == sorted(second) == split.training.tolist() and first != second
    resets = [split.of(n)[1] for n in range(2 * count)]
    assert len(set(resets)) == len(resets) and [item % 23 for item in resets] == first + second


def test_a_million_rows_cost_nothing_per_episode() -> None:
    (split,) = splits.make([Items(part="a", kind="rows", keys=[str(n) for n in range(100_000)])])
    calls = splits._order.cache_info().misses
    for seed in range(2000):
        split.of(seed)
    assert splits._order.cache_info().misses == calls + 1


def test_a_split_is_written_down_and_refuses_other_data(tmp_path: Path) -> None:
    items = Items(part="a", kind="rows", keys=[str(n) for n in range(30)])
    made = splits.make([items])
    splits.write(tmp_path, made)
    assert splits.read(tmp_path) == made
    splits.need_same(made[0], items)
    with pytest.raises(Conflict, match="the rows of a have changed"):
        splits.need_same(made[0], Items(part="a", kind="rows", keys=items.keys[1:]))
    with pytest.raises(NotFound, match="does not say what it holds out"):
        splits.read(tmp_path / "nowhere")


def test_a_run_says_what_it_evaluates_on() -> None:
    rows = Items(part="r", kind="rows", keys=[str(n) for n in range(30)])
    said = [split.says for split in splits.make([rows, Items(part="s", kind="seeds")])]
    assert said == [
        "r: evaluates on 3 of 30 rows that are not trained on",
        "s: evaluates on seeds from 1000000000 on, which are not trained on",
    ]
    assert [split.says for split in splits.make([rows], 0.0)] == ["r: evaluates on the 30 rows that it trains on"]
