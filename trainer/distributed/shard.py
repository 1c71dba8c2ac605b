"""A model spread over ranks by FSDP2, and what is whole again for those who want it whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trainer.distributed.experts import cut_experts
from trainer.distributed.mesh import MeshLayout
from trainer.distributed.parallel import cut_matrices, share_tokens
from trainer.distributed.ranks import Ranks, make_meshes
from trainer.models.scorer import Scorer


def shard(scorer: Scorer, ranks: Ranks, *, offload: bool = False) -> Scorer:
    """Spreads the weights over the ranks, in place, layer by layer: first over those that share each matrix, then over
    those that share the copy. Alone it only moves them to the device, unless a group of one was made for `offload`
    (:func:`trainer.distributed.ranks.here`).

    Weights, gradients and the optimiser's state stay in fp32, and weights are gathered in fp32 too: with `scorer.bf16`
    each layer then rounds what it multiplies, as it does alone. Gathered in bf16, which is half of the traffic,
    embeddings and norms would be rounded as well: 4e-3 nat off. `offload` keeps shards and the optimiser's state in the
    host's memory.
    """
    if ranks.alone and not (offload and dist.is_initialized()):
        return scorer.to(ranks.device)
    layout = ranks.layout or MeshLayout(ranks=ranks.size)
    meshes = ranks.meshes or make_meshes(ranks.device, layout)
    retained = CPUOffloadPolicy() if offload and ranks.device.type == "cuda" else OffloadPolicy()
    if ranks.device.type == "cuda" and not offload:
        scorer._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(ranks.device))  # type: ignore[no-untyped-call]
    if layout.tensor > 1:
        cut_matrices(scorer, meshes.dense["tensor"])
    if layout.context > 1:
        share_tokens(scorer, meshes.batches["context"])
    experts = cut_experts(scorer, meshes) if layout.cuts else []
    for module in (*experts, *scorer.layers(), scorer):
        chosen = meshes.experts if module in experts else meshes.dense
        mesh = chosen["replicate", "shard"] if layout.replicate > 1 else chosen["shard"]
        uncut = partial(_uncut, mesh["shard"].size())
        fully_shard(module, mesh=mesh, offload_policy=retained, shard_placement_fn=uncut)
    return scorer


def _uncut(shards: int, parameter: nn.Parameter) -> Shard | None:
    """Another dimension than the one that a matrix is cut in already, where that is even."""
    if isinstance(parameter, DTensor) and parameter.placements[0] == Shard(0) and parameter.ndim > 1:
        return Shard(1) if parameter.shape[1] % shards == 0 else None
    return None


def norm_of(gradients: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Of all gradients as one vector, in fp32, the same on each rank. A shard that several ranks hold counts once.

    A bias that is cut twice is of a placement that does not say that it is a shard.
    """
    total = torch.zeros((), device=ranks.device)
    for gradient in gradients:
        holders = ranks.size
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            holders //= math.prod(size for size, placement in sizes if not placement.is_replicate())
        total += torch.linalg.vector_norm(local(gradient), dtype=torch.float32).square().to(ranks.device) / holders
    dist.all_reduce(total)
    return total.sqrt()


def bound_norm(gradients: Sequence[Tensor], largest: float, ranks: Ranks) -> Tensor:
    """Has their norm, which is returned, be `largest` at most, in place."""
    shards = [local(gradient) for gradient in gradients]
    norm = nn.utils.get_total_norm(shards) if ranks.alone else norm_of(gradients, ranks)
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(shards, factor.to(shards[0].device))
    return norm


def local(values: Tensor) -> Tensor:
    """This rank's shard of a tensor that is spread over ranks."""
    return values.to_local() if isinstance(values, DTensor) else values


def complete(scorer: Scorer, ranks: Ranks) -> dict[str, Tensor]:
    """All weights of the model, complete, in the host's memory, on rank 0; elsewhere nothing. All ranks take part."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(scorer, options=options)
    if ranks.rank != 0:
        return {}
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    return {name.removeprefix("model."): tensor for name, tensor in own.items() if name.startswith("model.")}
