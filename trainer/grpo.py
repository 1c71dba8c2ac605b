"""The loss of GRPO and one optimisation step over a batch of trajectories.

Owns: the loss, the step, the figures that say whether both are healthy. Does not own: advantages, where the
trajectories came from, when a step happens.
Guarantee: exactly the tokens that the policy sampled bear gradient; the behaviour policy is what the engine
reported, token by token, never recomputed (I8).

Per sampled token t of trajectory i, with r = exp(logp_new - logp_engine) and advantage A_i:
    loss = -min(r A, clip(r, 1 - low, 1 + high) A), averaged over all sampled tokens of the batch (token level).
With `tis` set the ratio is split (decoupled PPO): the proximal policy is the trainer's own before the step, and
its distance from the engine's weighs the token, truncated at `tis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.embedded.model import Qwen3
from trainer.packing import plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Bounds of the ratio: the upper one is wider, so that unlikely tokens can grow (clip-higher)."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis: float | None = None  # cap of the truncated importance weight; None uses the engine's policy as proximal


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory as the loss sees it. All lists have one entry per token."""

    tokens: Sequence[int]
    mask: Sequence[int]  # 1 where the policy sampled the token
    logprobs: Sequence[float]  # of the engine; 0 where the mask is 0
    advantage: float


@dataclass(slots=True)
class StepStats:
    """Figures of one optimisation step, all over sampled tokens of trajectories with an advantage."""

    loss: float = 0.0
    tokens: int = 0
    trajectories: int = 0
    mismatch_kl: float = 0.0  # KL(engine || trainer) by the k3 estimator, before the step
    ess: float = 1.0  # effective sample size of the ratios, as a share of the tokens
    clip_fraction: float = 0.0
    entropy: float = 0.0  # nats per token
    grad_norm: float = 0.0


def step(
    model: Qwen3,
    optimiser: torch.optim.Optimizer,
    samples: Sequence[Sample],
    *,
    loss: Loss | None = None,
    budget: int = 4096,
    max_norm: float = 1.0,
) -> StepStats:
    """One update from `samples`. Trajectories without an advantage cost nothing: their gradient is zero."""
    loss = loss or Loss()
    speaking = [sample for sample in samples if sample.advantage != 0.0 and any(sample.mask)]
    total = sum(sum(sample.mask) for sample in speaking)
    if not total:
        return StepStats()
    stats = StepStats(tokens=total, trajectories=len(speaking))
    weight = weight_squared = 0.0
    optimiser.zero_grad(set_to_none=True)
    for indices in plan([len(sample.tokens) for sample in speaking], budget=budget):
        batch = [speaking[i] for i in indices]
        part = token_losses(model, batch, loss)
        (part.losses.sum() / total).backward()
        stats.loss += float(part.losses.detach().sum()) / total
        stats.mismatch_kl += float((part.ratio - 1 - part.ratio.log()).sum()) / total
        stats.clip_fraction += float(part.clipped.sum()) / total
        stats.entropy += float(part.entropy.sum()) / total
        weight += float(part.ratio.sum())
        weight_squared += float(part.ratio.square().sum())
    stats.ess = weight * weight / (total * weight_squared)
    stats.grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    optimiser.step()
    return stats


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Flat over the sampled tokens of a micro-batch; only `losses` bears gradient."""

    losses: Tensor
    ratio: Tensor  # trainer over engine
    clipped: Tensor
    entropy: Tensor


def token_losses(model: Qwen3, batch: Sequence[Sample], loss: Loss) -> TokenLosses:
    """The loss of every sampled token, after one forward pass over the padded micro-batch."""
    longest = max(len(sample.tokens) for sample in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    behaviour = torch.zeros(len(batch), longest)
    for row, sample in enumerate(batch):
        length = len(sample.tokens)
        tokens[row, :length] = torch.tensor(sample.tokens)
        mask[row, :length] = torch.tensor(sample.mask, dtype=torch.bool)
        behaviour[row, :length] = torch.tensor(sample.logprobs)
    sampled = mask[:, 1:]
    logits = model(tokens[:, :-1])[sampled]  # [sampled tokens, vocabulary]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    new = logprobs.gather(-1, tokens[:, 1:][sampled][:, None])[:, 0]
    old = behaviour[:, 1:][sampled]
    advantage = torch.tensor([sample.advantage for sample in batch])[:, None].expand_as(sampled)[sampled]
    losses, clipped = surrogate(new, old, advantage, loss)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        ratio = (new - old).exp()
    return TokenLosses(losses, ratio, clipped, entropy)


def surrogate(new: Tensor, old: Tensor, advantage: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Clipped loss per token and whether the clip bit. new, old, advantage: [tokens]."""
    weight = torch.ones_like(old)
    proximal = old
    if loss.tis is not None:
        proximal = new.detach()
        weight = (proximal - old).exp().clamp(max=loss.tis)
    ratio = (new - proximal).exp()
    free = ratio * advantage
    bound = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantage
    return -weight * torch.minimum(free, bound), (bound < free).detach()
