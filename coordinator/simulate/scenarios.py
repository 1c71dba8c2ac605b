"""What `pagurus simulate` can run: each scenario is a function of a seed and gives its figures, its inputs, its `plot`.

Every scenario has its ablation (the same without the feature) and a control: a workload where it must not help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from coordinator.simulate import balancing, handover, parallel, shared
from coordinator.simulate.engines import StepCosts
from coordinator.simulate.plot import Line, Plot, counted, per_second
from coordinator.simulate.rollouts import Came, Plan, RolloutSimulation, SimulatedTurn, Workload
from rollout.decide.bound import Bound
from rollout.decide.view import SchedulingRules

ALL_AT_ONCE = 1_000_000  # trajectories
ENGINE = StepCosts(base=0.010, per_sequence=0.0002, slots=64)


def synchronous(groups: int, size: int, **more: Any) -> SchedulingRules:
    return SchedulingRules(groups=groups, size=size, staleness=0, concurrency=ALL_AT_ONCE, **more)


def lengths(seed: int, *, mean: float, spread: float, of_prompt: float = 0.0) -> Workload:
    """One turn of log-normal length. `spread`: deviation of its logarithm, of which the share `of_prompt` (of variance)
    is common to a prompt's members."""

    def workload(prompt: int, member: int) -> list[SimulatedTurn]:
        common = np.random.default_rng((seed, prompt)).normal() * np.sqrt(of_prompt)
        own = np.random.default_rng((seed, prompt, member + 1)).normal() * np.sqrt(1 - of_prompt)
        return [SimulatedTurn(0, float(mean * np.exp(spread * (common + own) - spread**2 / 2)))]

    return workload


def capped(workload: Workload, limit: float) -> Workload:
    """No answer is longer than an engine's limit."""
    return lambda prompt, member: [
        SimulatedTurn(turn.prompt, min(turn.tokens, limit), turn.environment) for turn in workload(prompt, member)
    ]


def delays(seed: int, *, variation: float, mean: float = 10.0, turns: int = 8, tokens: float = 100.0) -> Workload:
    """Turns whose environments take log-normal times of this coefficient of variation."""
    width = np.sqrt(np.log(1 + variation**2))

    def workload(prompt: int, member: int) -> list[SimulatedTurn]:
        draw = np.random.default_rng((seed, prompt, member))
        return [
            SimulatedTurn(20, tokens, float(draw.lognormal(np.log(mean) - width**2 / 2, width))) for _ in range(turns)
        ]

    return workload


def failing(seed: int, *, shape: float | None, turns: int = 4) -> Workload:
    """Turns whose environments take Pareto times (`shape`; None: all 2 s), ten minutes at most."""

    def workload(prompt: int, member: int) -> list[SimulatedTurn]:
        draw = np.random.default_rng((seed, prompt, member))
        return [
            SimulatedTurn(20, 200, 2.0 if shape is None else min(600.0, 2.0 * float(draw.pareto(shape) + 1)))
            for _ in range(turns)
        ]

    return workload


def simulated(**plan: Any) -> Came:
    return RolloutSimulation(Plan(**plan)).run()


# --------------------------------------------------------------------------- ROLL Flash (arXiv:2510.11345)


def queue(seed: int) -> dict[str, Any]:
    """Q answers on K slots take at most Q·mean/K + longest, whatever their lengths: answers do not wait for a batch."""
    held, parts = [], []
    for number in range(20):
        draw = np.random.default_rng((seed, number))
        slots, groups, size = int(draw.integers(2, 65)), int(draw.integers(2, 20)), int(draw.integers(1, 9))
        rates = StepCosts(base=0.01, slots=slots)
        work = lengths(seed + number, mean=300, spread=float(draw.uniform(0, 2)))
        came = simulated(rules=synchronous(groups, size), engines=[rates], workload=work, prompts=groups)
        seconds = [0.01 * tokens for tokens in came.accepted]
        bound = len(seconds) * float(np.mean(seconds)) / slots + max(seconds)
        held.append(came.seconds <= bound * (1 + 1e-6))
        parts.append(came.seconds / bound)
    numbers = range(1, len(parts) + 1)
    return {
        "runs": len(held),
        "within_bound": sum(held),
        "worst_of_bound": round(max(parts), 3),
        "plot": Plot(
            title="No run takes longer than the bound",
            x="run, each with slots, groups and lengths of its own",
            y="seconds over the bound",
            lines={"simulated run": (numbers, parts), "the bound": (numbers, [1.0] * len(parts))},
            drawn_as="points",
        ),
    }


