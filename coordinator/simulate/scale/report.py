"""What a plan comes to: one object for `--json`, rows for people, and what binds.

Pure. Guarantee: every figure that went in from a table of published ones is named with its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from coordinator.simulate.scale import course, memory, references, timing, traffic, trajectories
from coordinator.simulate.scale.course import SimulatedSteps, SteadyEngine
from coordinator.simulate.scale.plan import ScalePlan, ScaleTable
from coordinator.simulate.scale.shapes import FP32
from coordinator.simulate.scale.timing import PassTime
from coordinator.simulate.scale.trajectories import TrajectoryMeans

Figure: TypeAlias = "float | int | str | list[str] | dict[str, Figure]"
FULL = 0.92  # of a GPU's memory; what is above may not fit
SHORT = 1.15  # times what it should be; more has a cause of its own


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """All that was computed of a plan."""

    plan: ScalePlan
    means: TrajectoryMeans
    engines: list[SteadyEngine]
    passes: dict[str, PassTime]
    update_s: float
    publication: dict[str, float]
    steps: SimulatedSteps

    @property
    def training_s(self) -> float:
        return sum(item.seconds for item in self.passes.values()) + self.update_s

    @property
    def trainer_s(self) -> float:
        """Until a new version is there: rollouts' next one waits for all of it."""
        return self.training_s + sum(self.publication.values())


def compute(plan: ScalePlan, seed: int = 0) -> PlannedRun:
    means = trajectories.means(plan, seed)
    engines = [course.steady(plan, pool, means) for pool in plan.pools]
    passes, update_s, publication = timing.passes(plan, means), timing.update(plan), timing.publication(plan)
    seconds = sum(item.seconds for item in passes.values()) + update_s + sum(publication.values())
    steps = course.simulate(plan, engines, seconds, seed, plan.routing.rules)
    return PlannedRun(
        plan=plan, means=means, engines=engines, passes=passes, update_s=update_s, publication=publication, steps=steps
    )


def report(run: PlannedRun) -> dict[str, Figure]:
    plan, means, size = run.plan, run.means, traffic.version(run.plan)
    alone = plan.batch / _rate(run)
    return {
        "plan": plan.name,
        "model": f"{plan.model}: {plan.shape.parameters / 1e9:.1f}B weights, {plan.shape.active / 1e9:.1f}B active",
        "batch": f"{plan.batch} trajectories of {means.turns:.1f} turns: {means.read:.0f} tokens read, "
        f"{means.written:.0f} written",
        "step": {
            "seconds": _three(run.steps.seconds),
            "trainer_waits_s": _three(run.steps.waited_s),
            "rollouts_alone_s": _three(alone),
            "one_after_the_other_s": _three(alone + run.trainer_s),
            "engines_busy": _three(run.steps.busy),
            "tokens_read_per_trajectory": _three(run.steps.read),
            "tokens_per_gpu_s": _three(plan.batch * means.tokens / run.steps.seconds / _gpus(plan)),
        },
        "training_s": {
            **{name: _three(item.seconds) for name, item in run.passes.items()},
            "update": _three(run.update_s),
        },
        "publication_s": {name: _three(seconds) for name, seconds in run.publication.items()},
        "rollouts": {_pool(plan, n): _engine(run, n) for n in range(len(plan.pools))},
        "version_bytes": _three(size),
        "image_bytes": _three(plan.publication.image_bytes * plan.shape.parameters),
        "links": {name: _three(value) for name, value in links(run).items()},
        "memory_gib": {name: _gib(parts) for name, (parts, _) in memories(run).items()},
        "binds": binds(run),
        "not_today": not_today(run),
        "sources": list(sources(plan)),
    }


def _engine(run: PlannedRun, number: int) -> dict[str, Figure]:
    """Seconds of a trajectory."""
    plan, pool, item = run.plan, run.plan.pools[number], run.engines[number]
    return {
        "engines": pool.gpus // pool.tensor,
        "prefill_s": _three(item.prefill_s),
        "prefill_after_new_versions_s": _three(item.recompute_s),
        "decode_s": _three(item.decode_s),
        "environment_s": _three(run.means.tools_s),
        "reward_s": _three(plan.workload.reward_s),
        "waits_for_a_slot_s": _three(item.rest_s - run.means.tools_s - plan.workload.reward_s),
        "share_of_time_reading": _three(item.reads),
        "answers_at_once": _three(item.answers),
        "slots": item.costs.slots,
    }


