"""Mixtures of environments: numbers that stand for part and seed, rows of data, who chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from rollout import Environment
from rollout.environments.mixture import Draw, Mixture, MixturePart, PartOutcome, load_curriculum
from rollout.environments.rows import read_rows
from rollout.environments.splits import HELD_OUT
from sandbox.errors import Invalid, NotFound

TASK = "from rollout import Environment, Observation\nclass {name}(Environment):\n    image = '{name}'\n" + (
    "    async def reset(self, sandbox, seed): return Observation(text='')\n"
    "    async def step(self, sandbox, action): return Observation(text='', done=True)\n"
)


def parts(directory: Path, **changes: object) -> list[MixturePart]:
    for name in ("near", "far"):
        (directory / f"{name}.py").write_text(TASK.format(name=name))
    return [
        MixturePart(task=str(directory / "near.py"), weight=3),
        MixturePart(task=str(directory / "far.py"), **changes),
    ]  # type: ignore[arg-type]


def test_a_number_stands_for_a_part_and_its_seed(tmp_path: Path) -> None:
    mixture = Mixture(parts(tmp_path))
    played = [mixture.environment().of(number) for number in (6, 7)]
    assert [(type(item).__name__, seed) for item, seed in played] == [("near", 3), ("far", 3)]
    assert mixture.images() == {"near", "far"} and Mixture(parts(tmp_path), image="own").images() == {"own"}
    assert [mixture.name(number) for number in (6, 7)] == ["near", "far"]
    held = [mixture.environment().of(number) for number in mixture.held_out(4)]
    assert [(type(item).__name__, seed - HELD_OUT) for item, seed in held] == [
        ("near", 0), ("far", 0), ("near", 1), ("far", 1),
    ]  # fmt: skip


def test_one_environment_alone_has_the_seeds_that_it_always_had(tmp_path: Path) -> None:
    mixture = Mixture(parts(tmp_path)[:1])
    draw = Draw(mixture, 5_000_000, [2])
    assert [next(draw) for _ in range(3)] == [5_000_002, 5_000_003, 5_000_004]
    assert type(mixture.environment()).__name__ == "near"
    assert mixture.held_out(2) == [HELD_OUT, HELD_OUT + 1]


def test_parts_are_drawn_by_their_weights_the_same_after_a_restart(tmp_path: Path) -> None:
    mixture = Mixture(parts(tmp_path))
    draw = Draw(mixture, 0, [0, 0])
    numbers = [next(draw) for _ in range(400)]
    share = Counter(number % 2 for number in numbers)[0] / 400
    assert 0.68 < share < 0.82
    assert len(set(numbers)) == 400
    for part in (0, 1):
        seeds = [number // 2 for number in numbers if number % 2 == part]
        assert seeds == list(range(len(seeds)))
    issued = [sum(number % 2 == part for number in numbers[:150]) for part in (0, 1)]
    again = Draw(mixture, 0, issued)
    assert [next(again) for _ in range(250)] == numbers[150:]


def test_every_row_is_trained_on_once_before_any_is_again_and_none_that_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(23)))
    mixture = Mixture(parts(tmp_path, rows=str(tmp_path / "rows.jsonl")))
    observed = []
    for seed in range(42):
        made, _ = mixture.environment().of(2 * seed + 1)
        assert made.row is not None
        observed.append(made.row["n"])
    assert (
        sorted(observed[:21]) == sorted(observed[21:]) and len(set(observed)) == 21 and observed[:21] != observed[21:]
    )
    held = [row["n"] for number in mixture.held_out(6) if (row := mixture.of(number)[0].row) is not None]
    assert held[0] == held[2] and set(held) == set(range(23)) - set(observed)
    assert mixture.of(6)[0].row is None


def test_rows_are_read_from_three_kinds_of_files_and_refused_with_the_hint(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ask,answer\n1,2\n3,4\n")
    (tmp_path / "a.json").write_text('[{"ask": 1}, {"ask": 2}]')
    assert read_rows(tmp_path / "a.csv")[1] == {"ask": "3", "answer": "4"}
    assert read_rows(tmp_path / "a.json") == [{"ask": 1}, {"ask": 2}]
    for name, text in (("one.jsonl", '{"a": 1}\n'), ("list.json", "[1, 2]"), ("torn.jsonl", '{"a": 1}\n{"a"')):
        (tmp_path / name).write_text(text)
        with pytest.raises(Invalid, match=name):
            read_rows(tmp_path / name)
    with pytest.raises(NotFound, match=r"nowhere\.csv"):
        read_rows(tmp_path / "nowhere.csv")


def test_a_curriculum_sees_outcomes_and_chooses(tmp_path: Path) -> None:
    path = tmp_path / "easy_first.py"
    path.write_text(
        "def weights(outcomes):\n"
        "    near, far = outcomes\n"
        "    return {'far': 1.0} if near.groups and near.reward > 0.8 else {'near': 1.0}\n"
    )
    observed: list[tuple[int, float, float, float]] = []
    draw = Draw(Mixture(parts(tmp_path)), 0, [0, 0], curriculum=load_curriculum(path), outcomes=lambda: observed)
    assert [next(draw) % 2 for _ in range(3)] == [0, 0, 0]
    observed += [(0, 0.9, 0.5, 1.0), (2, 1.0, 1.0, 1.0)]
    assert [next(draw) % 2 for _ in range(3)] == [1, 1, 1]
    reported: list[PartOutcome] = []

    def listen(outcomes: Sequence[PartOutcome]) -> dict[str, float]:
        reported.extend(outcomes)
        return {"near": 1.0}

    next(Draw(Mixture(parts(tmp_path)), 0, [4, 1], curriculum=listen, outcomes=lambda: observed))
    assert reported == [
        PartOutcome(name="near", weight=3, issued=4, groups=2, reward=0.95, silent=0.5),
        PartOutcome(name="far", weight=1, issued=1, groups=0, reward=0.0, silent=0.0),
    ]


@pytest.mark.parametrize("said", [{"nearr": 1.0}, {"near": -1.0}, {}, {"near": float("nan")}])
def test_what_a_curriculum_must_not_say(said: dict[str, float], tmp_path: Path) -> None:
    draw = Draw(Mixture(parts(tmp_path)), 0, [0, 0], curriculum=lambda _: said)
    with pytest.raises(Invalid, match=r"the curriculum says.*weight from 0 up for near, far"):
        next(draw)


def test_mixtures_and_curricula_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    near, far = parts(tmp_path)
    with pytest.raises(Invalid, match="parts of one name: near, near"):
        Mixture([near, near])
    with pytest.raises(Invalid, match="weights must be finite"):
        Mixture([MixturePart(task=near.task, weight=0.0), MixturePart(task=far.task, weight=0.0)])
    with pytest.raises(NotFound, match="no curriculum"):
        load_curriculum(tmp_path / "nowhere.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(Invalid, match="defines no function `weights`"):
        load_curriculum(tmp_path / "empty.py")


def test_the_default_environment_plays_every_seed_itself() -> None:
    class Own(Environment):
        async def reset(self, sandbox: object, seed: int): ...  # type: ignore[no-untyped-def]

        async def step(self, sandbox: object, action: str): ...  # type: ignore[no-untyped-def]

    own = Own()
    assert own.of(7) == (own, 7)


@pytest.mark.parametrize("value", ['"\\ud800"', str(2**70)], ids=["half a character", "a large number"])
def test_a_row_that_no_process_could_be_sent_is_named(value: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": ' + value + "}\n")
    with pytest.raises(Invalid, match=r"row 2 of .*rows.jsonl cannot be written down"):
        Mixture([msgspec.structs.replace(parts(tmp_path)[0], rows=str(tmp_path / "rows.jsonl"))])
