"""What `pagurus simulate` can run: each scenario is a function of a seed and gives its figures and its inputs.

Owns: workloads (laws of lengths and delays), the inputs that are ours. Does not own: the simulated parts.
Every scenario has its ablation (the same without the feature) and a control: a workload where it must not help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from coordinator.decide import multiplex, packing
from coordinator.simulate import balancing, handover, jobs, parallel, serving
from coordinator.simulate.engines import Rates
from coordinator.simulate.rollouts import Came, Plan, Simulated, Turn, Workload
from rollout.decide.bound import Bound
from rollout.decide.engines.slack import Budget, StepCost
from rollout.decide.view import Rules

ALL_AT_ONCE = 1_000_000  # trajectories
ENGINE = Rates(base=0.010, per_sequence=0.0002, slots=64)


def synchronous(groups: int, size: int, **more: Any) -> Rules:
    return Rules(groups=groups, size=size, staleness=0, concurrency=ALL_AT_ONCE, **more)


def lengths(seed: int, *, mean: float, spread: float, of_prompt: float = 0.0) -> Workload:
    """One turn of log-normal length. `spread`: deviation of its logarithm, of which the share `of_prompt` (of variance)
    is common to a prompt's members."""

    def workload(prompt: int, member: int) -> list[Turn]:
        common = np.random.default_rng((seed, prompt)).normal() * np.sqrt(of_prompt)
        own = np.random.default_rng((seed, prompt, member + 1)).normal() * np.sqrt(1 - of_prompt)
        return [Turn(0, float(mean * np.exp(spread * (common + own) - spread**2 / 2)))]

    return workload


def capped(workload: Workload, most: float) -> Workload:
    """No answer is longer than an engine's limit."""
    return lambda prompt, member: [
        Turn(turn.prompt, min(turn.tokens, most), turn.environment) for turn in workload(prompt, member)
    ]


def delays(seed: int, *, variation: float, mean: float = 10.0, turns: int = 8, tokens: float = 100.0) -> Workload:
    """Turns whose environments take log-normal times of this coefficient of variation."""
    width = np.sqrt(np.log(1 + variation**2))

    def workload(prompt: int, member: int) -> list[Turn]:
        draw = np.random.default_rng((seed, prompt, member))
        return [Turn(20, tokens, float(draw.lognormal(np.log(mean) - width**2 / 2, width))) for _ in range(turns)]

    return workload


def failing(seed: int, *, shape: float | None, turns: int = 4) -> Workload:
    """Turns whose environments take Pareto times (`shape`; None: all 2 s), ten minutes at most."""

    def workload(prompt: int, member: int) -> list[Turn]:
        draw = np.random.default_rng((seed, prompt, member))
        return [
            Turn(20, 200, 2.0 if shape is None else min(600.0, 2.0 * float(draw.pareto(shape) + 1)))
            for _ in range(turns)
        ]

    return workload


def simulated(**plan: Any) -> Came:
    return Simulated(Plan(**plan)).run()


# --------------------------------------------------------------------------- ROLL Flash (arXiv:2510.11345)


def queue(seed: int) -> dict[str, Any]:
    """Q answers on K slots take at most Q·mean/K + longest, whatever their lengths: answers do not wait for a batch."""
    held, worst = [], 0.0
    for number in range(20):
        draw = np.random.default_rng((seed, number))
        slots, groups, size = int(draw.integers(2, 65)), int(draw.integers(2, 20)), int(draw.integers(1, 9))
        rates = Rates(base=0.01, slots=slots)
        work = lengths(seed + number, mean=300, spread=float(draw.uniform(0, 2)))
        came = simulated(rules=synchronous(groups, size), engines=[rates], workload=work, prompts=groups)
        seconds = [0.01 * tokens for tokens in came.accepted]
        bound = len(seconds) * float(np.mean(seconds)) / slots + max(seconds)
        held.append(came.seconds <= bound * (1 + 1e-6))
        worst = max(worst, came.seconds / bound)
    return {"runs": len(held), "within_bound": sum(held), "worst_of_bound": round(worst, 3)}


