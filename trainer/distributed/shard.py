"""A model spread over ranks by FSDP2, and what is whole again for those who want it whole."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from trainer.distributed.ranks import Ranks
from trainer.models.scorer import Scorer


def shard(scorer: Scorer, ranks: Ranks, *, offload: bool = False) -> Scorer:
    """Spreads the weights over the ranks, in place, layer by layer. Alone it only moves them to the device, unless a
    group of one was made for `offload` (:func:`trainer.distributed.ranks.here`).

    Weights, gradients and the optimiser's state stay in fp32, and weights are gathered in fp32 too: with `scorer.bf16`
    each layer then rounds what it multiplies, as it does alone. Gathered in bf16, which is half of the traffic,
    embeddings and norms would be rounded as well: 4e-3 nat off. `offload` keeps shards and the optimiser's state in the
    host's memory.
    """
    if ranks.alone and not (offload and dist.is_initialized()):
        return scorer.to(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    retained = CPUOffloadPolicy() if offload and ranks.device.type == "cuda" else OffloadPolicy()
    if ranks.device.type == "cuda" and not offload:
        scorer.to(ranks.device)
    for module in (*scorer.layers(), scorer):
        fully_shard(module, mesh=mesh, offload_policy=retained)
    return scorer


def complete(scorer: Scorer, ranks: Ranks) -> dict[str, Tensor]:
    """All weights of the model, complete, in the host's memory, on rank 0; elsewhere nothing. All ranks take part."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(scorer, options=options)
    if ranks.rank != 0:
        return {}
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    return {name.removeprefix("model."): tensor for name, tensor in own.items() if name.startswith("model.")}
