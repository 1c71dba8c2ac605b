"""Which part of each tensor this rank holds, and how it reads that part alone from a model directory.

Guarantee: of a model that is made on the meta device and sharded before `fill`, no rank ever holds more than its shard.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollout.engine.embedded.model import ModelConfig, Qwen3
from rollout.weights.layout import Box
from sandbox.errors import Invalid
from trainer.distributed.shard import local

Bounds = list[tuple[int, int]]  # of each dimension: from, to


def bounds(tensor: Tensor) -> Bounds:
    """Of this rank's shard in the complete tensor.

    The last dimension of a mesh (tensor, expert) was cut first, then that of FSDP2 in what was left; both as
    `torch.chunk` cuts.
    """
    result = [(0, size) for size in tensor.shape]
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


def ghost(directory: Path) -> Qwen3:
    """The model of a directory of ours without its weights: no memory."""
    with torch.device("meta"):
        return Qwen3(ModelConfig.load(directory))


def fill(model: Qwen3, directory: Path, device: torch.device) -> None:
    """Reads this rank's shards of a model that `ghost` made. Every tensor must be there and nothing else may be."""
    model.to_empty(device=device)
    model.reset_positions()
    with safe_open(directory / "model.safetensors", "pt") as file, torch.no_grad():
        there = set(file.keys())
        parameters = dict(model.named_parameters())
        if model.config.tie_word_embeddings:
            there.discard("lm_head.weight")
        elif "lm_head.weight" not in there:
            there.add("lm_head.weight")
        if there != parameters.keys():
            different = sorted(there ^ parameters.keys())
            raise Invalid(f"{directory} has other weights than its config.json says: {different[0]}", hint="mend it")
        names = set(file.keys())
        for name, parameter in parameters.items():
            source = file.get_slice(name if name in names else "model.embed_tokens.weight")
            own = tuple(slice(first, last) for first, last in bounds(parameter))
            local(parameter).copy_(source[own])
