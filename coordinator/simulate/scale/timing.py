"""Seconds of each part: a step of the trainer, a publication, a decoding step. Pure.

Products of matrices run at a share of the peak, the update at a share of the memory's bandwidth. Communication of the
trainer hides behind its computation where it is shorter; that of an engine does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.simulate.engines import StepCosts
from coordinator.simulate.scale import traffic
from coordinator.simulate.scale.memory import cache_tokens
from coordinator.simulate.scale.plan import PoolLayout, ScalePlan
from coordinator.simulate.scale.shapes import BF16, FP32
from coordinator.simulate.scale.traffic import LinkBytes
from coordinator.simulate.scale.trajectories import TrajectoryMeans

# Bytes that an update moves for each weight in fp32: the gradient is divided (8), its norm taken (4), clipped (8);
# AdamW decays (8), averages (12 and 20), takes the root (24), steps (16); weights are checked (6).
UPDATE_BYTES = 106


@dataclass(frozen=True, slots=True)
class PassTime:
    """A forward or backward pass: what takes longest takes all of it."""

    compute: float
    nvlink: float
    nic: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.nvlink, self.nic)

    @property
    def bound(self) -> str:
        parts = {"FLOP": self.compute, "NVLink": self.nvlink, "NIC": self.nic}
        return max(parts, key=lambda name: parts[name])


def passes(plan: ScalePlan, means: TrajectoryMeans) -> dict[str, PassTime]:
    """Forward and backward passes of all micro-batches of a step."""
    layout, kind = plan.trainer, plan.gpu(plan.trainer.gpu)
    tokens, sampled = plan.batch * means.tokens, plan.batch * means.written
    share = means.written / means.tokens
    flop = {
        "forward": plan.shape.forward(tokens, means.past, sampled),
        "backward": plan.shape.backward(
            tokens, means.past, sampled, micro=layout.micro_batch * share, recompute=layout.recompute
        ),
    }
    rate = layout.gpus * kind.flops * plan.reached[0]

    def timed(name: str, link: LinkBytes) -> PassTime:
        nvlink, nic = link.nvlink / kind.nvlink / kind.reached, link.nic / kind.nic / kind.reached
        return PassTime(layout.epochs * flop[name] / rate, nvlink, nic)

    return {name: timed(name, link) for name, link in traffic.training(plan, means).items()}


def update(plan: ScalePlan) -> float:
    """Of an optimiser step, on each GPU's share of the weights."""
    layout, kind = plan.trainer, plan.gpu(plan.trainer.gpu)
    return layout.epochs * UPDATE_BYTES * plan.shape.parameters / layout.gpus / kind.bandwidth / kind.reached


def publication(plan: ScalePlan) -> dict[str, float]:
    """From a step's weights to those of the engines, part after part."""
    words, published, network = plan.shape.parameters, plan.publication, plan.network
    kind = plan.gpu(plan.trainer.gpu)
    machines = max(1.0, plan.trainer.gpus / kind.per_machine)
    size, servers = traffic.version(plan), sum(pool.gpus // pool.tensor for pool in plan.pools)
    engine = plan.gpu(plan.pools[0].gpu)
    parallel = min(pool.tensor for pool in plan.pools)
    writers = plan.trainer.gpus if published.ranks else 1
    result = {
        "save": 3 * FP32 * words / machines / network.disk,
        "encode": BF16 * words / writers / published.encoded,
        "between clusters": size / network.between,
        "to engines": servers * size / (engine.nic * engine.per_machine * engine.reached),
        "pull and apply": BF16 * words / parallel / published.pulled,
    }
    if not published.ranks:
        received = FP32 * words * (1 - 1 / plan.trainer.gpus)
        result["gather on rank 0"] = received / (kind.nic * kind.reached) + 2 * FP32 * words / network.disk
    return result


def decoding(plan: ScalePlan, pool: PoolLayout, answers: float, past: float) -> dict[str, float]:
    """Of a decoding step of so many answers of `past` tokens: what it reads, computes and exchanges. What is read and
    what is computed overlap."""
    shape, kind, gpus = plan.shape, plan.gpu(pool.gpu), pool.tensor
    bandwidth = kind.bandwidth * kind.reached
    states = traffic.of_engine(plan, pool, answers) / kind.nvlink / kind.reached
    return {
        "weights": BF16 * shape.touched(answers) / gpus / bandwidth,
        "cache": answers * past * shape.cache_bytes(gpus) / bandwidth,
        "FLOP": (shape.reading(answers, past) + 2 * shape.embedding * answers) / gpus / kind.flops / kind.prefill,
        "exchange": states + (2 * shape.layers * plan.network.latency_s if gpus > 1 else 0.0),
    }


def decoding_step(plan: ScalePlan, pool: PoolLayout, answers: float, past: float) -> float:
    parts = decoding(plan, pool, answers, past)
    return max(parts["weights"] + parts["cache"], parts["FLOP"]) + parts["exchange"]


def prefill(plan: ScalePlan, pool: PoolLayout, past: float) -> float:
    """Tokens that an engine reads per second, each of which sees `past` others."""
    kind = plan.gpu(pool.gpu)
    compute = plan.shape.reading(1.0, past) / pool.tensor / kind.flops / kind.prefill
    return 1 / (compute + traffic.of_engine(plan, pool, 1.0) / kind.nvlink / kind.reached)


def slots(plan: ScalePlan, pool: PoolLayout, means: TrajectoryMeans) -> int:
    """Answers at once: as set, or as many as the cache holds, each in the midst of its trajectory."""
    return max(1, min(pool.slots, int(cache_tokens(plan, pool) / max(1.0, means.context))))


def costs(plan: ScalePlan, pool: PoolLayout, means: TrajectoryMeans, answers: float) -> StepCosts:
    """Of one engine around `answers` at once."""
    few, many = max(1.0, 0.75 * answers), max(2.0, 1.25 * answers)
    slow, fast = (decoding_step(plan, pool, count, means.context) for count in (many, few))
    per_sequence = max(0.0, slow - fast) / (many - few)
    return StepCosts(
        base=max(1e-6, fast - per_sequence * few),
        per_sequence=per_sequence,
        prefill=prefill(plan, pool, means.context),
        slots=slots(plan, pool, means),
        exclusive=True,
    )
