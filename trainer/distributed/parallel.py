"""A model's matrices, cut over the ranks that share them, by DTensor and the plan of its family.

Guarantee: log-probabilities and gradients are those of the whole model, up to the order of sums; outside of the
matrices every rank of the group computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rollout.engine.embedded.model import Qwen3
from sandbox.errors import Invalid
from trainer.distributed.plans import Cut, cuts, plan_of
from trainer.models.collectives import used_in_parts
from trainer.models.scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cut_matrices(scorer: Scorer, mesh: DeviceMesh) -> None:
    """In place, over the ranks of `mesh`, which has one dimension. All of them call it. Raises Invalid where no plan
    fits."""
    if not scorer.packs:
        raise Invalid(
            f"{type(scorer.model).__name__} runs one trajectory at a time, by a head that is not cut",
            hint="leave out mesh.tensor",
        )
    model: PreTrainedModel | Qwen3 = scorer.model  # type: ignore[assignment]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    names = [name for name, _ in model.named_parameters()]  # what is tied has one name here
    styles = {}
    for name, cut in cuts(plan_of(scorer.kind), names).items():
        module = model.get_submodule(name)
        if (style := _style(cut, module)) is not None:
            styles[name] = style
        if cut == "latent":
            width = model.get_parameter(f"{name.rpartition('.')[0]}.kv_a_layernorm.weight").numel()
            module.register_forward_hook(_latent_hook(mesh.get_group(), width))
    parallelize_module(model, mesh, styles)
    if not isinstance(model, Qwen3) and "lm_head.weight" not in names:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    scorer.sharers = mesh.get_group()


def share_tokens(scorer: Scorer, mesh: DeviceMesh) -> None:
    """Has the ranks of `mesh`, which has one dimension, each compute a part of every micro-batch. Raises Invalid for a
    model whose tokens see others by other ways than our attention."""
    if not scorer.packs:
        raise Invalid(
            f"{type(scorer.model).__name__} runs one trajectory at a time, whose tokens are not shared",
            hint="leave out mesh.context",
        )
    scorer.context = mesh.get_group()


def _latent_hook(group: dist.ProcessGroup, width: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """After the latent of `width` numbers follows the rotary key of all heads, which each rank uses for its own."""
    return lambda module, given, latent: used_in_parts(latent, group, width)


def _style(cut: Cut, module: nn.Module) -> ParallelStyle | None:
    if cut == "columns":
        return ColwiseParallel()
    if cut == "rows":
        return RowwiseParallel()
    if cut == "vocabulary" and isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if cut == "vocabulary":
        return ColwiseParallel()
    if cut == "heads":
        return SequenceParallel(sequence_dim=-2, use_local_output=True)  # [..., heads, width of a head]
    return None
