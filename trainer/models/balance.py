"""How evenly the experts of a mixture are used.

Guarantee: a number of each trajectory and its own tokens, whatever is packed with it and whichever ranks share it, so
that a mean over trajectories does not depend on packing either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from rollout.engine.embedded.routers import routers
from rollout.experts import need_routers
from trainer.batches.pack import PackedBatch
from trainer.models.collectives import summed

Scoring = Literal["softmax", "sigmoid"]  # of a router's logits
SCORING: dict[str, Scoring] = {"deepseek_v3": "sigmoid", "qwen3_moe": "softmax"}  # by `model_type`


class RouterRecord:
    """What a model's routers decided in a forward pass: ``with record.recording(): ...``, then ``record.of(...)``."""

    def __init__(self, model: nn.Module, kind: str):
        """Raises Invalid for a model whose routers are not known."""
        need_routers(kind, "objective.balance")
        self.scoring = SCORING[kind]
        self.layers: list[tuple[Tensor, Tensor]] = []  # logits [N, E], chosen experts [N, K]
        self._on = False
        for _, router in routers(model, kind):
            router.register_forward_hook(self._note)

    def _note(self, router: nn.Module, given: tuple[Tensor, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._on:  # else activations are computed again
            self.layers.append((result[0], result[2]))

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.layers, self._on = [], True
        try:
            yield
        finally:
            self._on = False

    def of(self, packed: PackedBatch, group: dist.ProcessGroup | None) -> Tensor:
        """[trajectories], 1 where experts are used evenly: E / (K T²) Σ_e n_e Σ_t p_te, the mean over layers.

        T tokens, n_e of which chose expert e (K each), with probabilities p that sum up to 1: arXiv 2412.19437,
        equations 17 to 20. `packed`: this rank's tokens, of which the others of `group` have the rest.
        """
        counts, shares, chosen = [], [], 0
        for logits, index in self.layers:
            scores = logits.float().sigmoid() if self.scoring == "sigmoid" else logits.float().softmax(-1)
            shares.append(_by_segment(scores / scores.sum(-1, keepdim=True), packed))
            counts.append(_by_segment(F.one_hot(index, logits.shape[1]).sum(1).float(), packed))
            chosen = index.shape[1]
        both = torch.stack([torch.stack(counts), torch.stack(shares)])  # [2, layers, segments + 2, E]
        self.layers = []
        if group is not None:
            both = summed(both, group)
        own, before = _segments(packed)
        hits, probability = both[:, :, own] + both[:, :, before]
        lengths = torch.tensor([*packed.lengths, 0, 0], device=both.device)
        tokens = lengths[own] + lengths[before]
        result: Tensor = (hits * probability).sum(-1).mean(0) * both.shape[-1] / (chosen * tokens.square())
        return result


def _by_segment(values: Tensor, packed: PackedBatch) -> Tensor:
    """Sums of [N, E] -> [segments + 2, E]: the last but one of what fills a share up, the last of nothing."""
    return values.new_zeros(len(packed.lengths) + 2, values.shape[1]).index_add(0, packed.segment, values)


def _segments(packed: PackedBatch) -> tuple[list[int], list[int]]:
    """Of each trajectory its own segment, and the one that it continues."""
    beginnings = set(packed.after)
    own = [number for number in range(len(packed.lengths)) if number not in beginnings]
    nothing = len(packed.lengths) + 1
    return own, [packed.after[number] if packed.after[number] >= 0 else nothing for number in own]
