"""The loss of every sampled token, before the batch's mean is taken.

Pure. Symbols: the package's docstring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.objectives.correction import sequence_mean

INFINITE = float("inf")
DUAL = 3.0  # what runs bound the ratio of disadvantageous tokens by, by default
STEEPEST = 20.0  # nats: a log-ratio beyond is that of a broken number, and its exponential overflows


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of whole trajectories, flat: every field is [T]. `new`, `value` and `balance` bear gradient."""

    new: Tensor  # log π
    engine: Tensor  # log μ
    sequence: Tensor  # number of the token's trajectory, counted from 0
    advantage: Tensor
    share: Tensor  # of the token in the batch's mean: see Aggregate
    entropy: Tensor
    proximal: Tensor | None = None  # log π_prox; None: this is the first gradient of the step, so π_prox = sg(π)
    reference: Tensor | None = None  # log π_ref
    value: Tensor | None = None  # V of the critic as it is now
    value_before: Tensor | None = None  # V before the step
    returns: Tensor | None = None  # what V should have been
    balance: Tensor | None = None  # how evenly its trajectory uses experts; 1: evenly

    @property
    def before(self) -> Tensor:
        """log π_prox"""
        return self.new.detach() if self.proximal is None else self.proximal


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """How far a step may carry the ratio.

    - `minimum`: ℓ_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) (PPO, arXiv 1707.06347, equation 7; with
      high > low, so that unlikely tokens can grow, DAPO's clip-higher, arXiv 2503.14476, equation 10).
      With `dual` = c and A_t < 0: ℓ_t = -max(min(...), c A_t) (dual-clip PPO, arXiv 1912.09729, equation 5).
    - `weight`: ℓ_t = -sg(clip(r_t, 1 - low, 1 + high)) A_t log π: clipped tokens keep a gradient
      (CISPO, arXiv 2506.13585, equations 4 and 5).
    """

    kind: Literal["minimum", "weight"] = "minimum"
    low: float = 0.2
    high: float = 0.2
    dual: float = INFINITE


@dataclass(frozen=True, slots=True, kw_only=True)
class KL:
    """A term that holds π near π_ref. `k1`, `k2`, `k3`: Schulman 2020, "Approximating KL divergence".

    In the loss: + β k(log π_ref - log π) per token (GRPO has k3, arXiv 2402.03300, equation 4).
    In the reward: R_t = R_t - β k, before the step (PPO of InstructGPT, REINFORCE++, RLOO have k1).
    """

    beta: float
    kind: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    weighted: bool = False  # in the loss: times r_t, so that it is unbiased where old is not π (arXiv 2512.02556, 3.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Loss of a value head: coefficient · ½ max((V - G)^2, (clip(V, V_before ± range) - G)^2), G = A + V_before.

    Source: the value clipping of PPO's reference implementation, as in arXiv 2005.12729, section 3.
    """

    coefficient: float = 0.5
    range: float = 0.2
    rate: float = 0.0  # of the head's own optimiser group; 0: the policy's
    warm_up: int = 0  # steps in which only the head learns


Ratio = Literal["none", "token", "sequence"]


def log_ratio(ratio: Ratio, tokens: SampledTokens, old: Tensor) -> Tensor:
    """log r [T] against `old`.

    - `none` and `token`: r_t = π / old, token by token.
    - `sequence`: r_t = (Π_s π_s / old_s)^(1/|o_i|), one for a whole trajectory (GSPO, arXiv 2507.18071, equation 7).
    """
    difference = (tokens.new - old).clamp(-STEEPEST, STEEPEST)
    return sequence_mean(difference, tokens.sequence) if ratio == "sequence" else difference


def surrogate(ratio: Ratio, clip: Clip | None, tokens: SampledTokens, old: Tensor) -> tuple[Tensor, Tensor]:
    """ℓ [T], and how the clip bit: -1 at its lower bound, 1 at its upper, 0 where it did not matter.

    Without a ratio: ℓ_t = -A_t log π (REINFORCE). With a ratio and no clip: ℓ_t = -r_t A_t.
    """
    advantage = tokens.advantage
    if ratio == "none":
        return -advantage * tokens.new, torch.zeros_like(advantage)
    r = log_ratio(ratio, tokens, old).exp()
    if clip is None:
        return -r * advantage, torch.zeros_like(advantage)
    bounded = r.clamp(1 - clip.low, 1 + clip.high)
    side = (r.detach() > 1 + clip.high).to(r.dtype) - (r.detach() < 1 - clip.low).to(r.dtype)
    if clip.kind == "weight":
        return -bounded.detach() * advantage * tokens.new, side
    gain = torch.minimum(r * advantage, bounded * advantage)
    bit = side * (bounded * advantage < r * advantage).to(r.dtype)
    if clip.dual != INFINITE:
        gain = torch.where(advantage < 0, torch.maximum(gain, clip.dual * advantage), gain)
    return -gain, bit.detach()


def divergence(kind: Literal["k1", "k2", "k3"], new: Tensor, reference: Tensor) -> Tensor:
    """Estimates of KL(π ‖ π_ref) per token, with x = log π_ref - log π: k1 = -x, k2 = x²/2, k3 = e^x - 1 - x."""
    x = reference - new
    if kind == "k1":
        return -x
    return x.square() / 2 if kind == "k2" else x.expm1() - x


def value_loss(value: Value, tokens: SampledTokens) -> Tensor:
    """[T], as in `Value`."""
    assert tokens.value is not None and tokens.value_before is not None and tokens.returns is not None
    near = tokens.value_before + (tokens.value - tokens.value_before).clamp(-value.range, value.range)
    worse = torch.maximum((tokens.value - tokens.returns).square(), (near - tokens.returns).square())
    return value.coefficient * worse / 2


def imitation(new: Tensor, weight: Tensor) -> Tensor:
    """Supervised fine-tuning: ℓ_t = -w_t log π of the token that was written. new, weight: [T]."""
    return -weight * new


def distillation(student: Tensor, teacher: Tensor, *, mix: float) -> Tensor:
    """Generalised Jensen-Shannon divergence per token, from log-probabilities [T, V] of student and teacher.

    D = β KL(p_T ‖ m) + (1 - β) KL(p_S ‖ m), m = β p_T + (1 - β) p_S, β = `mix`; the limits are β = 0: KL(p_T ‖ p_S)
    (forward) and β = 1: KL(p_S ‖ p_T) (reverse). Source: GKD, arXiv 2306.13649, section 3.1.
    """
    if mix == 0.0:
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    if mix == 1.0:
        return F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
    beta = torch.as_tensor(mix, dtype=student.dtype, device=student.device)
    mean = torch.logaddexp(teacher + beta.log(), student + torch.log1p(-beta))
    towards = F.kl_div(mean, teacher, reduction="none", log_target=True).sum(-1)
    away = F.kl_div(mean, student, reduction="none", log_target=True).sum(-1)
    return beta * towards + (1 - beta) * away


def on_policy_distillation(teacher: Tensor, engine: Tensor) -> Tensor:
    """Advantages A_t = log π_T - log μ [T] of what the student itself sampled: minus the sampled reverse KL.

    Source: MiniLLM, arXiv 2306.08543, section 2.2 (the single-step part of its gradient).
    """
    return (teacher - engine).detach()