def replication(seed: int) -> dict[str, Any]:
    """16 prompts of 32 answers on two engines: independent requests against one request for a prompt's whole group."""

    def run(spread: float, rates: StepCosts, barrier: str) -> Came:
        work = capped(lengths(seed, mean=1000, spread=spread), 16_384)
        return simulated(rules=synchronous(16, 32), engines=[rates] * 2, workload=work, prompts=16, barrier=barrier)

    tailed, even = StepCosts(base=0.010, per_sequence=0.00005, slots=64), StepCosts(base=0.010, slots=64)
    complete, single = (run(1.2, tailed, barrier) for barrier in ("group", "none"))
    return {
        "ratio": round(complete.seconds / single.seconds, 2),
        "control": round(run(0.0, even, "group").seconds / run(0.0, even, "none").seconds, 3),
        "plot": Plot(
            title="A group that is one request keeps its slots for its longest answer; single requests fill them again",
            x="seconds",
            y="answers that are not there yet",
            lines={
                "a request for each group": counted(complete.alive),
                "single requests": counted(single.alive),
            },
            drawn_as="steps",
        ),
        "inputs": "log-normal lengths, mean 1000, deviation of the logarithm 1.2, at most 16,384; 64 slots an engine; "
        "control: equal lengths",
    }


def redundancy(seed: int, prompts: int = 288) -> dict[str, Any]:
    """36 groups of 9 are started where 32 of 8 are needed, against 32 of 8."""

    def run(shape: float | None, tail: float) -> Came:
        rules = synchronous(32, 8, tail=tail)
        work = failing(seed, shape=shape)
        engines = [StepCosts(base=0.010, per_sequence=0.0, slots=1024)] * 2
        return simulated(rules=rules, engines=engines, workload=work, prompts=prompts)

    plain, more = run(1.2, 0.0), run(1.2, 1.125)
    return {
        "ratio": round(plain.seconds / more.seconds, 2),
        "control": round(run(None, 0.0).seconds / run(None, 1.125).seconds, 3),
        "plot": Plot(
            title="Without redundancy each batch waits for its slowest environment",
            x="batch",
            y="seconds until it was whole",
            lines={
                name: (range(1, len(came.rollout_seconds) + 1), came.rollout_seconds)
                for name, came in (("32 groups of 8", plain), ("the first 32 of 36, 8 of 9", more))
            },
            drawn_as="points",
        ),
        "inputs": "four turns, environments Pareto 1.2 from 2 s to 600 s; control: all 2 s",
    }


def asynchrony(seed: int, prompts: int = 64) -> dict[str, Any]:
    """Each trajectory continues when its own environment has answered, against a batch that steps together."""

    def ratio(variation: float) -> float:
        def took(barrier: str) -> float:
            return simulated(
                rules=synchronous(32, 8),
                engines=[StepCosts(base=0.010, slots=1024)] * 2,
                workload=delays(seed, variation=variation),
                prompts=prompts,
                barrier=barrier,
            ).seconds

        return took("turn") / took("none")

    ratios = {item: ratio(item) for item in (0.0, 0.25, 0.5, 1.0, 2.0)}
    return {
        "ratio": round(ratios[1.0], 2),
        "by_variation": {str(item): round(ratios[item], 2) for item in (0.25, 0.5, 1.0, 2.0)},
        "control": round(ratios[0.0], 3),
        "plot": Plot(
            title="The more the environments' times differ, the more a batch that steps together waits",
            x="coefficient of variation of the environments' times",
            y="seconds of it over those of trajectories by themselves",
            lines={"simulated": (list(ratios), list(ratios.values()))},
        ),
        "inputs": "eight turns of 100 tokens, environments log-normal around 10 s; control: all 10 s",
    }


# --------------------------------------------------------------------------- RollArt (arXiv:2512.22560)

H20 = StepCosts(base=0.020, per_sequence=0.001, prefill=1480, slots=64)
H800 = StepCosts(base=0.020 * 4.0 / 3.35, per_sequence=0.001 * 4.0 / 3.35, prefill=9890, slots=64)


def reading_or_writing(seed: int) -> Workload:
    """Prompts of even number read 2000 tokens a turn and write 30, the others read 100 and write 200."""

    def workload(prompt: int, member: int) -> list[SimulatedTurn]:
        draw = np.random.default_rng((seed, prompt, member))
        read, written = (2000, 30) if prompt % 2 == 0 else (100, 200)
        factors = draw.lognormal(-0.125, 0.5, size=(4, 3))
        return [SimulatedTurn(float(read * a), float(max(2.0, written * b)), float(0.5 * c)) for a, b, c in factors]

    return workload


