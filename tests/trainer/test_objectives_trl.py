"""Rows of the table against the loss that `trl` publishes. It needs pandas and pyarrow, so it is installed by hand:
``pip install trl==1.16.0 datasets pandas pyarrow``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.objective_reference import Batch, rewards_of
from tests.trainer.test_objectives import LONGEST, flat, loss_of, make, without_value

pytest.importorskip("trl", reason="trl is installed by hand: see the module")
pytestmark = pytest.mark.filterwarnings("default")

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}


def padded(batch: Batch, name: str) -> Tensor:
    rows = torch.zeros(len(batch), LONGEST, dtype=torch.float64)
    for row, item in zip(rows, batch, strict=True):
        row[: len(item[name])] = torch.tensor(item[name])
    return rows


def published(batch: Batch, advantages: list[float], settings: dict[str, Any]) -> float:
    """``GRPOTrainer._compute_loss`` of trl, with our log-probabilities in the place of a model's."""
    from trl import GRPOTrainer

    mask = torch.tensor([[t < len(item["engine"]) for t in range(LONGEST)] for item in batch]).int()
    this = SimpleNamespace(
        **{"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "importance_sampling_level": "token", **settings},
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded(batch, "new"), torch.zeros(mask.shape), None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
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
    return float(GRPOTrainer._compute_loss(this, None, inputs))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_objective_equals_trl(name: str) -> None:
    batch = [item for item in make(5) if name != "dapo" or item["group"] != 1]
    advantages = []
    for item in batch:
        peers = rewards_of(batch, item["group"])
        scale = 1.0 if name == "dr_grpo" else peers.std(ddof=1) + 1e-6
        advantages.append(float((item["reward"] - peers.mean()) / scale))
    ours = loss_of(without_value(name), batch, flat(batch, "new")).item()
    assert ours == pytest.approx(published(batch, advantages, SETTINGS[name]), abs=1e-6)
    assert np.isfinite(ours)
