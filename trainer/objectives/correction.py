"""Corrections for data that another policy sampled: what each token's loss is multiplied by.

Pure. They bear no gradient. k_t = π_prox / μ compares the trainer's policy before the step with what the engine
reported: it is 1 for an engine that computes as the trainer does, with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

INFINITE = float("inf")
STEEPEST = 20.0  # nats: the exponential of more overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factor w_t of a token's loss:

    - `token`: w_t = min(k_t, high): truncated importance sampling per token (TIS; Yao et al. 2025, "Your efficient RL
      framework secretly brings you off-policy RL training"; truncation: Ionides 2008). With high = ∞ the importance
      weight of decoupled PPO (arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298, equation 5).
    - `sequence`: w_t = min(Π_s k_s, high), the same for all tokens of a trajectory (TIS per sequence; Liu et al. 2025,
      "When speed kills stability").
    - `icepop`: w_t = k_t where low ≤ k_t ≤ high, else 0 (IcePop: "Every step evolves", arXiv 2510.18855, section 3).
    - `sequence_mask`: w_t = 1 where low ≤ (Π_s k_s)^(1/|o_i|) ≤ high, else 0: a trajectory that the trainer finds
      strange as a whole teaches nothing (masked importance sampling with the geometric mean; Liu et al. 2025).
    """

    kind: Literal["token", "sequence", "icepop", "sequence_mask"]
    low: float = 0.0
    high: float = INFINITE

    def factor(self, mismatch: Tensor, sequence: Tensor) -> Tensor:
        """w [T]. mismatch: log k [T]; sequence: number of the trajectory of each token [T], counted from 0."""
        mismatch = mismatch.detach().clamp(max=STEEPEST)
        if self.kind == "token":
            return mismatch.exp().clamp(max=self.high)
        if self.kind == "icepop":
            weight = mismatch.exp()
            return torch.where((weight >= self.low) & (weight <= self.high), weight, torch.zeros_like(weight))
        if self.kind == "sequence":
            return sequence_sum(mismatch, sequence).exp().clamp(max=self.high)
        mean = sequence_mean(mismatch, sequence).exp()
        return ((mean >= self.low) & (mean <= self.high)).to(mismatch.dtype)


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """Sum over the trajectory of each token, at each of its tokens: [T] -> [T]."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(count).index_add(0, sequence, values)[sequence]


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Mean over the trajectory of each token, at each of its tokens: [T] -> [T]."""
    return sequence_sum(values, sequence) / sequence_sum(torch.ones_like(values), sequence)