def replication(seed: int) -> dict[str, Any]:
    """16 prompts of 32 answers on two engines: independent requests against one request for a prompt's whole group."""

    def ratio(spread: float, rates: Rates) -> float:
        def took(barrier: str) -> float:
            work = capped(lengths(seed, mean=1000, spread=spread), 16_384)
            return simulated(
                rules=synchronous(16, 32), engines=[rates] * 2, workload=work, prompts=16, barrier=barrier
            ).seconds

        return took("group") / took("none")

    tailed, even = Rates(base=0.010, per_sequence=0.00005, slots=64), Rates(base=0.010, slots=64)
    return {
        "ratio": round(ratio(1.2, tailed), 2),
        "control": round(ratio(0.0, even), 3),
        "inputs": "log-normal lengths, mean 1000, deviation of the logarithm 1.2, at most 16,384; 64 slots an engine; "
        "control: equal lengths",
    }


def redundancy(seed: int) -> dict[str, Any]:
    """36 groups of 9 are started where 32 of 8 are needed, against 32 of 8."""

    def run(shape: float | None, tail: float) -> Came:
        rules = synchronous(32, 8, tail=tail)
        work = failing(seed, shape=shape)
        engines = [Rates(base=0.010, per_sequence=0.0, slots=1024)] * 2
        return simulated(rules=rules, engines=engines, workload=work, prompts=32 * 9)

    plain, more = run(1.2, 0.0), run(1.2, 1.125)
    return {
        "ratio": round(plain.seconds / more.seconds, 2),
        "control": round(run(None, 0.0).seconds / run(None, 1.125).seconds, 3),
        "inputs": "four turns, environments Pareto 1.2 from 2 s to 600 s; control: all 2 s",
    }


def asynchrony(seed: int) -> dict[str, Any]:
    """Each trajectory goes on when its own environment has answered, against a batch that steps together."""

    def ratio(variation: float) -> float:
        def took(barrier: str) -> float:
            return simulated(
                rules=synchronous(32, 8),
                engines=[Rates(base=0.010, slots=1024)] * 2,
                workload=delays(seed, variation=variation),
                prompts=64,
                barrier=barrier,
            ).seconds

        return took("turn") / took("none")

    return {
        "ratio": round(ratio(1.0), 2),
        "by_variation": {str(each): round(ratio(each), 2) for each in (0.25, 0.5, 1.0, 2.0)},
        "control": round(ratio(0.0), 3),
        "inputs": "eight turns of 100 tokens, environments log-normal around 10 s; control: all 10 s",
    }


# --------------------------------------------------------------------------- RollArt (arXiv:2512.22560)

H20 = Rates(base=0.020, per_sequence=0.001, prefill=1480, slots=64)
H800 = Rates(base=0.020 * 4.0 / 3.35, per_sequence=0.001 * 4.0 / 3.35, prefill=9890, slots=64)


def reading_or_writing(seed: int) -> Workload:
    """Prompts of even number read 2000 tokens a turn and write 30, the others read 100 and write 200."""

    def workload(prompt: int, member: int) -> list[Turn]:
        draw = np.random.default_rng((seed, prompt, member))
        read, written = (2000, 30) if prompt % 2 == 0 else (100, 200)
        factors = draw.lognormal(-0.125, 0.5, size=(4, 3))
        return [Turn(float(read * a), float(max(2.0, written * b)), float(0.5 * c)) for a, b, c in factors]

    return workload