def links(run: PlannedRun) -> dict[str, float]:
    """Bytes of a step over each link; of GPUs, that each receives."""
    plan, means, size = run.plan, run.means, traffic.version(run.plan)
    train = traffic.training(plan, means)
    result = {
        "trainer: NVLink of a GPU": sum(item.nvlink for item in train.values()),
        "trainer: NIC of a GPU": sum(item.nic for item in train.values()),
        "between clusters: weights": size,
        "between clusters: trajectories": traffic.TOKEN_BYTES * plan.batch * means.tokens,
    }
    every = sum(pool.gpus for pool in plan.pools)
    for number, pool in enumerate(plan.pools):
        again = means.context * plan.workload.in_flight / plan.batch
        tokens = plan.batch * (means.tokens + again) * pool.gpus / every / (pool.gpus // pool.tensor)
        result[f"{_pool(plan, number)}: NVLink of a GPU"] = traffic.of_engine(plan, pool, tokens)
        result[f"{_pool(plan, number)}: weights to each engine"] = size
    return result


def memories(run: PlannedRun) -> dict[str, tuple[dict[str, float], float]]:
    """By role: bytes of each part on one GPU, and what the GPU has."""
    plan = run.plan
    rows = {f"trainer on {plan.trainer.gpu}": memory.of_trainer(plan, run.means.written / run.means.tokens)}
    limits = [plan.gpu(plan.trainer.gpu).memory]
    for number, pool in enumerate(plan.pools):
        rows[_pool(plan, number)] = memory.of_engine(plan, pool)
        limits.append(plan.gpu(pool.gpu).memory)
    return {name: (parts, memory.GIB * limit) for (name, parts), limit in zip(rows.items(), limits, strict=True)}


def binds(run: PlannedRun) -> list[str]:
    """What does not fit, then what the step waits for, then what each part of it waits for."""
    plan, alone, seconds = run.plan, run.plan.batch / _rate(run), run.steps.seconds
    result = list(_memory_binds(run))
    slower, said = max((alone, "rollouts"), (run.trainer_s, "the trainer"))
    other = f"{alone:.0f} s for a batch of all engines, {run.trainer_s:.0f} s for its training and publication"
    if seconds > SHORT * slower:
        result.append(f"stragglers: a step of {seconds:.0f} s; {other}: staleness, over_stale or tail")
    else:
        result.append(f"{said}: {other}")
    once = run.means.read + run.means.context * plan.workload.in_flight / plan.batch
    if run.steps.read > SHORT * once:
        result.append(
            f"moves between engines: {run.steps.read:.0f} tokens read for a trajectory, {once:.0f} where none moves: "
            "routing.headroom, of a run: pool.headroom"
        )
    for number, item in enumerate(run.engines):
        result.append(f"{_pool(plan, number)}: {_of_engine(run, number, item)}")
    slowest = max(run.passes, key=lambda name: run.passes[name].seconds)
    result.append(f"training: {run.passes[slowest].bound} of the {slowest} pass")
    first = max(run.publication, key=lambda name: run.publication[name])
    result.append(f"publication: {first}, {run.publication[first]:.1f} of {sum(run.publication.values()):.1f} s")
    return result


def _memory_binds(run: PlannedRun) -> Iterator[str]:
    for name, (parts, limit) in memories(run).items():
        total, empty = sum(parts.values()), parts.get("cache", 1.0) <= 0
        if total > FULL * limit or empty:
            over = "does not fit" if total > limit or empty else "hardly fits"
            first = max(parts, key=lambda part: parts[part])
            gib = f"{total / memory.GIB:.0f} of {limit / memory.GIB:.0f} GiB"
            yield f"memory of the {name} {over}: {gib}, the largest part {first}"


def _of_engine(run: PlannedRun, number: int, item: SteadyEngine) -> str:
    pool = run.plan.pools[number]
    if item.rest_s > 0.5 * item.trajectory_s:
        full = item.answers > 0.95 * item.costs.slots
        return "capacity in the cache" if full else "environments"
    if item.prefill_s + item.recompute_s > item.decode_s or item.reads > 0.5:
        return f"FLOP of reading prompts ({item.reads:.0%} of the time)"
    parts = timing.decoding(run.plan, pool, item.answers, run.means.context)
    return f"decoding, most of it {max(parts, key=lambda name: parts[name])} ({1 - item.reads:.0%} of the time)"


def not_today(run: PlannedRun) -> list[str]:
    """What the plan has and `pagurus train` has not, and what that costs."""
    plan, layout = run.plan, run.plan.trainer
    result = []
    if layout.tensor > 1 or layout.expert > 1:
        result.append("tensor and expert parallelism of the trainer: it has FSDP2 alone (trainer.tensor, expert = 1)")
    if layout.gathered_bytes != FP32 or layout.gradient_bytes != FP32:
        result.append("weights or gradients of other ranks in half precision: the trainer gathers fp32")
    if plan.publication.ranks:
        seconds = FP32 * plan.shape.parameters / plan.network.disk
        encode = 2 * plan.shape.parameters / plan.publication.encoded
        result.append(
            f"ranks that publish their own rows: `pagurus train` writes all weights from rank 0, {seconds:.0f} s, and "
            f"one process encodes them, {encode:.0f} s, where the plan has {run.publication['encode']:.1f} s"
        )
    return result


def sources(plan: ScalePlan) -> Iterator[str]:
    kinds = dict.fromkeys((plan.trainer.gpu, *(pool.gpu for pool in plan.pools)))
    yield from (f"{name}: {plan.gpu(name).source}" for name in kinds)
    yield f"{plan.model}: {plan.shape.source}"
    yield "share of the trainer's FLOP, {:.2f}: {}".format(*plan.reached)
    tables: dict[str, ScaleTable] = {
        "trainer": plan.trainer, "workload": plan.workload, "publication": plan.publication, "network": plan.network
    }  # fmt: skip
    yield from (f"[{name}]: {table.source}" for name, table in tables.items() if table.source)
    yield from (f"[[pools]] {pool.gpu}: {pool.source}" for pool in plan.pools if pool.source)
    chosen = {
        "publication.changed": (plan.publication.changed, references.CHANGED),
        "publication.change_bytes": (plan.publication.change_bytes, references.CHANGE),
        "publication.image_bytes": (plan.publication.image_bytes, references.IMAGE),
        "publication.encoded": (plan.publication.encoded, references.ENCODED),
        "publication.pulled": (plan.publication.pulled, references.PULLED),
        "pools.reserved": (plan.pools[0].reserved, references.RESERVED),
        "network.between": (plan.network.between, references.BETWEEN),
        "network.disk": (plan.network.disk, references.DISK),
        "network.latency_s": (plan.network.latency_s, references.LATENCY),
    }
    for name, (value, (published, source)) in chosen.items():
        if value == published:
            yield f"{name}, {value:g}: {source}"


def flat(metrics: Mapping[str, Figure], before: str = "") -> Iterator[tuple[str, str]]:
    """As a person reads them."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}: ")
        elif isinstance(value, list):
            yield from ((f"{before}{name}", line) for line in value)
        else:
            yield f"{before}{name}", f"{value:,}" if isinstance(value, int | float) else value


def _pool(plan: ScalePlan, number: int) -> str:
    return f"engine on {plan.pools[number].tensor} {plan.pools[number].gpu}"


def _rate(run: PlannedRun) -> float:
    """Trajectories a second of all engines."""
    pools = zip(run.plan.pools, run.engines, strict=True)
    return sum(item.per_second * (pool.gpus // pool.tensor) for pool, item in pools)


def _gpus(plan: ScalePlan) -> int:
    return plan.trainer.gpus + sum(pool.gpus for pool in plan.pools)


def _gib(parts: Mapping[str, float]) -> dict[str, Figure]:
    every = {**parts, "sum": sum(parts.values())}
    return {name: _three(size / memory.GIB) for name, size in every.items()}


def _three(value: float) -> float:
    """Three digits.

    >>> _three(123456.0), _three(0.012345)
    (123000.0, 0.0123)
    """
    return float(f"{value:.3g}")
