"""Figures that every step logs, as sums, so that those of micro-batches and ranks add up.

Pure. Guarantee: each figure is over the sampled tokens for which a forward pass was made; trajectories that could bear
no gradient are counted, not computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from trainer.objectives.losses import SampledTokens, divergence

SUMS: tuple[str, ...] = (
    "loss",
    "tokens",
    "mismatch_kl",
    "k",
    "k_squared",
    "k_low",
    "k_high",
    "clipped_low",
    "clipped_high",
)
SUMS += ("masked", "entropy", "reference_kl", "value_error", "balance", "slope")
OUTSIDE = 2.0  # a token whose k is beyond this factor, up or down, is counted


@dataclass(slots=True)
class Metrics:
    """Sums over tokens. `add` a micro-batch, `+` another, read `result()`."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(len(SUMS), dtype=torch.float64))
    largest: float = 0.0  # |d loss / d log π| of one token

    @torch.no_grad()
    def add(self, tokens: SampledTokens, loss: Tensor, bit: Tensor, weight: Tensor) -> None:
        """loss: ℓ with its share taken; bit: where the clip bit; weight: product of the corrections; all [T]."""
        mismatch = (tokens.before - tokens.engine).double()
        k = mismatch.exp()
        values = {
            "loss": loss.double(),
            "tokens": torch.ones_like(k),
            "mismatch_kl": divergence("k3", tokens.engine.double(), tokens.before.double()),
            "k": k,
            "k_squared": k.square(),
            "k_low": (k < 1 / OUTSIDE).double(),
            "k_high": (k > OUTSIDE).double(),
            "clipped_low": (bit < 0).double(),
            "clipped_high": (bit > 0).double(),
            "masked": (weight == 0).double(),
            "entropy": tokens.entropy.double(),
        }
        if tokens.reference is not None:
            values["reference_kl"] = divergence("k3", tokens.new.double(), tokens.reference.double())
        if tokens.value is not None and tokens.returns is not None:
            values["value_error"] = (tokens.value - tokens.returns).double().square()
        if tokens.balance is not None:
            values["balance"] = tokens.balance.double()
        nothing = k.new_zeros(())
        self.sums += torch.stack([values[name].sum() if name in values else nothing for name in SUMS]).cpu()

    @torch.no_grad()
    def note_slope(self, slope: Tensor) -> None:
        """slope: d loss / d log π [T]."""
        size = slope.detach().abs().double()
        self.sums[SUMS.index("slope")] += size.sum().cpu()
        self.largest = max(self.largest, float(size.max()) if len(size) else 0.0)

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics(self.sums + other.sums, max(self.largest, other.largest))

    def result(self) -> Summary:
        """Means over tokens, and the effective sample size (Σk)² / (T Σk²), Kish 1965, as a share of the tokens."""
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        tokens = max(1.0, total["tokens"])
        return Summary(
            loss=total["loss"],
            tokens=int(total["tokens"]),
            mismatch_kl=total["mismatch_kl"] / tokens,
            ess=total["k"] ** 2 / (tokens * total["k_squared"]) if total["k_squared"] else 1.0,
            mismatch_low=total["k_low"] / tokens,
            mismatch_high=total["k_high"] / tokens,
            clipped_low=total["clipped_low"] / tokens,
            clipped_high=total["clipped_high"] / tokens,
            masked=total["masked"] / tokens,
            entropy=total["entropy"] / tokens,
            reference_kl=total["reference_kl"] / tokens,
            value_error=total["value_error"] / tokens,
            balance=total["balance"] / tokens,
            largest_share=self.largest / total["slope"] if total["slope"] else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `Metrics` say about a step. All but loss and tokens are means over the tokens that were computed."""

    loss: float = 0.0
    tokens: int = 0
    mismatch_kl: float = 0.0  # KL(μ ‖ π_prox), by k3: what the engine's numbers differ from the trainer's
    ess: float = 1.0  # effective sample size of k, as a share of the tokens
    mismatch_low: float = 0.0  # share of tokens with k < 1/2
    mismatch_high: float = 0.0  # share of tokens with k > 2
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    masked: float = 0.0  # by a correction
    entropy: float = 0.0  # nats
    reference_kl: float = 0.0
    value_error: float = 0.0
    balance: float = 0.0  # of experts; 1: used evenly
    largest_share: float = 0.0  # of the sum of |d loss / d log π|, what the largest token alone has

    def items(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def by_outcome(rewards: list[float], lengths: list[int], truncated: list[bool]) -> dict[str, float]:
    """Mean length of trajectories by how they ended: better than their batch's mean, not better, cut.

    Example: ``by_outcome([1, 0], [10, 30], [False, True]) == {"better": 10, "worse": 30, "cut": 30}``
    """
    if not rewards:
        return {}
    mean = sum(rewards) / len(rewards)
    kinds: dict[str, list[int]] = {}
    for reward, length, cut in zip(rewards, lengths, truncated, strict=True):
        kinds.setdefault("better" if reward > mean else "worse", []).append(length)
        if cut:
            kinds.setdefault("cut", []).append(length)
    return {kind: sum(result) / len(result) for kind, result in kinds.items()}
