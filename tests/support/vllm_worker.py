"""Tensor-parallel workers with a model of fused and split layers, as vLLM's: told on the command line what to do.

    python vllm_worker.py RANKS FOLDER FILE...      each rank begins with FOLDER/0.pt, applies each file; prints JSON

A last one, rank 0 again, skips the first file.

Runs with vLLM's own classes, or with those of `fake_vllm`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

ranks, directory, *files = sys.argv[1:]
RANKS = int(ranks)


class Model(nn.Module):
    """gate and up are one parameter; both and down are split; the embedding's rows are padded before they are split."""

    def __init__(self, weights: dict[str, torch.Tensor], rank: int):
        super().__init__()
        self.rank = rank
        width, inner = weights["mlp.gate_proj.weight"].shape[1], weights["mlp.gate_proj.weight"].shape[0]
        self.inner = inner // RANKS
        rows = -(-weights["embed_tokens.weight"].shape[0] // 64) * 64 // RANKS
        self.gate_up = nn.Parameter(torch.zeros(2 * self.inner, width, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.zeros(width, self.inner, dtype=torch.bfloat16))
        self.embedding = nn.Parameter(torch.zeros(rows, width, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(width, dtype=torch.bfloat16))
        self.load_weights(list(weights.items()))

    def mine(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.chunk(RANKS, axis)[self.rank]

    @torch.no_grad()
    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if "gate_proj" in name:
                self.gate_up[: self.inner].copy_(self.mine(tensor, 0))
            elif "up_proj" in name:
                self.gate_up[self.inner :].copy_(self.mine(tensor, 0))
            elif "down_proj" in name:
                self.down.copy_(self.mine(tensor, 1))
            elif "embed_tokens" in name:
                rows = len(self.embedding)
                part = tensor[self.rank * rows : (self.rank + 1) * rows]
                self.embedding[: len(part)].copy_(part)
            else:
                self.norm.copy_(tensor)
        return {name for name, _ in weights}

    def digests(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(item.detach().contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
            for name, item in self.named_parameters()
        }


import pagurus_vllm  # noqa: E402
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: E402


def work(rank: int, files: list[str]) -> dict:  # type: ignore[type-arg]
    """What a worker said to each file, what it has then, and what a full load of each version would give it."""
    model = Model(torch.load(Path(directory) / "0.pt"), rank)
    parallel = SimpleNamespace(tensor_parallel_size=RANKS, rank=rank)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    engine = WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend=pagurus_vllm.BACKEND), config, torch.device("cpu"), model
    )
    engine.init_transfer_engine(engine.parse_init_info({"version": 0}))
    said = []
    for file in files:
        before = model.digests()
        engine.start_weight_update()
        try:
            engine.update_weights({"file": file})
            engine.finish_weight_update()
            said.append({"version": engine.version})
        except ValueError as error:
            said.append({"refused": str(error), "untouched": model.digests() == before})
    expected = {path.stem: Model(torch.load(path), rank).digests() for path in Path(directory).glob("*.pt")}
    return {"said": said, "digests": model.digests(), "expected": expected}


print(json.dumps([*(work(rank, files) for rank in range(RANKS)), work(0, files[1:])]))
