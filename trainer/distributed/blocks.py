"""Which part of each tensor this rank holds, and a model of which each rank reads that part alone.

Guarantee: no rank ever holds more of a model than its shard, and what it reads of it at a time.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollout.weights.layout import Box
from sandbox.errors import Invalid
from trainer.distributed.ranks import Ranks
from trainer.distributed.shard import local, shard
from trainer.models.empty import EmptyModel
from trainer.models.load import Lora, load
from trainer.models.scorer import Scorer
from trainer.models.weight_files import Bounds


def bounds(tensor: Tensor) -> Bounds:
    """Of this rank's shard in the complete tensor.

    The last dimension of a mesh (tensor, expert) was cut first, then that of FSDP2 in what was left; both as
    `torch.chunk` cuts.
    """
    result: list[tuple[int, int]] = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return result
    mesh = tensor.device_mesh
    for number in reversed(range(mesh.ndim)):
        axis = getattr(tensor.placements[number], "dim", None)
        if axis is None:  # replicated
            continue
        first, last = result[axis]
        item = -(-(last - first) // mesh.size(number))
        top = min(first + mesh.get_local_rank(number) * item, last)
        result[axis] = top, min(top + item, last)
    if tuple(last - first for first, last in result) != tuple(local(tensor).shape):
        raise Invalid(f"a tensor is placed as {tensor.placements}", hint="cut it in one dimension after the other")
    return result


def box(tensor: Tensor, words: int) -> Box:
    """This rank's shard as a rectangle of the layout's table; `words` of an element."""
    own = bounds(tensor)
    if any(part != (0, size) for part, size in zip(own[2:], tensor.shape[2:], strict=True)):
        raise Invalid("a tensor is cut in its third dimension", hint="cut it in its first two")
    columns = own[1] if len(own) > 1 else (0, 1)
    width = math.prod(tensor.shape[2:]) * words
    top, bottom = own[0] if own else (0, 1)
    return top, bottom, columns[0] * width, columns[1] * width


def own_part(tensor: Tensor) -> tuple[Tensor, Bounds]:
    """The memory of this rank's shard, and its place in the complete tensor."""
    return local(tensor.detach()), bounds(tensor)


def load_scorer(
    directory: Path,
    ranks: Ranks,
    *,
    lora: Lora | None = None,
    packs: bool = True,
    trained: bool = True,
    offload: bool = False,
    **options: bool,
) -> Scorer:
    """The model of a directory, spread over `ranks`, of which each reads its own shards alone. All ranks call it.

    `options`: of the `Scorer`. Raises Invalid, NotFound.
    """
    empty = None if ranks.alone else EmptyModel(directory, lora=lora, packs=packs)
    model = load(directory, lora=lora, packs=packs) if empty is None else empty.model
    scorer = Scorer(model, packs=packs, **options)
    if not trained:
        scorer.requires_grad_(False)
    shard(scorer, ranks, offload=offload)
    if empty is not None:
        empty.fill(scorer, torch.device("cpu") if offload else ranks.device, own_part)
    return scorer
