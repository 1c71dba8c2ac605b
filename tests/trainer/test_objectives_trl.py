"""Rows of the table, and preferences, against the losses that `trl` computes: ``make setup-trl``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.objective_reference import Batch, rewards_of
from tests.trainer.test_objectives import LONGEST, flat, loss_of, make
from trainer.objectives import build
from trainer.objectives.preference import preference_loss
from trainer.settings import ObjectiveSettings

sys.path.append(str(Path(__file__).parents[2] / ".prefix" / "trl"))  # last: its packages serve where ours have none
pytest.importorskip("trl", reason="make setup-trl")
pytestmark = pytest.mark.filterwarnings("default")

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "lite_ppo": {"loss_type": "bnpo"},
}


def padded(batch: Batch, name: str) -> Tensor:
    rows = torch.zeros(len(batch), LONGEST, dtype=torch.float64)
    for row, item in zip(rows, batch, strict=True):
        row[: len(item[name])] = torch.tensor(item[name])
    return rows


def published(batch: Batch, advantages: list[float], settings: dict[str, Any], new: Tensor) -> Tensor:
    """``GRPOTrainer._compute_loss`` of trl, with our log-probabilities in the place of a model's."""
    from trl import GRPOTrainer

    settings = dict(settings)
    weighted, delta = settings.pop("weighted", False), settings.pop("delta", None)
    mask = torch.tensor([[t < len(item["engine"]) for t in range(LONGEST)] for item in batch]).int()
    this = SimpleNamespace(
        **{"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "importance_sampling_level": "token", **settings},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros(mask.shape), None),
        args=SimpleNamespace(use_bias_correction_kl=weighted, delta=delta, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value),
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=MagicMock(),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(batch), 1).long(),
        "prompt_mask": torch.ones(len(batch), 1).long(),
        "completion_ids": torch.zeros(len(batch), LONGEST).long(),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "old_per_token_logps": padded(batch, "engine"),
        "ref_per_token_logps": padded(batch, "reference"),
        "num_items_in_batch": mask.sum(),
    }
    result: Tensor = GRPOTrainer._compute_loss(this, None, inputs)
    return result


# Of every objective: what TRL calls it, and the same as settings.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as published": ({}, {}),
    "dual clip": ({"delta": 2.0}, {"clip": {"dual": 2.0}}),
    "other bounds": ({"epsilon_low": 0.05, "epsilon_high": 0.5}, {"clip": {"low": 0.05, "high": 0.5}}),
    "KL": ({"beta": 0.1}, {"kl": {"beta": 0.1, "kind": "k3", "place": "loss"}}),
    "no KL": ({"beta": 0.0}, {"kl": {"beta": 0.0}}),
    "weighted KL": ({"beta": 0.1, "weighted": True}, {"kl": {"beta": 0.1, "weighted": True}}),
    "ratio of sequences": ({"importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
}
NOT_IN_TRL = {("cispo", "other bounds"), ("cispo", "dual clip")}  # its upper bound is the ratio itself; it has no dual


def advantages_of(name: str, batch: Batch) -> list[float]:
    result = []
    for item in batch:
        peers = rewards_of(batch, item["group"])
        scale = peers.std(ddof=1) + 1e-6
        if name == "dr_grpo":
            scale = 1.0
        if name == "lite_ppo":
            scale = np.array([item["reward"] for item in batch]).std(ddof=1) + 1e-6
        result.append(float((item["reward"] - peers.mean()) / scale))
    return result


CASES = [(name, change) for name in sorted(SETTINGS) for change in CHANGES if (name, change) not in NOT_IN_TRL]


@pytest.mark.parametrize(("name", "change"), CASES)
def test_objective_equals_trl(name: str, change: str) -> None:
    """Loss, and its gradient by every log-probability."""
    theirs, ours = CHANGES[change]
    batch = [item for item in make(5) if name != "dapo" or item["group"] != 1]
    new = padded(batch, "new").requires_grad_()
    target = published(batch, advantages_of(name, batch), {**SETTINGS[name], **theirs}, new)
    target.backward()
    made = build(msgspec.convert({"preset": name, "clip": {"dual": 0.0}, **ours}, ObjectiveSettings), length=LONGEST)
    mine = flat(batch, "new").requires_grad_()
    loss = loss_of(made, batch, mine)
    loss.backward()
    assert loss.item() == pytest.approx(target.item(), abs=1e-6)
    rows = [row[: len(item["new"])] for row, item in zip(new.grad, batch, strict=True)]  # type: ignore[arg-type]
    assert torch.allclose(mine.grad, torch.cat(rows), atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.1)])
def test_losses_of_preferences_equal_those_of_trl(kind: str, smoothing: float) -> None:
    """``DPOTrainer._compute_loss``. TRL's `robust` is ours with ε, less what its labels flip, and scaled."""
    from trl import DPOTrainer

    draw = torch.Generator().manual_seed(2)
    logs = -torch.rand(8, 6, generator=draw, dtype=torch.float64) * 3
    references = -torch.rand(8, generator=draw, dtype=torch.float64) * 9
    mask = torch.ones(8, 7).int()
    mask[:, 0] = 0
    this = MagicMock(
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl",
        loss_types=[kind], loss_weights=[1.0], beta=0.3, label_smoothing=smoothing, use_weighting=False,
    )  # fmt: skip
    this.accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    seen = {"entropy": logs, "mean_logits": logs, "is_top1": logs > -1, "logits": logs[..., None]}
    outputs = SimpleNamespace(log_probs=logs, **seen)
    inputs = {
        "input_ids": torch.ones(8, 7).long(), "attention_mask": torch.ones(8, 7), "completion_mask": mask,
        "ref_chosen_logps": references[:4], "ref_rejected_logps": references[4:],
    }  # fmt: skip
    target = float(DPOTrainer._compute_loss(this, lambda **_: outputs, inputs, False))
    sums, lengths = logs.sum(1), torch.full((4,), 6)
    ours = preference_loss(
        sums[:4], sums[4:], references[:4], references[4:], beta=0.3, lengths=(lengths, lengths),
        kind="sigmoid" if kind == "robust" else kind,  # type: ignore[arg-type]
    )  # fmt: skip
    if kind == "robust":
        flipped = preference_loss(sums[4:], sums[:4], references[4:], references[:4], beta=0.3)
        ours = ((1 - smoothing) * ours - smoothing * flipped) / (1 - 2 * smoothing)
    assert float(ours.mean()) == pytest.approx(target, abs=1e-6)
