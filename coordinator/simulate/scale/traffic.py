"""Bytes that cross each link in a step, per GPU. Pure.

::

    forward   all-gather of every layer, and of what is in none      ┐ for each micro-batch, FSDP2 as the trainer sets
    backward  all-gather of every layer; reduce-scatter of gradients ┘ it up (trainer/distributed/shard.py)
    tensor    two all-reduces of the hidden states for each layer and pass
    expert    tokens to their experts and back, for each layer and pass

A collective over machines crosses a machine's boundary once for all of its GPUs, each of which forwards its share by
NVLink. A token goes to a machine once, however many of its experts are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.simulate.scale.memory import layer_of_rank
from coordinator.simulate.scale.plan import PoolLayout, ScalePlan
from coordinator.simulate.scale.shapes import BF16
from coordinator.simulate.scale.trajectories import TrajectoryMeans

TOKEN_BYTES = 14  # of a trajectory on its way to the trainer: id, log-probability and mask in msgpack


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What each GPU receives."""

    nvlink: float = 0.0
    nic: float = 0.0

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.nvlink + other.nvlink, self.nic + other.nic)

    def __mul__(self, factor: float) -> LinkBytes:
        return LinkBytes(self.nvlink * factor, self.nic * factor)


@dataclass(frozen=True, slots=True)
class ShardedGroup:
    """Ranks that share weights, so many of them on each machine."""

    ranks: int
    per_machine: int

    def gathered(self, size: float) -> LinkBytes:
        """An all-gather, or a reduce-scatter, of `size` bytes in all."""
        machines = math.ceil(self.ranks / self.per_machine)
        inside = min(self.ranks, self.per_machine)
        return LinkBytes(size * (1 - 1 / self.ranks), size * (1 - 1 / machines) / inside)


def micro_batches(plan: ScalePlan, tokens: float) -> int:
    """Of a rank, for a batch of so many tokens."""
    return max(1, math.ceil(tokens / plan.ranks / plan.trainer.micro_batch))


def _groups(plan: ScalePlan) -> tuple[ShardedGroup, ShardedGroup | None]:
    """Those that share the dense weights, and those that share an expert's; None where a GPU has its experts alone."""
    layout, machine = plan.trainer, int(plan.gpu(plan.trainer.gpu).per_machine)
    dense = ShardedGroup(plan.ranks, max(1, machine // layout.tensor))
    copies = plan.ranks // layout.expert
    if layout.expert == 1:
        return dense, dense
    return dense, ShardedGroup(copies, max(1, machine // layout.tensor // layout.expert)) if copies > 1 else None


def training(plan: ScalePlan, means: TrajectoryMeans) -> dict[str, LinkBytes]:
    """Of a step: its forward and its backward passes."""
    shape, layout, tokens = plan.shape, plan.trainer, plan.batch * means.tokens
    dense, experts = _groups(plan)
    own = shape.layers * layer_of_rank(plan)
    in_experts = shape.in_experts / layout.expert / layout.tensor if experts is not None else 0.0
    parts = [(own - in_experts, dense), (in_experts, experts)] if experts is not None else [(own, dense)]
    outside = shape.outside / layout.tensor
    gathered = sum((group.gathered(layout.gathered_bytes * size) for size, group in parts if group), LinkBytes())
    reduced = sum((group.gathered(layout.gradient_bytes * size) for size, group in parts if group), LinkBytes())
    count = micro_batches(plan, tokens) * layout.epochs
    passes = exchanged(plan, tokens / plan.ranks) * layout.epochs
    return {
        "forward": (gathered + dense.gathered(layout.gathered_bytes * outside)) * count + passes,
        "backward": (gathered + reduced + dense.gathered(layout.gradient_bytes * outside)) * count
        + passes * (2 if layout.recompute else 1),
    }


def exchanged(plan: ScalePlan, tokens: float) -> LinkBytes:
    """Hidden states of a rank's tokens in one pass, over tensor and expert parallelism."""
    shape, layout = plan.shape, plan.trainer
    states = shape.layers * tokens * shape.hidden * BF16
    result = LinkBytes(2 * 2 * (1 - 1 / layout.tensor) * states)
    if layout.expert > 1:
        machines = math.ceil(layout.expert * layout.tensor / plan.gpu(layout.gpu).per_machine)
        elsewhere = (machines - 1) * (1 - (1 - 1 / machines) ** shape.experts_per_token)
        own = 2 * states / layout.tensor  # a GPU sends its part of the sequence
        result += LinkBytes(shape.experts_per_token * own, elsewhere * own)
    return result


def of_engine(plan: ScalePlan, pool: PoolLayout, tokens: float) -> float:
    """Bytes by NVLink that each GPU of an engine receives for tokens that it reads or samples."""
    return plan.shape.layers * 2 * 2 * (1 - 1 / pool.tensor) * tokens * plan.shape.hidden * BF16


def version(plan: ScalePlan) -> float:
    """Bytes of a published version: its changes, or all of it."""
    words, published = plan.shape.parameters, plan.publication
    image = published.image_bytes * words
    return image if published.complete else min(image, published.changed * published.change_bytes * words)
