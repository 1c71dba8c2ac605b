"""Experts of a layer, spread over ranks: tokens travel to the ranks that have theirs, and results back.

Guarantee: what an expert computes, and its gradient, are those of one rank with all experts, up to the order of sums.

::

    tokens [N] ─▶ own share of them ─▶ by expert ─▶ to the ranks that have these ─▶ [grouped products of matrices]
           ▲      (ranks that share matrices have the same tokens)                          │
           └── all shares ◀── weighted sum of a token's experts ◀── back ◀──────────────────┘
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from sandbox.errors import Invalid
from trainer.distributed.plans import cuts, plan_of
from trainer.distributed.ranks import RankMeshes
from trainer.models.collectives import all_shares, exchanged, own_share
from trainer.models.scorer import Scorer


class ExpertModule(Protocol):
    """What transformers calls the experts of a layer."""

    gate_up_proj: nn.Parameter  # [E, 2 inner, width], the halves behind each other
    down_proj: nn.Parameter  # [E, width, inner]
    act_fn: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]


def cut_experts(scorer: Scorer, meshes: RankMeshes) -> list[nn.Module]:
    """Gives this rank its experts of every layer, in place: the modules. All ranks call it."""
    model = scorer.model
    names = [name for name, _ in model.named_parameters()]
    modules = [model.get_submodule(name) for name, cut in cuts(plan_of(scorer.kind), names).items() if cut == "experts"]
    for module in modules:
        _need_standard(module)
        for name, parameter in list(module.named_parameters()):
            own = nn.Parameter(distribute_tensor(parameter.detach(), meshes.experts["expert"], [Shard(0)]))
            own.requires_grad_(parameter.requires_grad)
            module.register_parameter(name, own)
        owners, sharers = meshes.experts["expert"], meshes.dense["tensor"]
        experts = cast("ExpertModule", module)
        experts.forward = ExpertExchange(experts, owners.get_group(), sharers.get_group())
    return modules


def _need_standard(module: nn.Module) -> None:
    options = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    different = [name for name, value in options.items() if getattr(module, name, value) != value]
    if different or {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
        raise Invalid(
            f"{type(module).__name__} keeps its experts in another way ({', '.join(different) or 'names'})",
            hint="leave out mesh.expert and mesh.tensor",
        )


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """The forward pass of a layer's experts. Every rank takes part, even without tokens for its experts."""

    module: ExpertModule
    owners: dist.ProcessGroup  # ranks that have the other experts
    sharers: dist.ProcessGroup  # ranks that have the same tokens

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [N, width], index and weights [N, K]: of each token's experts -> [N, width]"""
        count = len(hidden)
        if self.sharers.size() > 1:
            hidden, index, weights = (own_share(part, self.sharers) for part in (hidden, index, weights))
        by_token = index.flatten()
        order = by_token.argsort(stable=True)
        tokens = order // index.shape[1]
        experts = self.module.gate_up_proj.shape[0]
        result = self._computed(hidden[tokens], torch.bincount(by_token, minlength=experts))
        weighted = result * weights.flatten()[order, None].to(result.dtype)
        summed = torch.zeros_like(hidden, dtype=result.dtype).index_add(0, tokens, weighted).to(hidden.dtype)
        return all_shares(summed, self.sharers, count) if self.sharers.size() > 1 else summed

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [M, width], ordered by expert, counts [E]: how many for each -> [M, width]"""
        ranks = self.owners.size()
        if ranks == 1:
            return self._products(rows, counts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.owners)  # [ranks, own experts]: of each rank's tokens
        sent, received = (part.view(ranks, -1).sum(1).tolist() for part in (counts, theirs))
        arrived = exchanged(rows, self.owners, sent, received)
        own = len(counts) // ranks
        of_row = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(theirs)
        order = of_row.argsort(stable=True)
        computed = self._products(arrived[order], theirs.view(ranks, -1).sum(0))
        return exchanged(computed[order.argsort()], self.owners, received, sent)

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """With this rank's experts."""
        gate, up = grouped(rows, self._own(self.module.gate_up_proj), counts).chunk(2, dim=-1)
        return grouped(self.module.act_fn(gate) * up, self._own(self.module.down_proj), counts)

    def _own(self, parameter: Tensor) -> Tensor:
        """This rank's experts. Sharding takes the mean of gradients over the ranks that have the same ones; all others
        have the mean over ranks with tokens of their own."""
        assert isinstance(parameter, DTensor)
        own: Tensor = parameter.to_local()
        if own.requires_grad:
            own.register_hook(lambda gradient: gradient * (self.sharers.size() / self.owners.size()))
        return own


def grouped(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """rows [M, in], of which `counts` [E] belong to each of the matrices [E, out, in], in order -> [M, out]"""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        rows, matrices = (part.to(torch.get_autocast_dtype(kind)) for part in (rows, matrices))
    if not _has_grouped(rows.device):
        parts = rows.split(counts.tolist())
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])
    return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))


@functools.cache
def _has_grouped(device: torch.device) -> bool:
    """From torch 2.10 on, on GPUs from Ampere on."""
    return hasattr(F, "grouped_mm") and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0))
