"""`pagurus bench scheduling`: the schedulers, live where they are live, and against what is exact or simulated.

`queue`: a live rollout over an embedded engine of 16 slots, lengths drawn: 16 prompts of 4 answers wait for slots, over
batches of 4 prompts each of which waits for its longest answer. `over_bound`: of Q·mean/K + longest (ROLL Flash).
`flash`: ROLL Flash's other ideas, live over two embedded engines of 64 slots: single requests over one request for a
group (`replication`), 9 groups of 9 where 8 of 8 are used (`redundancy`), trajectories that go on by themselves over
batches that step together (`asynchrony`); a pair without and with for each round.
`tail`: a live rollout over an embedded engine, P0 = 8 prompts of R0 = 4 answers, lengths drawn; without and with tail
batching in turns. In these, a step of the engine takes `--step-ms` at least, however many answers it advances, as on a
GPU (0: as long as it computes; then the answers that tail batching starts in addition cost what it saves). `ratio` is
the time per trained prompt without over with; `control` the same with equal lengths. The engine's rates are measured
before on answers of equal length (`calibrated`), and what the simulation says of the drawn ones stands beside, without
and with: `simulated_over_live`.
`affinity`: the real pool over servers that are their rates, two kinds of hardware as far apart as H20 and H800, and two
environments, one that reads much and one that writes much. Trajectories a second where the pool learns who serves whom
cheapest, against each assignment of environments to hardware; trajectories until it has learned that the two have
changed places; `control`: one environment, equal servers, against a pool that is told of no hardware. Time passes there
while the event loop has nothing to do, so that the machine's load does not matter. `simulated_over_live`: of the same
trajectories in the simulation.
`turns`: runs of `pagurus train` on two machines, a processor for rollouts and one for training: one alone, three that
take turns, three of short phases while their coordinator is killed `--kills` times. Machine-seconds per step; seconds
from one run's rollout to the first trajectory of the next (`warm_switch_s`), and until roles that are started work
(`cold_start_s`).
`harvest`: rollouts on an engine that serves users and is its rates, through the real pool, in such a loop: users alone,
rollouts within the users' slack, rollouts in one queue with them (`naive`); `control`: nobody is served.
`colocated`: the same with a real engine (`--engine`), which chooses its steps so, and real time. The three take turns,
a
slice of time each, with the same users. `because`: why tokens were late (bench.harness.colocated_results).
`harvested_share_of_idle`: tokens of rollouts over those that the engine makes while nobody is served, less those of
users. `control`: nobody is served. `simulated_over_live`: tokens of rollouts in a simulation whose steps cost what they
did in the slices of users alone and of nobody. `replayed`: the engine's log of its steps, decided again. `priority`: a
vLLM that does not choose so, but has rollouts wait behind users by its own priority scheduling.
`handover`: a run of `pagurus train` on two processors, of two engines and its trainer, in processes of their own; a
step takes `--step-ms`. `ratio`: steps without handover over steps with it, of the same drawn lengths, in turns
(`--rounds` pairs); `control`, every third pair: of equal lengths. `hidden`: of the gradients' seconds, those before a
batch is complete.
`place`: plans of `--instances` drawn instances of 2 to 8 jobs over the exact optimum; seconds for 2,000 jobs, the
median of five times.
Runs of `queue`, `flash` and `tail` need no sandboxes: what is measured is the engine and the rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import colocated_engine, colocated_results, command, handed_over, rollflash, shared_runs
from bench.harness.cheapest_groups import cheapest
from bench.harness.drawn_runs import GROUPS, Way, compared
from bench.harness.paced_engine import paced
from bench.harness.rated_engines import Driven, IdleLoop, Kind, drive, foretold
from bench.harness.serving_engine import ANSWER, READ, Harvest, harvest
from coordinator.decide import multiplex, packing
from coordinator.simulate import serving
from coordinator.simulate.scenarios import H20, H800
from coordinator.simulate.shared import PRICES, PROMISED, STEP, drawn_jobs

PARK = {"H20": (3, H20), "H800": (1, H800)}  # of about equal rent
KINDS = {"reads": Kind(2000, 30, 0.5), "writes": Kind(100, 200, 0.5)}
CHANGED = {"reads": KINDS["writes"], "writes": KINDS["reads"]}
EVEN_PARK, EVEN_KINDS = {"a": (2, H20), "b": (2, H20)}, {"all": Kind(500, 100, 0.5)}
PARTS = ("queue", "flash", "tail", "affinity", "place", "harvest", "colocated", "turns", "handover")
WINDOW = 20  # trajectories


def learned_after(came: Driven) -> int | None:
    """Trajectories that begin after the change until those that follow are placed as in the end; None: never."""
    fits = [
        (hardware == "H800") == (kind == "writes")
        for at, kind, hardware in sorted(came.begun.values())
        if at > came.shifted
    ]
    usual = statistics.mean(fits[len(fits) // 2 :])
    windows = (statistics.mean(fits[n : n + WINDOW]) for n in range(len(fits) - WINDOW))
    return next((n for n, share in enumerate(windows) if share >= 0.9 * usual), None)


async def affinity(options: argparse.Namespace) -> dict[str, Any]:
    static = [{"reads": reads, "writes": writes} for reads in PARK for writes in PARK]
    ways: dict[str, dict[str, Any]] = {
        "learned": {},
        **{"-".join(item.values()): {"place": item} for item in static},
        "least_loaded": {"blind": True},
        "even": {"seconds": 640},
        "even_least_loaded": {"seconds": 640, "blind": True},
    }
    live: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, list[float]] = {name: [] for name in ways}
    after = list[int | None]()
    for seed in range(options.rounds):
        for name, way in ways.items():
            park, kinds = (EVEN_PARK, EVEN_KINDS) if name.startswith("even") else (PARK, KINDS)
            came = await drive(park, kinds, seed=seed, shift=CHANGED if name == "learned" else None, **way)
            live[name].append(came.per_second)
            said[name].append(foretold(park, kinds, seed=seed, **way))
            if came.shifted:
                after.append(learned_after(came))
    fixed = list(zip(*(live["-".join(item.values())] for item in static), strict=True))

    def over(name: str, others: Iterable[float]) -> float:
        return round(statistics.median(one / other for one, other in zip(live[name], others, strict=True)), 3)

    return {
        "over_best": over("learned", map(max, fixed)),
        "over_worst": over("learned", map(min, fixed)),
        "over_least_loaded": over("learned", live["least_loaded"]),
        "control": over("even", live["even_least_loaded"]),
        "learned_after": after,
        "per_second": {name: round(statistics.mean(rates), 2) for name, rates in live.items()},
        "simulated_over_live": {name: round(sum(said[name]) / sum(live[name]), 3) for name in ways},
    }


def harvested(requests: int) -> dict[str, Any]:
    """Live against simulated, as `pagurus simulate harvest` has it."""
    traffic, nobody = (
        serving.bursty(0, requests=requests, rate=3.5),
        serving.Traffic(arrivals=[60.0], prompts=[1], answers=[1]),
    )

    def live(of: serving.Traffic, mode: serving.Mode) -> Harvest:
        with asyncio.Runner(loop_factory=IdleLoop) as runner:
            return runner.run(harvest(of, PROMISED, STEP, mode))

    observed = {mode: live(traffic, mode) for mode in colocated_engine.MODES}
    empty = {mode: live(nobody, mode).served for mode in colocated_engine.MODES[1:]}
    limit = empty["naive"].rollout_tokens / empty["naive"].seconds
    result: dict[str, Any] = {}
    for mode, came in observed.items():
        served, said = came.served, serving.serve(traffic, PROMISED, STEP, mode, reads=READ / ANSWER, prompt=READ)
        result[mode] = {
            "violations": served.violations(PROMISED),
            "ttft_p99_s": round(float(np.percentile(served.ttft, 99)), 3),
            "tpot_p99_s": round(float(np.percentile(served.tpot, 99)), 4),
            "rollout_tokens_per_s": round(served.rollout_tokens / served.seconds),
            "simulated_rollout_tokens_per_s": round(said.rollout_tokens / said.seconds),
        }
    headroom = observed["headroom"]
    idle = limit * headroom.served.seconds - sum(traffic.answers)
    return result | {
        "harvested_share_of_idle": round(headroom.served.rollout_tokens / idle, 2),
        "cuts": headroom.served.cuts,
        "routed": {name: count for name, count in headroom.counts.items() if name.startswith(("routed_", "moved"))},
        "control": round(empty["headroom"].rollout_tokens / empty["naive"].rollout_tokens, 3),
    }


def place(options: argparse.Namespace) -> dict[str, Any]:
    ours = best = worst = 0.0
    exact = 0
    for seed in range(options.instances):
        jobs = drawn_jobs(seed, 2 + seed % 7)
        mine, minimum = multiplex.total(packing.plan(jobs, PRICES), PRICES), cheapest(jobs, PRICES)
        ours, best, worst = ours + mine, best + minimum, max(worst, mine / minimum)
        exact += mine <= minimum * (1 + 1e-9)
    seconds, broken = [], 0
    for seed in range(5):
        many = drawn_jobs(seed, 2000)
        began = time.perf_counter()
        groups = packing.plan(many, PRICES)
        seconds.append(time.perf_counter() - began)
        broken += sum(len(group.faults(PRICES)) for group in groups)
    return {
        "instances": options.instances,
        "over_optimum": round(ours / best, 4),
        "worst_over_optimum": round(worst, 4),
        "optimal": exact,
        "seconds_for_2000_jobs": round(statistics.median(seconds), 3),
        "broken_promises": broken,
    }


def add_colocated(parser: argparse.ArgumentParser) -> None:
    """The options of `colocated`."""
    parser.add_argument("--engine", choices=list(colocated_results.CLOCKS), default="embedded", help="of `colocated`")
    parser.add_argument("--rate", type=float, default=8.0, help="users a second outside of bursts")
    parser.add_argument("--reads", type=float, default=60.0, help="tokens of a user's prompt, the median")
    parser.add_argument("--answers", type=float, default=12.0, help="tokens of an answer to it, the median")
    parser.add_argument("--every", type=float, default=30.0, help="seconds of a slice; the last ten: a burst")
    parser.add_argument(
        "--colocated-step-ms", type=float, default=0.0, help="of a step of the engine of `colocated`, at least"
    )
    parser.add_argument("--tpot", type=float, default=0.05, help="seconds between tokens that were promised")
    parser.add_argument(
        "--margin",
        type=float,
        default=0.5,
        help="share of what users were promised that is left unused",
    )
    parser.add_argument("--log", type=Path, help="a folder in which the engine's log of steps is kept")


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=4, help="drawn workloads, each with and without")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="of a step of an engine of `queue`, `flash` and `tail`, at least"
    )
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--steps", type=int, default=6, help="of each run that takes turns")
    parser.add_argument("--kills", type=int, default=20, help="of the coordinator of three short runs that take turns")
    parser.add_argument("--requests", type=int, default=2000, help="of users, beside rollouts")
    add_colocated(parser)
    parser.add_argument("--image", default="debian", help="of the runs that take turns")
    options = parser.parse_args(arguments)
    metrics: dict[str, Any] = {}
    if options.part in ("handover", "all"):
        metrics["handover"] = handed_over.compared(options.rounds, lambda kind: paced(kind, options.step_ms))
    if options.part in ("queue", "all"):
        metrics["queue"] = asyncio.run(compared(options, 16, (Way(4), Way(16)), 32))
    if options.part in ("flash", "all"):
        metrics["flash"] = asyncio.run(rollflash.compared(options.rounds, options.step_ms))
    if options.part in ("tail", "all"):
        metrics["tail"] = asyncio.run(compared(options, 64, (Way(GROUPS), Way(GROUPS, 1.25)), 5 * GROUPS))
    if options.part in ("affinity", "all"):
        with asyncio.Runner(loop_factory=IdleLoop) as runner:
            metrics["affinity"] = runner.run(affinity(options))
    if options.part in ("place", "all"):
        metrics["place"] = place(options)
    if options.part in ("harvest", "all"):
        metrics["harvest"] = harvested(options.requests)
    if options.part in ("colocated", "all"):
        users = colocated_results.Users(options.requests, options.rate, options.reads, options.answers, options.every)
        step_ms, tpot = options.colocated_step_ms, options.tpot
        metrics["colocated"] = colocated_results.colocated(
            users, options.engine, step_ms, tpot, options.margin, options.log
        )
    if options.part in ("turns", "all"):
        metrics["turns"] = shared_runs.turns(options.image, steps=options.steps, kills=options.kills)
    command.show(metrics, options)
    return 0
