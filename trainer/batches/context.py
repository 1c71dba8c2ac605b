"""One rank's tokens of a packed micro-batch, where several share it: pure, but for tensors.

Guarantee: every token is in exactly one share, all shares have the same number of tokens, and each token sees what it
sees in the complete micro-batch.

::

    two ranks, chunks of the micro-batch:    0 │ 1 │ 2 │ 3        as much attention for both: a late token sees more
    rank 0 has 0 and 3, rank 1 has 1 and 2;  keys of all of them, as they are gathered: 0 3 1 2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.batches.pack import AttentionRuns, PackedBatch


def share(packed: PackedBatch, part: int, parts: int) -> tuple[PackedBatch, Tensor]:
    """The share `part` of `parts`, and [t] which of the T sampled tokens it has.

    Its tokens are followed in the last chunk by what fills it up: a segment of its own, up to 2 * parts - 1 tokens.
    """
    unit = -(-len(packed.tokens) // (2 * parts))
    filling = 2 * parts * unit - len(packed.tokens)
    lengths = [*packed.lengths, *([filling] if filling else [])]
    after = [*packed.after, *([-1] if filling else [])]
    chunks = part, 2 * parts - 1 - part
    own = torch.cat([torch.arange(unit * chunk, unit * (chunk + 1)) for chunk in chunks]).to(packed.tokens.device)
    local = torch.full((2 * parts * unit,), -1, device=own.device)
    local[own] = torch.arange(len(own), device=own.device)
    rows = local[packed.predicting]
    mine = (rows >= 0).nonzero()[:, 0]
    result = replace(
        packed,
        tokens=F.pad(packed.tokens, (0, filling))[own],
        positions=F.pad(packed.positions, (0, filling))[own],
        segment=F.pad(packed.segment, (0, filling), value=len(packed.lengths))[own],
        predicting=rows[mine],
        targets=packed.targets[mine],
        engine=packed.engine[mine],
        temperature=packed.temperature[mine],
        sequence=packed.sequence[mine],
        experts=None if packed.experts is None else F.pad(packed.experts, (0, 0, 0, 0, 0, filling), value=-1)[own],
        runs=_runs(lengths, after, unit, chunks, parts, own.device),
    )
    return result, mine


def _runs(
    lengths: list[int], after: list[int], unit: int, chunks: tuple[int, int], parts: int, device: torch.device
) -> AttentionRuns:
    """What the tokens of these chunks see, in keys as they are gathered from all ranks."""
    starts = [0, *accumulate(lengths)]
    bounds = sorted({*starts, *range(0, 2 * parts * unit + 1, unit)})
    cut = list(pairwise(bounds))
    order = [chunk for rank in range(parts) for chunk in (rank, 2 * parts - 1 - rank)]
    gathered = sorted(cut, key=lambda piece: (order.index(piece[0] // unit), piece[0]))
    number = {start: at for at, (start, _) in enumerate(gathered)}

    def within(start: int, end: int) -> Iterator[int]:
        return (number[piece[0]] for piece in cut if start <= piece[0] < end)

    queries, visible = [], []
    for chunk in chunks:
        for segment, (start, end) in enumerate(pairwise(starts)):
            first, last = max(start, chunk * unit), min(end, (chunk + 1) * unit)
            if first >= last:
                continue
            before = after[segment]
            prefix = within(starts[before], starts[before + 1]) if before >= 0 else ()
            queries.append(last - first)
            visible.append([*prefix, *within(start, last)])
    return AttentionRuns(queries, [end - start for start, end in gathered], visible, device)
