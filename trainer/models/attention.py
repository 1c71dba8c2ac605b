"""Causal attention over packed trajectories, none of which sees another; a common beginning is there once.

Guarantee: exact isolation: the output at a trajectory's tokens is a function of its own tokens alone.

On a GPU in half precision it is one fused kernel over all segments. Elsewhere it goes segment by segment:
on a CPU that took a tenth of the time of one block-diagonal mask, and less than padding, for lengths from 100 up.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from sandbox.errors import Invalid
from trainer.batches.pack import AttentionRuns
from trainer.models.collectives import gathered

NAME = "pagurus_packed"
MAX_MASK = 1 << 24  # entries of one mask


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention of a micro-batch, of which the ranks of `group` have equal shares, if there are several."""

    runs: AttentionRuns
    group: dist.ProcessGroup | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """Of this rank's tokens."""
        if self.group is not None:
            k, v = gathered(k, self.group), gathered(v, self.group)
        return attend(q, k, v, self.runs, scale=scale, window=window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, runs: AttentionRuns, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """q [N, H, D], k and v [M, G, D] -> [N, H, D]. `window`: how many tokens back, itself included, a token sees."""
    grouped = q.shape[1] != k.shape[1]
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms and rotations may have left them in fp32
    half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    if half and (runs.plain or _continues(q.device, q.dtype)):
        from torch.nn.attention.varlen import varlen_attn

        left = -1 if window is None else window - 1
        if not runs.plain:
            k, v = k[runs.indices], v[runs.indices]
        bounds, read = runs.bounds
        longest, longest_read = max(runs.queries), max(runs.keys)
        result = varlen_attn(
            q, k, v, bounds, read, longest, longest_read, scale=scale, window_size=(left, 0), enable_gqa=grouped
        )
        assert isinstance(result, Tensor)
        return result
    results = []
    parts = [part.split(runs.parts) for part in (k, v)]
    for one, visible in zip(q.split(runs.queries), runs.visible, strict=True):
        keys, values = (
            torch.cat([part[at] for at in visible]) if len(visible) > 1 else part[visible[0]] for part in parts
        )
        length, prefix = len(one), len(keys) - len(one)
        if not prefix and (window is None or window >= length):
            results.append(_observed(one, keys, values, None, scale=scale, grouped=grouped))
            continue
        rows = max(1, MAX_MASK // len(keys))
        for start, block in enumerate(one.split(rows)):
            first, end = prefix + start * rows, prefix + start * rows + len(block)  # what its first and last tokens see
            mask = torch.ones(len(block), end, dtype=torch.bool, device=q.device).tril(first)
            mask = mask if window is None else mask.triu(first + 1 - window)
            results.append(_observed(block, keys[:end], values[:end], mask, scale=scale, grouped=grouped))
    return torch.cat(results)


def _observed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None, grouped: bool) -> Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    result = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return result[0].transpose(0, 1)


@functools.cache
def _continues(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernel takes fewer queries than keys for the last ones; else a shared beginning needs masks."""
    from torch.nn.attention.varlen import varlen_attn

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, 64, generator=generator).to(device, dtype) for n in (2, 5, 5))
    asking, read = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (2, 5))
    fused = varlen_attn(q, k, v, asking, read, 2, 5, window_size=(-1, 0))
    assert isinstance(fused, Tensor)
    mask = torch.ones(2, 5, dtype=torch.bool, device=device).tril(3)
    return torch.allclose(fused, _observed(q, k, v, mask, scale=None, grouped=False), atol=0.05)


def transformers_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The same, as transformers calls it: query [1, H, N, D], key and value [1, G, N, D] -> [1, N, H, D]."""
    packed: PackedAttention | None = options.get("packed")
    if packed is None:
        raise Invalid("its attention is not handed on what packing needs", hint="train it one trajectory at a time")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    result = packed(q, k, v, scale=options.get("scaling"), window=options.get("sliding_window"))
    return result[None], None


def register() -> None:
    """Makes the name known to transformers. A name without a mask function gets no mask, which is what we want."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, transformers_attention)