def affinity(seed: int) -> dict[str, Any]:
    """Two environments on two kinds of hardware: the pool learns who serves whom cheapest, against the least loaded."""

    def took(park: dict[str, list[Rates]], work: Workload, *, told: bool) -> float:
        return simulated(
            rules=Rules(groups=8, size=4, staleness=1, concurrency=48),
            engines=[rates for each in park.values() for rates in each],
            hardware=[name if told else "" for name, each in park.items() for _ in each],
            workload=work,
            kind=lambda prompt: str(prompt % 2),
            prompts=160,
        ).seconds

    park, even = {"H20": [H20] * 3, "H800": [H800]}, {"a": [H20] * 2, "b": [H20] * 2}
    mixed, one = reading_or_writing(seed), delays(seed, variation=0.5, mean=0.5, turns=4)
    return {
        "ratio": round(took(park, mixed, told=False) / took(park, mixed, told=True), 2),
        "control": round(took(even, one, told=False) / took(even, one, told=True), 3),
        "theirs": "1.30 to 1.68",
        "inputs": "three servers as H20 and one as H800 (148 and 989 TFLOPS, 4.0 and 3.35 TB/s); four turns, of 2000 "
        "tokens read and 30 written or 100 and 200; 48 trajectories at once; control: equal servers, one environment",
    }


STALEST = 4  # versions


