"""Packed tensors: trajectories one after another, without padding.

Guarantee: position numbers begin at 0 in each trajectory and `lengths` says where each ends; that is all that attention
needs to keep them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trainer.batches.sample import Sample


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """N tokens of S trajectories, T of them sampled. Example: lengths [3, 2], positions [0, 1, 2, 0, 1]."""

    tokens: Tensor  # [N]
    positions: Tensor  # [N]
    lengths: list[int]  # [S]
    bounds: Tensor  # [S + 1] int32: 0, then where each trajectory ends
    predicting: Tensor  # [T] index in N of the token before each sampled one: where its logits are
    targets: Tensor  # [T]
    engine: Tensor  # [T] log μ
    temperature: Tensor  # [T]
    sequence: Tensor  # [T] number of the trajectory, counted from 0

    @property
    def longest(self) -> int:
        return max(self.lengths)


def pack(samples: Sequence[Sample], *, device: torch.device | str = "cpu") -> PackedBatch:
    """Example: ``pack([Sample(tokens=[5, 6, 9], mask=[0, 0, 1], logprobs=[0, 0, -0.3])]).predicting == [1]``."""
    lengths = [len(sample.tokens) for sample in samples]
    starts = [0, *accumulate(lengths)]
    sampled = [[t for t, bit in enumerate(sample.mask) if bit] for sample in samples]
    rows = list(zip(samples, sampled, strict=True))

    def long(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def real(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return PackedBatch(
        tokens=long([token for sample in samples for token in sample.tokens]),
        positions=long([position for length in lengths for position in range(length)]),
        lengths=lengths,
        bounds=torch.tensor(starts, dtype=torch.int32, device=device),
        predicting=long([start + t - 1 for start, at in zip(starts[:-1], sampled, strict=True) for t in at]),
        targets=long([sample.tokens[t] for sample, at in rows for t in at]),
        engine=real([sample.logprobs[t] for sample, at in rows for t in at]),
        temperature=real([sample.temperature or 1.0 for sample, at in rows for _ in at]),
        sequence=long([number for number, at in enumerate(sampled) for _ in at]),
    )


EMPTY = Sample(tokens=[0, 0], mask=[0, 0], logprobs=[0.0, 0.0])  # keeps a rank without work in step with the others
