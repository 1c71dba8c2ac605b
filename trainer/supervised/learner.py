"""Steps on text that was written before: imitation of answers, and preferences between two of them.

Guarantee: the loss of a batch, and its gradient, do not depend on how it is packed into micro-batches, nor on how many
ranks share them. All ranks are given the whole batch and have its figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer import optimisers
from trainer.batches.pack import EMPTY, pack
from trainer.batches.plan import plan
from trainer.batches.sample import Sample
from trainer.distributed.ranks import ALONE, Ranks
from trainer.distributed.shard import bound_norm
from trainer.errors import TrainerFailed
from trainer.learner import SAME_ROUNDING
from trainer.models.scorer import Scorer
from trainer.objectives.losses import imitation
from trainer.objectives.preference import preference_loss
from trainer.settings import OptimiserSettings
from trainer.supervised.config import PreferenceSettings
from trainer.supervised.data import PreferencePair


class SupervisedLearner:
    """``learner.step(samples)`` or ``learner.step(pairs)``. `reference`: what preferences are measured against."""

    def __init__(
        self,
        scorer: Scorer,
        settings: OptimiserSettings | None = None,
        *,
        reference: Scorer | None = None,
        preference: PreferenceSettings | None = None,
        ranks: Ranks = ALONE,
    ):
        self.ranks = ranks
        self.scorer, self.reference = scorer, reference
        self.settings = settings or OptimiserSettings()
        self.preference = preference or PreferenceSettings()
        self.optimisers = optimisers.make(scorer, self.settings)
        self.trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]

    def step(
        self, batch: Sequence[Sample] | Sequence[PreferencePair], *, rate: float | None = None
    ) -> dict[str, float]:
        """One update. Raises TrainerFailed, with the weights as they were, on a number that is not finite."""
        optimisers.set_rate(self.optimisers, self.settings.rate if rate is None else rate)
        for parameter in self.trained:
            parameter.grad = None
        metrics = self._run(batch, learn=True)
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        norm = float(bound_norm(gradients, self.settings.max_norm, self.ranks))
        if not torch.isfinite(torch.tensor([norm, metrics["loss"]])).all():
            raise TrainerFailed(
                f"the loss is {metrics['loss']}, the norm of its gradient {norm}; the weights are as they were",
                hint="lower optimiser.rate, or look at the rows of this batch",
            )
        for optimiser in self.optimisers:
            optimiser.step()
        return {**metrics, "grad_norm": norm}

    @torch.no_grad()
    def measure(self, batch: Sequence[Sample] | Sequence[PreferencePair]) -> dict[str, float]:
        """The figures of a step, without taking it."""
        return self._run(batch, learn=False)

    def _run(self, batch: Sequence[Any], *, learn: bool) -> dict[str, float]:
        if batch and isinstance(batch[0], PreferencePair):
            return self._prefer(batch, learn=learn)
        return self._imitate(batch, learn=learn)

    def _imitate(self, samples: Sequence[Sample], *, learn: bool) -> dict[str, float]:
        """ℓ = -Σ log π / T over the T learned tokens of the batch."""
        tokens = max(1, sum(sample.sampled for sample in samples))
        loss = right = 0.0
        for part in self._micro_batches([[sample] for sample in samples]):
            scores = self.scorer(pack(part or [EMPTY], device=self.ranks.device))
            here = imitation(scores.new, torch.full_like(scores.new, 1 / tokens)).sum()
            if learn:
                (here * self.ranks.averaged).backward()  # sharding takes the mean over ranks
            loss += float(here.detach())
            right += float(scores.entropy.detach().sum())
        loss, right = self.ranks.sum(torch.tensor([loss, right], dtype=torch.float64)).tolist()
        return {"loss": loss, "tokens": float(tokens), "entropy": right / tokens}

    def _prefer(self, pairs: Sequence[PreferencePair], *, learn: bool) -> dict[str, float]:
        settings = self.preference
        assert self.reference is not None, "preferences are measured against a reference"
        sums = dict.fromkeys(("loss", "margin", "accuracy", "chosen", "rejected"), 0.0)
        for part in self._micro_batches([[pair.chosen, pair.rejected] for pair in pairs]):
            packed = pack(part or [EMPTY, EMPTY], device=self.ranks.device)
            count = max(2, len(part))
            lengths = torch.bincount(packed.sequence, minlength=count)
            ours = _sums(self.scorer(packed).new, packed.sequence, count)
            with torch.no_grad():
                theirs = _sums(self.reference(packed).new, packed.sequence, count)
            item = preference_loss(
                ours[::2], ours[1::2], theirs[::2], theirs[1::2],
                beta=settings.beta, kind=settings.kind, smoothing=settings.smoothing,
                lengths=(lengths[::2], lengths[1::2]),
            )  # fmt: skip
            here = item.sum() / len(pairs) * bool(part)
            if learn:
                (here * self.ranks.averaged).backward()
            earned = settings.beta * (ours - theirs).detach()
            margins = earned[::2] - earned[1::2]
            if not part:
                continue
            for name, value in (
                ("loss", here.detach()),
                ("margin", margins.sum() / len(pairs)),
                ("accuracy", (margins > 0).double().sum() / len(pairs)),
                ("chosen", earned[::2].sum() / len(pairs)),
                ("rejected", earned[1::2].sum() / len(pairs)),
            ):
                sums[name] += float(value)
        return dict(
            zip(sums, self.ranks.sum(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist(), strict=True)
        )

    def _micro_batches(self, units: Sequence[list[Sample]]) -> Iterator[list[Sample]]:
        """Samples of this rank's micro-batches, possibly none; those of one unit stay together."""
        lengths = [sum(len(sample.tokens) for sample in unit) for unit in units]
        ranks, budget, width = self.ranks, self.settings.budget, self.scorer.width
        same = SAME_ROUNDING if self.scorer.bf16 else 1
        for shared in plan(lengths, budget=budget, ranks=ranks.batches, width=width, multiple=same):
            yield [sample for number in shared[ranks.batch] for sample in units[number]]


def _sums(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, sequence, values)