def affinity(seed: int) -> dict[str, Any]:
    """Two environments on two kinds of hardware: the pool learns who serves whom cheapest, against the least loaded."""

    def run(park: dict[str, list[StepCosts]], work: Workload, *, reported: bool) -> Came:
        return simulated(
            rules=SchedulingRules(groups=8, size=4, staleness=1, concurrency=48),
            engines=[rates for item in park.values() for rates in item],
            hardware=[name if reported else "" for name, item in park.items() for _ in item],
            workload=work,
            kind=lambda prompt: "writes" if prompt % 2 else "reads",
            prompts=160,
        )

    park, even = {"H20": [H20] * 3, "H800": [H800]}, {"a": [H20] * 2, "b": [H20] * 2}
    mixed, one = reading_or_writing(seed), delays(seed, variation=0.5, mean=0.5, turns=4)
    blind, learned = (run(park, mixed, reported=reported) for reported in (False, True))
    return {
        "ratio": round(blind.seconds / learned.seconds, 2),
        "control": round(run(even, one, reported=False).seconds / run(even, one, reported=True).seconds, 3),
        "plot": Plot(
            title="Who reads much goes to the hardware that reads fast, as soon as that is known",
            x="seconds",
            y="turns a second",
            lines={
                f"the environment that {kind}, on {hardware}": per_second(
                    [(at, 1) for at, *where in learned.turns if where == [kind, hardware]], 20.0, learned.seconds
                )
                for kind in ("reads", "writes")
                for hardware in park
            },
        ),
        "theirs": "1.30 to 1.68",
        "inputs": "three servers as H20 and one as H800 (148 and 989 TFLOPS, 4.0 and 3.35 TB/s); four turns, of 2000 "
        "tokens read and 30 written or 100 and 200; 48 trajectories at once; control: equal servers, one environment",
    }


STALEST = 4  # versions


def staleness(seed: int, steps: int = 300) -> dict[str, Any]:
    """The bound on staleness chosen during a run, against each bound that is held: effective samples a second.

    Held are also bounds on running ahead alone (`ahead`), under which stragglers of up to four versions are used.
    """

    def run(work: Workload, drift: Callable[[int], float], stalest: int, bound: Bound | None) -> Came:
        return simulated(
            rules=SchedulingRules(groups=4, size=2, staleness=stalest, concurrency=64),
            engines=[StepCosts(base=0.01, slots=64)],
            workload=work,
            prompts=4 * steps,
            trainer=10.0,
            drift=drift,
            bound=bound,
        )

    def worth(*way: Any) -> float:
        came = run(*way)
        return came.effective / came.seconds

    def ratio(work: Workload, drift: Callable[[int], float]) -> dict[str, float]:
        held = [worth(work, drift, bound, None) for bound in range(STALEST + 1)]
        ahead = [worth(work, drift, STALEST, Bound(STALEST, first=n, hold=1 << 30)) for n in range(STALEST)]
        came = run(work, drift, STALEST, Bound(STALEST))
        bounds.append(came.bounds)
        chosen = came.effective / came.seconds
        return {"over_best_held": round(chosen / max(held), 3), "over_best_ahead": round(chosen / max(ahead), 3)}

    bounds = list[list[int]]()

    short, long = (lengths(seed, mean=mean, spread=0.6) for mean in (300.0, 2500.0))
    even = lengths(seed, mean=1000, spread=0.8)
    same = lengths(seed, mean=100, spread=0.0)
    return {
        "slower_drift": ratio(even, lambda step: 0.7 if step < steps / 2 else 0.03),
        "longer_answers": ratio(lambda n, member: (short if n < 2 * steps else long)(n, member), lambda step: 0.15),
        "steady": ratio(even, lambda step: 0.1),
        "plot": Plot(
            title=f"The run changes at step {steps // 2}, and the chosen bound with it",
            x="step",
            y="versions by which rollouts may run ahead",
            lines={
                name: (range(1, len(item) + 1), item)
                for name, item in zip(
                    ("the policy changes fast, later slowly", "answers become longer", "steady"), bounds, strict=True
                )
            },
            drawn_as="steps",
        ),
        "control": round(worth(same, lambda step: 0.0, 1, None) / worth(same, lambda step: 0.0, STALEST, Bound(4)), 3),
        "inputs": "four groups of two, a training step takes 10 s; a sample weighs exp(-drift x lag); drift 0.7, from "
        "the middle on 0.03; 0.15 while answers become eight times longer; 0.1; control: answers of a second, no drift",
    }


