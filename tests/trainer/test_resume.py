"""Saves: complete, atomic, passed over when damaged, equal bit by bit when they come back."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.small_model import model
from tests.trainer.test_learner import samples
from trainer.errors import TrainerFailed
from trainer.learner import Learner
from trainer.models.load import Lora, load
from trainer.models.scorer import Scorer
from trainer.objectives import named
from trainer.resume import KEEP, ResumeState, Saves, saves_in
from trainer.settings import OptimiserSettings


def learner(seed: int = 0, objective: str = "pooled") -> Learner:
    critic = named(objective).value is not None
    reference = Scorer(model(9)) if named(objective).kl is not None else None
    return Learner(
        Scorer(model(seed), critic=critic), named(objective), OptimiserSettings(rate=1e-2), reference=reference
    )


def equal(left: Learner, right: Learner) -> bool:
    """Weights and the optimiser's state, bit by bit."""
    ours, theirs = left.scorer.state_dict(), right.scorer.state_dict()
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    states = [list(item.optimisers[0].state_dict()["state"].values()) for item in (left, right)]
    return same and all(
        torch.equal(mine[name], other[name]) for mine, other in zip(*states, strict=True) for name in mine
    )


@pytest.mark.parametrize("objective", ["pooled", "ppo"])
def test_what_was_saved_comes_back_bit_by_bit_and_goes_on_the_same(objective: str, tmp_path: Path) -> None:
    first = learner(objective=objective)
    saves = Saves(tmp_path)
    assert saves.load(first) is None
    for step in range(4):
        first.step(samples(step))
        saves.save(first, ResumeState(step=step + 1, version=step, consumed=[f"p{step}"], totals={"turns": 7}))
    assert len(saves_in(tmp_path)) == KEEP
    second = learner(seed=5, objective=objective)
    result = Saves(tmp_path).load(second)
    assert result is not None
    assert (result.step, result.version, result.consumed, result.totals) == (4, 3, ["p3"], {"turns": 7})
    assert equal(first, second)
    assert first.step(samples(9)).summary == second.step(samples(9)).summary
    assert equal(first, second)


def test_every_generator_of_chance_goes_on_where_it_was(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(1))

    one = learner()
    one.step(samples(0))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    draw()
    Saves(tmp_path).save(one, ResumeState(step=1))
    expected = draw()
    draw()
    Saves(tmp_path).load(one)
    assert draw() == expected


def test_weights_may_change_while_they_are_being_written(tmp_path: Path) -> None:
    one, copy, saves = learner(), learner(), Saves(tmp_path)
    one.step(samples(0))
    copy.step(samples(0))
    saves.start_save(one, ResumeState(step=1))
    assert saves_in(tmp_path) == []  # not complete: not there
    one.step(samples(1))
    saves.wait_saved()
    other = learner()
    Saves(tmp_path).load(other)
    assert equal(other, copy)
    assert not equal(other, one)


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_newest_save_is_passed_over_and_said(damage: str, tmp_path: Path) -> None:
    one, saves = learner(), Saves(tmp_path)
    for step in (1, 2):
        one.step(samples(step))
        saves.save(one, ResumeState(step=step))
    shards = next((tmp_path / "step-000002").glob("*.distcp"))
    content = bytearray(shards.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        shards.unlink()
    else:
        shards.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    again = Saves(tmp_path)
    result = again.load(learner())
    assert result is not None
    assert result.step == 1
    assert "step-000002 is damaged" in again.notes[0]
    shutil.rmtree(tmp_path / "step-000001")
    with pytest.raises(TrainerFailed, match="no save"):
        Saves(tmp_path).load(learner())


def test_what_an_interrupted_save_left_is_not_seen(tmp_path: Path) -> None:
    one, saves = learner(), Saves(tmp_path)
    one.step(samples(0))
    saves.save(one, ResumeState(step=1))
    (tmp_path / ".new").mkdir()
    (tmp_path / ".new" / "__0_0.distcp").write_bytes(b"torn")
    result = Saves(tmp_path).newest()
    assert result is not None
    assert result.step == 1
    one.step(samples(1))
    Saves(tmp_path).save(one, ResumeState(step=2))
    assert [path.name for path in saves_in(tmp_path)] == ["step-000001", "step-000002"]


def test_a_full_disk_is_told_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner()
    one.step(samples(0))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(OSError, match="MiB") as caught:
        Saves(tmp_path).save(one, ResumeState(step=1))
    assert caught.value.errno == errno.ENOSPC
    assert saves_in(tmp_path) == []


def test_of_a_model_with_adapters_only_they_are_saved(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an optional extra")
    from trainer.models import policy

    base = tmp_path / "base"
    policy.make(base, ["ls"], seed=0, shape=policy.Shape(width=32, layers=2, heads=2, inner=48))

    def adapted() -> Learner:
        torch.manual_seed(1)
        return Learner(Scorer(load(base, lora=Lora(rank=2, alpha=4))), named("pooled"), OptimiserSettings(rate=1e-2))

    one, other = adapted(), adapted()
    for step in range(2):
        one.step(samples(step))
    Saves(tmp_path / "resume").save(one, ResumeState(step=2))
    Saves(tmp_path / "resume").load(other)
    assert equal(one, other)
    size = sum(path.stat().st_size for path in (tmp_path / "resume").rglob("*.distcp"))
    assert size < (base / "model.safetensors").stat().st_size * 4
