"""Packed tensors: trajectories one after another, without padding, a common beginning once.

Guarantee: positions count from the beginning of each trajectory, `lengths` says where each segment ends and `after`
which one it continues; that is all that attention needs to keep trajectories apart.

::

    families (2, 3), (1, 0):   p p p │ a a │ b │ c c c c      trajectories p p p a a, p p p b, c c c c
    lengths, after:            3  -1   2  0  1  0   4  -1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, islice

import torch
from torch import Tensor

from trainer.batches.sample import Sample


@dataclass(frozen=True)
class AttentionRuns:
    """Which keys queries see. The last key that a run of queries sees is that of its last query, and so on backwards.

    Example: queries 3, 2, parts 3, 2, visible (0), (0, 1): the second run continues the first one.
    """

    queries: list[int]  # [R] tokens of each run, which follow each other
    parts: list[int]  # [P] tokens of each part, into which keys are cut
    visible: list[list[int]]  # [R] of each run, the parts that it sees, in order
    device: torch.device  # of the tensors below

    @property
    def plain(self) -> bool:
        """Whether each run sees its own tokens alone."""
        return self.queries == self.parts and all(len(parts) == 1 for parts in self.visible)

    @cached_property
    def keys(self) -> list[int]:
        """[R] tokens that each run sees."""
        return [sum(self.parts[part] for part in parts) for parts in self.visible]

    @cached_property
    def indices(self) -> Tensor:
        """Of all runs, behind each other, the keys that they see."""
        starts = [0, *accumulate(self.parts)]
        indices = [torch.arange(starts[part], starts[part + 1]) for parts in self.visible for part in parts]
        return torch.cat(indices).to(self.device)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, each [R + 1] int32: 0, then where each run ends."""
        ends = ([0, *accumulate(lengths)] for lengths in (self.queries, self.keys))
        queries, keys = (torch.tensor(item, dtype=torch.int32, device=self.device) for item in ends)
        return queries, keys


@dataclass(frozen=True)
class PackedBatch:
    """N tokens in G segments, T of them sampled. Example: lengths [3, 2], positions [0, 1, 2, 0, 1].

    Without common beginnings each segment is a trajectory.
    """

    tokens: Tensor  # [N]
    positions: Tensor  # [N]
    lengths: list[int]  # [G]
    after: list[int]  # [G] number of the segment that it continues; -1: none
    segment: Tensor  # [N] number of each token's segment
    runs: AttentionRuns  # of these tokens
    predicting: Tensor  # [T] index in N of the token before each sampled one: where its logits are
    targets: Tensor  # [T]
    engine: Tensor  # [T] log μ
    temperature: Tensor  # [T]
    sequence: Tensor  # [T] number of the trajectory, counted from 0
    experts: Tensor | None = None  # [N, layers, K] int16, those that the engine chose, -1: not reported


def pack(
    samples: Sequence[Sample],
    families: Sequence[tuple[int, int]] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Example: ``pack([Sample(tokens=[5, 6, 9], mask=[0, 0, 1], logprobs=[0, 0, -0.3])]).predicting == [1]``.

    `families`: (how many, tokens that they begin with alike), of neighbours in `samples`; None: each is alone.
    """
    layout = _Layout()
    members = iter(samples)
    for count, prefix in families if families is not None else [(1, 0)] * len(samples):
        layout.add(list(islice(members, count)), prefix)
    sampled = [[t for t, bit in enumerate(sample.mask) if bit] for sample in samples]
    rows = list(zip(samples, sampled, strict=True))

    def long(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def real(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return PackedBatch(
        tokens=long(layout.tokens),
        positions=long(layout.positions),
        lengths=layout.lengths,
        after=layout.after,
        segment=long([number for number, length in enumerate(layout.lengths) for _ in range(length)]),
        runs=AttentionRuns(
            layout.lengths,
            layout.lengths,
            [[number] if before < 0 else [before, number] for number, before in enumerate(layout.after)],
            torch.device(device),
        ),
        predicting=long([place(t - 1) for place, at in zip(layout.places, sampled, strict=True) for t in at]),
        targets=long([sample.tokens[t] for sample, at in rows for t in at]),
        engine=real([sample.logprobs[t] for sample, at in rows for t in at]),
        temperature=real([sample.temperature or 1.0 for sample, at in rows for _ in at]),
        sequence=long([number for number, at in enumerate(sampled) for _ in at]),
        experts=_experts(samples, layout, device),
    )


def _experts(samples: Sequence[Sample], layout: _Layout, device: torch.device | str) -> Tensor | None:
    """[N, layers, K] of all samples; of a common beginning those of its first member."""
    reported = [part for sample in samples for part in sample.experts]
    if not reported:
        return None
    result = torch.full((len(layout.tokens), reported[0].layers, reported[0].top_k), -1, dtype=torch.int16)
    for sample, place in reversed(list(zip(samples, layout.places, strict=True))):
        for part in sample.experts:
            rows = torch.tensor([place(token) for token in range(part.start, part.end)])
            result[rows] = torch.from_numpy(part.choices.astype("int16"))
    return result.to(device)


class _Layout:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.lengths: list[int] = []
        self.after: list[int] = []
        self.places: list[Callable[[int], int]] = []  # of each trajectory: from a token of it to its index

    def add(self, members: list[Sample], prefix: int) -> None:
        before, beginning = -1, len(self.tokens)
        if prefix:
            before = len(self.lengths)
            self._segment(members[0].tokens[:prefix], 0, -1)
        for member in members:
            self.places.append(partial(_place, prefix, beginning, len(self.tokens) - prefix))
            self._segment(member.tokens[prefix:], prefix, before)

    def _segment(self, tokens: list[int], position: int, before: int) -> None:
        self.tokens += tokens
        self.positions += range(position, position + len(tokens))
        self.lengths.append(len(tokens))
        self.after.append(before)


def _place(prefix: int, beginning: int, start: int, token: int) -> int:
    return (beginning if token < prefix else start) + token


EMPTY = Sample(tokens=[0, 0], mask=[0, 0], logprobs=[0.0, 0.0])  # keeps a rank without work in step with the others