def staleness(seed: int, steps: int = 300) -> dict[str, Any]:
    """The bound on staleness chosen while a run goes on, against each bound that is held: effective samples a second.

    Held are also bounds on running ahead alone (`ahead`), under which stragglers of up to four versions are used.
    """

    def worth(work: Workload, drift: Callable[[int], float], stalest: int, bound: Bound | None) -> float:
        came = simulated(
            rules=Rules(groups=4, size=2, staleness=stalest, concurrency=64),
            engines=[Rates(base=0.01, slots=64)],
            workload=work,
            prompts=4 * steps,
            trainer=10.0,
            drift=drift,
            bound=bound,
        )
        return came.effective / came.seconds

    def ratio(work: Workload, drift: Callable[[int], float]) -> dict[str, float]:
        held = [worth(work, drift, bound, None) for bound in range(STALEST + 1)]
        ahead = [worth(work, drift, STALEST, Bound(STALEST, first=n, hold=1 << 30)) for n in range(STALEST)]
        chosen = worth(work, drift, STALEST, Bound(STALEST))
        return {"over_best_held": round(chosen / max(held), 3), "over_best_ahead": round(chosen / max(ahead), 3)}

    short, long = (lengths(seed, mean=mean, spread=0.6) for mean in (300.0, 2500.0))
    even = lengths(seed, mean=1000, spread=0.8)
    same = lengths(seed, mean=100, spread=0.0)
    return {
        "slower_drift": ratio(even, lambda step: 0.7 if step < steps / 2 else 0.03),
        "longer_answers": ratio(lambda n, member: (short if n < 2 * steps else long)(n, member), lambda step: 0.15),
        "steady": ratio(even, lambda step: 0.1),
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


def tail(seed: int) -> dict[str, Any]:
    """Rounds of 64 prompts x 8 with and without tail batching.

    The step of a decoding engine is chosen so that the longest answer takes the published time of the baseline; what
    tail batching then takes is the prediction.
    """
    found: dict[str, Any] = {}
    for model, (most, step, theirs_plain, theirs) in PACKER.items():
        work = capped(lengths(seed, mean=2000, spread=1.4, of_prompt=0.6), most)
        engines = [Rates(base=step, slots=1024)]
        plain, packed = (
            simulated(
                rules=synchronous(64, 8, tail=factor), engines=engines, workload=work, prompts=64 * 10
            ).rollout_seconds
            for factor in (0.0, 1.25)
        )
        found[model] = {
            "plain_s": round(float(np.mean(plain)), 1),
            "tail_s": round(float(np.mean(packed)), 1),
            "theirs_plain_s": theirs_plain,
            "theirs_tail_s": theirs,
            "ratio": round(float(np.mean(plain) / np.mean(packed)), 2),
        }
    even = [
        simulated(
            rules=synchronous(64, 8, tail=factor),
            engines=[Rates(base=0.01, slots=256)] * 4,
            workload=lengths(seed, mean=1500, spread=0.0),
            prompts=64 * 10,
        ).seconds
        for factor in (0.0, 1.25)
    ]
    found["control"] = round(even[0] / even[1], 3)
    found["resumes"] = _gone_on(seed)
    found["inputs"] = (
        "log-normal lengths, mean 2000, deviation of the logarithm 1.4, 0.6 of its variance of the prompt; an engine "
        "is not slower for more answers"
    )
    return found


def _gone_on(seed: int, turns: int = 16) -> dict[str, float]:
    """A run in which what was put off begins anew, over one in which it goes on, in episodes of so many turns: seconds,
    by the tokens that the engines read per second, and sampled tokens."""
    whole = capped(lengths(seed, mean=2000, spread=1.4, of_prompt=0.6), 16_384)

    def episodes(prompt: int, member: int) -> list[Turn]:
        (answer,) = whole(prompt, member)
        return [Turn(0, max(1, answer.tokens // turns), 0.5)] * turns

    found: dict[str, float] = {}
    for prefill in (10_000, 100_000):
        anew, goes_on = (
            simulated(
                rules=msgspec.structs.replace(synchronous(64, 8, tail=1.25), tail_resumes=resumes),
                engines=[Rates(base=277.0 / 16_384, slots=1024, prefill=prefill)],
                workload=episodes,
                prompts=64 * 10,
            )
            for resumes in (False, True)
        )
        found[f"seconds_reading_{prefill}"] = round(anew.seconds / goes_on.seconds, 3)
    return found | {"sampled": round(anew.sampled / goes_on.sampled, 3)}


# --------------------------------------------------------------------------- RollMux (arXiv:2512.11306)


def drawn_jobs(seed: int, count: int) -> list[multiplex.Job]:
    """Models of three sizes; a job's training takes between 0.4 and 1.6 of its rollout."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        nodes, memory = [(1, 150.0), (2, 250.0), (4, 350.0)][int(draw.integers(3))]
        rollout = float(draw.uniform(100, 600))
        found.append(
            multiplex.Job(
                name=f"job-{number}",
                rollout=rollout,
                train=rollout * float(draw.uniform(0.4, 1.6)),
                rollout_nodes=nodes,
                train_nodes=nodes,
                rollout_gb=memory,
                train_gb=memory,
                slowdown=float(draw.uniform(1.25, 2.5)),
            )
        )
    return found


PRICES = multiplex.Prices(rollout_node=8 * 1.85, train_node=8 * 5.28, rollout_gb=1024, train_gb=1024)
COLOCATED_ROLLOUT = 1.25  # seconds of rollout on training machines for one on rollout machines
LEAST = 0.7  # of the worst case, that a phase takes


def mux(seed: int, count: int = 100, steps: int = 12) -> dict[str, Any]:
    """Jobs in co-execution groups against each on machines of its own, and against each on training machines alone.

    The rent is what the machines cost per hour; the cost of a step counts also that a job in a group takes longer.
    """
    drawn = drawn_jobs(seed, count)

    def durations(job: multiplex.Job, step: int) -> tuple[float, float]:
        shares = np.random.default_rng((seed, int(job.name.removeprefix("job-")), step)).uniform(LEAST, 1.0, size=2)
        return job.rollout * float(shares[0]), job.train * float(shares[1])

    def of_steps(groups: list[multiplex.Group], tail_from: float = 1.0) -> tuple[float, float]:
        """Cost of one step of all jobs, and the slowest job's mean step in multiples of what it may take."""
        cost = worst = 0.0
        for group in groups:
            switch = 2.0 if len(group.members) > 1 else 0.0
            course = jobs.run(group, durations, steps=steps, switch=switch, tail_from=tail_from)
            cost += group.cost(PRICES) * course.seconds / 3600 / steps
            worst = max(worst, *(course.slowdown[each.job.name] / each.job.slowdown for each in group.members))
        return cost, worst

    alone, groups = [multiplex.alone(job) for job in drawn], packing.plan(drawn, PRICES)
    rent, (own, _), (shared, worst) = multiplex.total(groups, PRICES), of_steps(alone), of_steps(groups)
    colocated = colocated_rent = 0.0
    for job in drawn:
        colocated_rent += job.train_nodes * PRICES.train_node
        for step in range(steps):
            rollout, train = durations(job, step)
            colocated += job.train_nodes * PRICES.train_node * (rollout * COLOCATED_ROLLOUT + train) / 3600 / steps
    impatient = [msgspec.structs.replace(job, slowdown=1.0, train_gb=PRICES.train_gb) for job in drawn]
    apart = multiplex.total(packing.plan(impatient, PRICES), PRICES)
    return {
        "jobs": count,
        "groups": len(groups),
        "rent_ratio_disaggregated": round(multiplex.total(alone, PRICES) / rent, 2),
        "rent_ratio_colocated": round(colocated_rent / rent, 2),
        "step_cost_ratio_disaggregated": round(own / shared, 2),
        "step_cost_ratio_colocated": round(colocated / shared, 2),
        "step_cost_ratio_with_moved_stragglers": round(own / of_steps(groups, tail_from=0.8)[0], 2),
        "slowest_of_allowed": round(worst, 3),
        "control": round(multiplex.total([multiplex.alone(each) for each in impatient], PRICES) / apart, 3),
        "theirs": "1.84 and 1.38",
        "inputs": "rollout 100 to 600 s, training 0.4 to 1.6 of it, models of 1, 2 or 4 machines of each kind, steps "
        "may take 1.25 to 2.5 times their time alone; rents 1.85 and 5.28 an hour and GPU; phases take 0.7 to 1.0 of "
        "the worst case; a switch takes 2 s; rollouts on training machines 1.25 times as long; control: jobs whose "
        "states fill a machine, and steps that may not take longer",
    }


# --------------------------------------------------------------------------- ROSE (arXiv:2605.06534)

PROMISED = Budget(ttft=1.0, tpot=0.036, margin=0.455)
STEP = StepCost(base=0.012, per_answer=0.00012, per_prompt_token=0.00003)


def harvest(seed: int, requests: int = 10_000) -> dict[str, Any]:
    """Rollouts on a serving engine: within its users' slack, against serving alone and against one queue for all."""
    traffic = serving.bursty(seed, requests=requests, rate=3.5)
    modes: list[serving.Mode] = ["alone", "slack", "naive"]
    served = {mode: serving.serve(traffic, PROMISED, STEP, mode) for mode in modes}
    nobody = serving.Traffic(arrivals=[60.0], prompts=[1], answers=[1])
    empty = {mode: serving.serve(nobody, PROMISED, STEP, mode) for mode in modes[1:]}
    most = empty["naive"].rollout_tokens / empty["naive"].seconds  # tokens a second of an engine without users
    idle = most * served["slack"].seconds - sum(traffic.answers)
    figures: dict[str, Any] = {"requests": requests}
    for mode, came in served.items():
        figures[mode] = {
            "violations": came.violations(PROMISED),
            "ttft_p99_s": round(float(np.percentile(came.ttft, 99)), 3),
            "tpot_p99_s": round(float(np.percentile(came.tpot, 99)), 4),
            "rollout_tokens_per_s": round(came.rollout_tokens / came.seconds),
        }
    return figures | {
        "cuts": served["slack"].cuts,
        "harvested_share_of_idle": round(served["slack"].rollout_tokens / idle, 2),
        "control": round(empty["slack"].rollout_tokens / empty["naive"].rollout_tokens, 3),
        "inputs": "3.5 requests a second, 4.2 times as many for ten seconds of each minute, prompts log-normal around "
        "245 and answers around 100 tokens; a step takes 12 ms, 0.12 more for each answer and 0.03 for each token of "
        "prompt; 1 s to the first token, 36 ms from token to token, two fifths of it left "
        "unused; 100 rollouts of 2,000 tokens each in a cache of 400,000",
    }


SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    "queue": queue,
    "replication": replication,
    "redundancy": redundancy,
    "asynchrony": asynchrony,
    "affinity": affinity,
    "staleness": staleness,
    "tail": tail,
    "mux": mux,
    "harvest": harvest,
    "parallelism": parallel.figures,
    "handover": handover.figures,
    "balance": balancing.figures,
}
