"""Objectives: what a step of training makes smaller, as rows of one table of parts.

Pure: tensors in, tensors out; no model, no clock, no I/O.

Symbols, the same in every docstring here:

| symbol | in code | meaning |
|---|---|---|
| i, t | | trajectory i of the batch, its sampled token t; o_i its sampled tokens, \\|o_i\\| their number |
| R_i | `rewards` | reward of a trajectory |
| A_t | `advantage` | advantage of a token |
| π | `new` (logarithm) | the policy that is being trained; the only one that bears gradient |
| μ | `engine` (logarithm) | the behaviour policy, as the engine reported it |
| π_prox | `proximal` (logarithm) | the policy before the step, as the trainer computes it |
| π_ref | `reference` (logarithm) | the policy that a KL term holds on to |
| r_t | `ratio` | π / μ, or π / π_prox where the objective has corrections |
| k_t | `mismatch` | π_prox / μ |
| sg | `.detach()` | no gradient flows |

::

    rewards ─▶ advantage ─┐
    π, μ ─▶ ratio ─▶ clip ┴▶ loss per token ─▶ × corrections ─▶ + KL ─▶ × share of the token ─▶ sum
"""

from __future__ import annotations

from trainer.objectives.advantage import Advantage, Overlong, Rewards, token_advantages
from trainer.objectives.aggregate import Aggregate, BatchCounts
from trainer.objectives.correction import Correction
from trainer.objectives.credit import Credit, complete_divisor, credit
from trainer.objectives.losses import DUAL, KL, Clip, SampledTokens, Value
from trainer.objectives.metrics import Metrics
from trainer.objectives.table import OBJECTIVES, Objective, bounded, build, named, with_corrections

__all__ = [
    "DUAL",
    "KL",
    "OBJECTIVES",
    "Advantage",
    "Aggregate",
    "BatchCounts",
    "Clip",
    "Correction",
    "Credit",
    "Metrics",
    "Objective",
    "Overlong",
    "Rewards",
    "SampledTokens",
    "Value",
    "bounded",
    "build",
    "complete_divisor",
    "credit",
    "named",
    "token_advantages",
    "with_corrections",
]
