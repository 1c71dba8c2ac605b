"""The course of a planned run: what its engines are busy with, and steps on the virtual clock.

The steady state is a fixed point: the more answers an engine has at once the longer is a step, the longer a
trajectory, the fewer arrive. The run itself is `coordinator.simulate.rollouts`: the policy and the router of a live run
decide, engines have the costs of that state.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.simulate.engines import StepCosts
from coordinator.simulate.rollouts import Plan, RolloutSimulation
from coordinator.simulate.scale import timing, trajectories
from coordinator.simulate.scale.plan import PoolLayout, ScalePlan
from coordinator.simulate.scale.trajectories import TrajectoryMeans
from rollout.decide.engines.routing import RoutingRules
from rollout.decide.view import SchedulingRules

ROUNDS = 200
WARM, MEASURED = 3, 4  # steps


@dataclass(frozen=True, kw_only=True)
class SteadyEngine:
    """One engine of a pool in the steady state. Seconds are of one trajectory."""

    costs: StepCosts
    answers: float  # that it samples at once
    in_flight: float  # trajectories that it has, those in their environments included
    prefill_s: float
    recompute_s: float  # reading again after a new version
    decode_s: float
    rest_s: float  # tools and reward
    reads: float  # share of its time

    @property
    def trajectory_s(self) -> float:
        return self.prefill_s + self.recompute_s + self.decode_s + self.rest_s

    @property
    def per_second(self) -> float:
        return self.in_flight / self.trajectory_s


def steady(plan: ScalePlan, pool: PoolLayout, means: TrajectoryMeans) -> SteadyEngine:
    """Every trajectory in flight reads its context again once for each batch."""
    work = plan.workload
    every = sum(item.gpus for item in plan.pools)
    in_flight = work.in_flight * pool.tensor / every
    again = means.context * work.in_flight / plan.batch
    rest, rate = means.tools_s + work.reward_s, timing.prefill(plan, pool, means.context)
    capacity = float(timing.slots(plan, pool, means))
    answers, reads = min(in_flight, capacity), 0.5
    for _ in range(ROUNDS):
        step = timing.decoding_step(plan, pool, max(answers, 0.1), means.context) / (1 - reads)
        decode, read = means.written * step, (means.read + again) / rate
        waiting = max(0.0, in_flight * (decode + read) / capacity - decode - read - rest)  # for a slot
        seconds = decode + read + rest + waiting
        answers += 0.2 * (min(capacity, in_flight * decode / seconds) - answers)
        reads += 0.2 * (min(0.95, in_flight / seconds * read) - reads)
    return SteadyEngine(
        costs=timing.costs(plan, pool, means, answers),
        answers=answers,
        in_flight=in_flight,
        prefill_s=means.read / rate,
        recompute_s=again / rate,
        decode_s=decode,
        rest_s=rest + waiting,
        reads=reads,
    )


@dataclass(frozen=True, slots=True)
class SimulatedSteps:
    """Means over the steps that were measured."""

    seconds: float
    waited_s: float  # by the trainer
    busy: float  # share of the engines' time
    read: float  # tokens that engines read for a trajectory


def simulate(
    plan: ScalePlan, pools: list[SteadyEngine], trainer_s: float, seed: int, rules: RoutingRules
) -> SimulatedSteps:
    """Steps from a cold start until prompts for `WARM + MEASURED` and for what is in flight are used up."""
    work = plan.workload
    count = WARM + MEASURED + work.staleness + 2
    engines = [
        (engine.costs, f"{n} {pool.gpu}")
        for n, (pool, engine) in enumerate(zip(plan.pools, pools, strict=True))
        for _ in range(pool.gpus // pool.tensor)
    ]
    came = RolloutSimulation(
        Plan(
            rules=SchedulingRules(
                groups=work.groups,
                size=work.size,
                staleness=work.staleness,
                concurrency=work.in_flight,
                over_stale=work.over_stale,
                tail=work.tail,
            ),
            engines=[costs for costs, _ in engines],
            hardware=[hardware if len(plan.pools) > 1 else "" for _, hardware in engines],
            workload=lambda prompt, member: trajectories.turns(work, seed, prompt, member),
            prompts=work.groups * count,
            trainer=trainer_s,
            routing=rules,
            recompute=True,
        )
    ).run()
    waited = came.rollout_seconds[WARM : WARM + MEASURED]
    mean = sum(waited) / len(waited)
    return SimulatedSteps(trainer_s + mean, mean, came.busy_share, came.read / plan.batch / count)
