"""Every row of the table of objectives against numpy written from the papers, in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sandbox.errors import Invalid
from tests.support.objective_reference import FACTORS, LOSSES, Batch, corrected, ppo_value
from trainer.objectives import (
    OBJECTIVES,
    BatchCounts,
    Metrics,
    Objective,
    Rewards,
    SampledTokens,
    complete_divisor,
    credit,
    named,
    with_corrections,
)
from trainer.objectives.advantage import silent
from trainer.objectives.losses import distillation, imitation, on_policy_distillation
from trainer.objectives.metrics import by_outcome

LONGEST = 32


def make(seed: int, *, spread: float = 0.4) -> Batch:
    """Three groups of four, the second of them silent; log-probabilities far enough apart for clips to bite."""
    rng = np.random.default_rng(seed)
    batch: Batch = []
    for group in range(3):
        for member in range(4):
            length = int(rng.integers(2, 9))
            engine = -rng.exponential(1.0, length) - 0.05
            batch.append(
                {
                    "group": group,
                    "reward": 1.0 if group == 1 else float((member + seed) % 2) + 0.1 * member,
                    "engine": engine,
                    "new": engine + rng.normal(0, spread, length),
                    "proximal": engine + rng.normal(0, 0.02 if member == 0 else spread, length),
                    "reference": engine + rng.normal(0, spread, length),
                    "value": rng.normal(0, 1, length),
                    "value_before": rng.normal(0, 1, length),
                }
            )
    return batch


def flat(batch: Batch, name: str) -> Tensor:
    return torch.tensor(np.concatenate([item[name] for item in batch]), dtype=torch.float64)


def rewards_of(objective: Objective, batch: Batch) -> Rewards:
    penalty = None
    if objective.kl is not None and objective.kl.place == "reward":
        penalty = objective.kl.beta * (flat(batch, "new") - flat(batch, "reference"))
    return Rewards(
        torch.tensor([item["reward"] for item in batch], dtype=torch.float64),
        torch.tensor([item["group"] for item in batch]),
        torch.tensor([len(item["engine"]) for item in batch]),
        penalty,
        flat(batch, "value_before") if objective.advantage.baseline == "critic" else None,
        taught=flat(batch, "reference") - flat(batch, "engine"),
    )


def loss_of(objective: Objective, batch: Batch, new: Tensor, *, proximal: bool = False, **more: Any) -> Tensor:
    """The loss of a whole batch as the trainer computes it."""
    rewards = rewards_of(objective, batch)
    earned = credit(objective, rewards)
    tokens = SampledTokens(
        new=new,
        engine=flat(batch, "engine"),
        sequence=torch.repeat_interleave(torch.arange(len(batch)), rewards.lengths),
        advantage=earned.advantage,
        share=earned.share,
        entropy=torch.zeros(len(new), dtype=torch.float64),
        proximal=flat(batch, "proximal") if proximal else None,
        reference=flat(batch, "reference"),
        **more,
    )
    return objective.loss(tokens, Metrics()) / complete_divisor(objective, rewards, earned.counts)


def split(batch: Batch, values: Tensor) -> list[np.ndarray]:
    ends = np.cumsum([len(item["engine"]) for item in batch])[:-1]
    return np.split(values.detach().numpy(), ends)


def without_value(name: str) -> Objective:
    objective = named(name, length=LONGEST)
    if objective.value is None:
        return objective
    return Objective(**{**{f: getattr(objective, f) for f in objective.__dataclass_fields__}, "value": None})


def compare(objective: Objective, batch: Batch, reference: Any, *, proximal: bool = False) -> None:
    """Value to 1e-6, and the gradient against central differences of the reference."""
    new = flat(batch, "new").requires_grad_()
    loss = loss_of(objective, batch, new, proximal=proximal)
    frozen = split(batch, new)
    assert loss.item() == pytest.approx(reference(batch, frozen, frozen), abs=1e-6)
    loss.backward()
    assert new.grad is not None
    width = 1e-6
    for at in range(len(new)):
        shift = torch.zeros(len(new), dtype=torch.float64)
        shift[at] = width
        up = reference(batch, split(batch, new + shift), frozen)
        down = reference(batch, split(batch, new - shift), frozen)
        assert new.grad[at].item() == pytest.approx((up - down) / (2 * width), abs=1e-6)


def test_every_row_has_a_reference() -> None:
    assert set(OBJECTIVES) == set(LOSSES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_objective_equals_its_reference(name: str, seed: int) -> None:
    compare(without_value(name), make(seed), LOSSES[name])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(FACTORS))
def test_correction_equals_its_reference(name: str, seed: int) -> None:
    objective = with_corrections(named("dapo"), [name])
    compare(objective, make(seed), corrected(FACTORS[name]), proximal=True)


def test_corrections_multiply() -> None:
    objective = with_corrections(named("dapo"), ["sequence_mask", "tis"])
    both = corrected(lambda k: FACTORS["sequence_mask"](k) * FACTORS["tis"](k))
    compare(objective, make(0), both, proximal=True)


def test_value_loss_equals_its_reference() -> None:
    batch, objective = make(4), named("ppo")
    value = flat(batch, "value").requires_grad_()
    rewards = rewards_of(objective, batch)
    from trainer.objectives.advantage import gae

    returns = gae(objective.advantage, rewards) + flat(batch, "value_before")
    more = {"value": value, "value_before": flat(batch, "value_before"), "returns": returns}
    both = loss_of(objective, batch, flat(batch, "new"), **more)
    frozen = split(batch, flat(batch, "new"))
    expected = LOSSES["ppo"](batch, frozen, frozen) + ppo_value(batch, frozen)
    assert both.item() == pytest.approx(expected, abs=1e-6)
    both.backward()
    assert value.grad is not None
    for at in range(len(value)):
        moved = [dict(item) for item in batch]
        sides = []
        for sign in (1, -1):
            shifted = value.detach().clone()
            shifted[at] += sign * 1e-6
            for item, part in zip(moved, split(batch, shifted), strict=True):
                item["value"] = part
            sides.append(ppo_value(moved, frozen))
        assert value.grad[at].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_order_of_trajectories_does_not_matter(name: str) -> None:
    objective, batch = without_value(name), make(7)
    order = list(range(len(batch)))
    random.Random(1).shuffle(order)
    shuffled = [batch[i] for i in order]
    assert loss_of(objective, shuffled, flat(shuffled, "new")).item() == pytest.approx(
        loss_of(objective, batch, flat(batch, "new")).item(), rel=1e-10
    )


@pytest.mark.parametrize("name", sorted(name for name, row in OBJECTIVES.items() if row.streams))
def test_groups_that_come_one_by_one_make_the_whole(name: str) -> None:
    """What a trainer sums up while groups come in, divided once, is the objective of the batch."""
    objective, batch = without_value(name), make(3)
    total, counts = 0.0, BatchCounts()
    for group in (2, 0, 1):
        part = [item for item in batch if item["group"] == group]
        rewards = rewards_of(objective, part)
        earned = credit(objective, rewards)
        new = flat(part, "new")
        sequence = torch.repeat_interleave(torch.arange(len(part)), rewards.lengths)
        nothing = torch.zeros_like(new)
        tokens = SampledTokens(
            new, flat(part, "engine"), sequence, earned.advantage, earned.share, nothing,
            reference=flat(part, "reference"),
        )  # fmt: skip
        total += float(objective.loss(tokens, Metrics()))
        counts += earned.counts
    divided = total / complete_divisor(objective, rewards_of(objective, batch), counts)
    assert divided == pytest.approx(loss_of(objective, batch, flat(batch, "new")).item(), rel=1e-10)


def test_silent_groups_bear_no_gradient_and_are_named() -> None:
    batch = make(0)
    rewards = rewards_of(named("dapo"), batch)
    assert silent(rewards).tolist() == [item["group"] == 1 for item in batch]
    for name in ("dr_grpo", "gspo", "dapo", "rloo", "pooled", "lite_ppo", "cispo"):
        new = flat(batch, "new").requires_grad_()
        loss_of(named(name), batch, new).backward()
        assert new.grad is not None
        for item, part in zip(batch, split(batch, new.grad), strict=True):
            assert item["group"] != 1 or np.abs(part).max() == 0
        assert credit(named(name), rewards).needed.tolist() == [item["group"] != 1 for item in batch]


def test_the_mean_is_over_the_batch_and_not_over_those_with_an_advantage() -> None:
    batch = make(0)
    silence = [item for item in batch if item["group"] == 1]
    counts = {name: credit(named(name), rewards_of(named(name), batch)).counts for name in ("pooled", "dapo")}
    everything = sum(len(item["engine"]) for item in batch)
    assert counts["pooled"] == BatchCounts(len(batch), everything)
    assert counts["dapo"] == BatchCounts(len(batch) - 4, everything - sum(len(item["engine"]) for item in silence))


def test_two_normalisers_that_are_both_called_batch_deviation() -> None:
    """Rewards 0 and 1 in one group, 4 and 5 in another: 0.5 within groups, 2.38 in the batch."""
    rewards = Rewards(torch.tensor([0.0, 1, 4, 5]).double(), torch.tensor([0, 0, 1, 1]), torch.ones(4).long())
    pooled = complete_divisor(named("pooled"), rewards, BatchCounts(1, 1))
    lite = complete_divisor(named("lite_ppo"), rewards, BatchCounts(1, 1))
    assert pooled == pytest.approx(0.5)
    assert lite == pytest.approx(float(np.std([0, 1, 4, 5], ddof=1)), abs=1e-5)


def test_a_trajectory_alone_in_its_group_has_no_advantage() -> None:
    rewards = Rewards(torch.tensor([3.0]).double(), torch.tensor([0]), torch.tensor([2]))
    for name in ("grpo", "rloo", "dr_grpo", "pooled", "lite_ppo", "dapo"):
        assert credit(named(name), rewards).advantage.tolist() == [0.0, 0.0]


def test_figures_of_parts_add_up_and_say_how_far_the_engine_is() -> None:
    batch = make(2)
    new, engine = flat(batch, "new"), flat(batch, "engine")
    complete, parts = Metrics(), Metrics()
    zeros = torch.zeros_like(new)
    everything = SampledTokens(new, engine, zeros.long(), zeros, zeros, zeros + 0.5)
    complete.add(everything, zeros, (new > engine).double() - (new < engine).double(), zeros + 1)
    for half in (slice(0, 20), slice(20, None)):
        part = SampledTokens(new[half], engine[half], zeros[half].long(), zeros[half], zeros[half], zeros[half] + 0.5)
        one = Metrics()
        bit = (new[half] > engine[half]).double() - (new[half] < engine[half]).double()
        one.add(part, zeros[half], bit, zeros[half] + 1)
        parts = parts + one
    assert parts.result().items() == pytest.approx(complete.result().items())
    k = np.exp((new - engine).numpy())
    summary = complete.result()
    assert summary.ess == pytest.approx(k.sum() ** 2 / (len(k) * (k**2).sum()))
    assert summary.mismatch_kl == pytest.approx(np.mean(k - 1 - np.log(k)))
    assert summary.clipped_low == pytest.approx(np.mean(k < 1))
    assert summary.clipped_high == pytest.approx(np.mean(k > 1))
    assert summary.mismatch_high == pytest.approx(np.mean(k > 2))
    assert summary.entropy == pytest.approx(0.5)


def test_lengths_are_told_by_outcome() -> None:
    assert by_outcome([1, 0, 0], [10, 30, 50], [False, True, False]) == {"better": 10, "worse": 40, "cut": 30}
    assert by_outcome([], [], []) == {}


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_distillation_is_the_divergence_of_its_paper(mix: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator, dtype=torch.float64)
    student, teacher = torch.log_softmax(logits, -1)
    s, t = student.exp().numpy(), teacher.exp().numpy()

    def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return (p * np.log(p / q)).sum(-1)

    mean = mix * t + (1 - mix) * s
    expected = {0.0: kl(t, s), 1.0: kl(s, t)}.get(mix, mix * kl(t, mean) + (1 - mix) * kl(s, mean))
    assert distillation(student, teacher, mix=mix).numpy() == pytest.approx(expected, abs=1e-9)


def test_imitation_and_distillation_on_policy() -> None:
    new = torch.tensor([-1.0, -2.0]).double().requires_grad_()
    imitation(new, torch.tensor([1.0, 0.0]).double()).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0]
    assert on_policy_distillation(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist() == [2.0]


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(Invalid, match="nearest: dapo"):
        named("dappo")
    with pytest.raises(Invalid, match="nearest: tis"):
        with_corrections(named("dapo"), ["tiss"])
    with pytest.raises(Invalid, match="ratio"):
        with_corrections(named("rloo"), ["tis"])