# --------------------------------------------------------------------------- RollPacker (arXiv:2509.21009)

PACKER = {  # model: longest answer, seconds of a decoding step, their rollout times without and with tail batching
    "7B": (8_192, 82.0 / 8_192, 82.0, 47.0),
    "14B": (16_384, 277.0 / 16_384, 277.0, 88.0),
    "32B": (32_768, 673.0 / 32_768, 673.0, 170.0),
}


def tail(seed: int, rounds: int = 10) -> dict[str, Any]:
    """Rounds of 64 prompts x 8 with and without tail batching.

    The step of a decoding engine is chosen so that the longest answer takes the published time of the baseline; what
    tail batching then takes is the prediction.
    """
    result: dict[str, Any] = {}
    lines: dict[str, Line] = {}
    for model, (limit, step, theirs_plain, theirs) in PACKER.items():
        work = capped(lengths(seed, mean=2000, spread=1.4, of_prompt=0.6), limit)
        engines = [StepCosts(base=step, slots=1024)]
        came = [
            simulated(rules=synchronous(64, 8, tail=factor), engines=engines, workload=work, prompts=64 * rounds)
            for factor in (0.0, 1.25)
        ]
        plain, packed = (item.rollout_seconds for item in came)
        if model == "14B":
            names = ("each round waits for its longest answer", "tail batching")
            lines = {name: counted(item.alive, 2 * theirs_plain) for name, item in zip(names, came, strict=True)}
        result[model] = {
            "plain_s": round(float(np.mean(plain)), 1),
            "tail_s": round(float(np.mean(packed)), 1),
            "theirs_plain_s": theirs_plain,
            "theirs_tail_s": theirs,
            "ratio": round(float(np.mean(plain) / np.mean(packed)), 2),
        }
    even = [
        simulated(
            rules=synchronous(64, 8, tail=factor),
            engines=[StepCosts(base=0.01, slots=256)] * 4,
            workload=lengths(seed, mean=1500, spread=0.0),
            prompts=64 * rounds,
        ).seconds
        for factor in (0.0, 1.25)
    ]
    result["control"] = round(even[0] / even[1], 3)
    result["resumes"] = _gone_on(seed, rounds)
    result["plot"] = Plot(
        title="Short rounds put long answers off until a round has only such: few slots idle (14B)",
        x="seconds",
        y="answers on their way",
        lines=lines,
        drawn_as="steps",
    )
    result["inputs"] = (
        "log-normal lengths, mean 2000, deviation of the logarithm 1.4, 0.6 of its variance of the prompt; an engine "
        "is not slower for more answers"
    )
    return result


def _gone_on(seed: int, rounds: int, turns: int = 16) -> dict[str, float]:
    """A run in which what was put off restarts, over one in which it continues, in episodes of so many turns: seconds,
    by the tokens that the engines read per second, and sampled tokens."""
    complete = capped(lengths(seed, mean=2000, spread=1.4, of_prompt=0.6), 16_384)

    def episodes(prompt: int, member: int) -> list[SimulatedTurn]:
        (answer,) = complete(prompt, member)
        return [SimulatedTurn(0, max(1, answer.tokens // turns), 0.5)] * turns

    result: dict[str, float] = {}
    for prefill in (10_000, 100_000):
        redo, goes_on = (
            simulated(
                rules=msgspec.structs.replace(synchronous(64, 8, tail=1.25), tail_resumes=resumes),
                engines=[StepCosts(base=277.0 / 16_384, slots=1024, prefill=prefill)],
                workload=episodes,
                prompts=64 * rounds,
            )
            for resumes in (False, True)
        )
        result[f"seconds_reading_{prefill}"] = round(redo.seconds / goes_on.seconds, 3)
    return result | {"sampled": round(redo.sampled / goes_on.sampled, 3)}


SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    "queue": queue,
    "replication": replication,
    "redundancy": redundancy,
    "asynchrony": asynchrony,
    "affinity": affinity,
    "staleness": staleness,
    "tail": tail,
    "mux": shared.mux,
    "harvest": shared.harvest,
    "parallelism": parallel.metrics,
    "handover": handover.metrics,
    "balance": balancing.metrics,
}
