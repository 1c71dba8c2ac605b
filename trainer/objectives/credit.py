"""What a batch, or whole groups of one, say to each of its tokens: advantage and share.

Pure. Guarantee: losses with these advantages and shares, summed over any split of the batch into groups and divided
once by `divisor` of the whole, are the objective of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.objectives.advantage import Rewards, divisor, silent, token_advantages
from trainer.objectives.aggregate import BatchCounts
from trainer.objectives.table import Objective


@dataclass(frozen=True, slots=True)
class Credit:
    """T sampled tokens of N trajectories."""

    advantage: Tensor  # [T]
    share: Tensor  # [T]
    counts: BatchCounts
    needed: Tensor  # [N] bool: a gradient can come of this trajectory


def credit(objective: Objective, batch: Rewards) -> Credit:
    """For an objective that streams `batch` may be some whole groups, else it is the complete batch."""
    counted = torch.ones_like(batch.rewards, dtype=torch.bool)
    if objective.drop_silent:
        counted = ~silent(batch)
    if objective.overlong.filter and batch.truncated is not None:
        counted = counted & ~batch.truncated
    advantage = objective.advantage
    if objective.streams and advantage.scale in ("batch", "within_groups"):
        advantage = replace(advantage, scale="none")
    result = token_advantages(advantage, batch)
    share = torch.where(counted, objective.aggregate.numerator(batch.lengths), 0.0).to(batch.rewards.dtype)
    counts = BatchCounts(int(counted.sum()), int(batch.lengths[counted].sum()))
    number = torch.repeat_interleave(torch.arange(len(batch.lengths)), batch.lengths)
    moved = torch.zeros_like(batch.rewards).index_add(0, number, (result != 0).to(batch.rewards.dtype)) > 0
    in_loss = objective.kl is not None and objective.kl.place == "loss"
    always = objective.value is not None or in_loss or objective.entropy > 0 or objective.balance > 0
    needed = counted & (batch.lengths > 0) & (moved | always)
    return Credit(result, torch.repeat_interleave(share, batch.lengths), counts, needed)


def complete_divisor(objective: Objective, batch: Rewards, counts: BatchCounts) -> float:
    """What the summed losses of a complete batch are divided by, once."""
    late = divisor(objective.advantage, batch) if objective.streams else 1.0
    return objective.aggregate.denominator(counts) * late
