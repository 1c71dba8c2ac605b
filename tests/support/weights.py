"""A model of a few tensors that moves like one under training, and what a mirror must hold of it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FILES = {"config.json": b'{"tie_word_embeddings": true}', "tokenizer.json": b"{}"}
SHAPES = {
    "model.embed_tokens.weight": (120, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
    "model.norm.weight": (32,),
}


class Walk:
    """``walk = Walk(3); walk.step()``: weights in fp32, of which a share moves far enough to change in bf16."""

    def __init__(self, seed: int = 0, scale: int = 1):
        self._random = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: torch.randn((shape[0] * scale, *shape[1:]), generator=self._random) * 0.02
            for name, shape in SHAPES.items()
        }

    def step(self, size: float = 1e-5) -> dict[str, Tensor]:
        for tensor in self.tensors.values():
            tensor += torch.randn(tensor.shape, generator=self._random) * size
        return self.tensors


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def same(directory: Path, tensors: dict[str, Tensor], *, part: int = 0, parts: int = 1) -> bool:
    """Whether the mirror holds exactly these weights (or its part of them), and nothing else."""
    got = load_file(directory / "model.safetensors")
    for name, complete in published(tensors).items():
        axis = 0 if name.split(".")[-2] in ("embed_tokens", "q_proj") else 1 if "_proj" in name else None
        target = complete if axis is None or parts == 1 else complete.chunk(parts, axis)[part]
        if name not in got or not torch.equal(got.pop(name).view(torch.int16), target.contiguous().view(torch.int16)):
            return False
    return not got
