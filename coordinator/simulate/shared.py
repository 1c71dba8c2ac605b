"""The scenarios in which something is shared: jobs that take turns on machines, rollouts next to the users of an
engine.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from coordinator.decide import multiplex, packing
from coordinator.simulate import jobs, serving
from coordinator.simulate.plot import Plot, PlotSpan, per_second
from rollout.decide.engines.headroom import Budget, StepCost

# --------------------------------------------------------------------------- RollMux (arXiv:2512.11306)


def drawn_jobs(seed: int, count: int) -> list[multiplex.SharedJob]:
    """Models of three sizes; a job's training takes between 0.4 and 1.6 of its rollout."""
    draw = np.random.default_rng(seed)
    result = []
    for number in range(count):
        nodes, memory = [(1, 150.0), (2, 250.0), (4, 350.0)][int(draw.integers(3))]
        rollout = float(draw.uniform(100, 600))
        result.append(
            multiplex.SharedJob(
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
    return result


PRICES = multiplex.Prices(rollout_node=8 * 1.85, train_node=8 * 5.28, rollout_gb=1024, train_gb=1024)
COLOCATED_ROLLOUT = 1.25  # seconds of rollout on training machines for one on rollout machines
MIN_PHASE_SHARE = 0.7  # of the worst case, that a phase takes


def _turns(courses: list[jobs.Course]) -> Plot:
    """The first steps of some groups."""
    spans = [
        PlotSpan(f"group {number + 1}, {kind} machine {machine + 1}", phase.begin, phase.end, phase.job)
        for number, course in enumerate(courses)
        for kind, machine in sorted({(phase.kind, phase.machine) for phase in course.phases})
        for phase in course.phases
        if (phase.kind, phase.machine) == (kind, machine) and phase.end < course.seconds / 3
    ]
    title = "While one job of a group trains, another one rolls out on the machines that would be idle"
    return Plot(title=title, x="seconds", y="", spans=spans)


def mux(seed: int, count: int = 100, steps: int = 12) -> dict[str, Any]:
    """Jobs in co-execution groups against each on machines of its own, and against each on training machines alone.

    The rent is what the machines cost per hour; the cost of a step counts also that a job in a group takes longer.
    """
    drawn = drawn_jobs(seed, count)

    def durations(job: multiplex.SharedJob, step: int) -> tuple[float, float]:
        shares = np.random.default_rng((seed, int(job.name.removeprefix("job-")), step)).uniform(
            MIN_PHASE_SHARE, 1.0, size=2
        )
        return job.rollout * float(shares[0]), job.train * float(shares[1])

    def of_steps(groups: list[multiplex.JobGroup], tail_from: float = 1.0) -> tuple[float, float]:
        """Cost of one step of all jobs, and the slowest job's mean step in multiples of what it may take."""
        cost = worst = 0.0
        for group in groups:
            switch = 2.0 if len(group.members) > 1 else 0.0
            course = jobs.run(group, durations, steps=steps, switch=switch, tail_from=tail_from)
            cost += group.cost(PRICES) * course.seconds / 3600 / steps
            worst = max(worst, *(course.slowdown[item.job.name] / item.job.slowdown for item in group.members))
            if len(group.members) > 1 and len(courses) < 3:
                courses.append(course)
        return cost, worst

    courses = list[jobs.Course]()
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
        "control": round(multiplex.total([multiplex.alone(item) for item in impatient], PRICES) / apart, 3),
        "theirs": "1.84 and 1.38",
        "plot": _turns(courses),
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
    modes: list[serving.Mode] = ["alone", "headroom", "naive"]
    served = {mode: serving.serve(traffic, PROMISED, STEP, mode) for mode in modes}
    nobody = serving.Traffic(arrivals=[60.0], prompts=[1], answers=[1])
    empty = {mode: serving.serve(nobody, PROMISED, STEP, mode) for mode in modes[1:]}
    limit = empty["naive"].rollout_tokens / empty["naive"].seconds  # tokens a second of an engine without users
    idle = limit * served["headroom"].seconds - sum(traffic.answers)
    shown = min(240.0, served["headroom"].seconds)
    metrics: dict[str, Any] = {"requests": requests}
    for mode, came in served.items():
        metrics[mode] = {
            "violations": came.violations(PROMISED),
            "ttft_p99_s": round(float(np.percentile(came.ttft, 99)), 3),
            "tpot_p99_s": round(float(np.percentile(came.tpot, 99)), 4),
            "rollout_tokens_per_s": round(came.rollout_tokens / came.seconds),
        }
    return metrics | {
        "cuts": served["headroom"].cuts,
        "plot": Plot(
            title="Rollouts get less while many users come",
            x="seconds",
            y="a second",
            lines={
                "tokens of rollouts, in hundreds": per_second(
                    [(at, tokens / 100) for at, tokens in served["headroom"].steps], 2.0, shown
                ),
                "users who come": per_second([(at, 1) for at in traffic.arrivals], 2.0, shown),
            },
        ),
        "harvested_share_of_idle": round(served["headroom"].rollout_tokens / idle, 2),
        "control": round(empty["headroom"].rollout_tokens / empty["naive"].rollout_tokens, 3),
        "inputs": "3.5 requests a second, 4.2 times as many for ten seconds of each minute, prompts log-normal around "
        "245 and answers around 100 tokens; a step takes 12 ms, 0.12 more for each answer and 0.03 for each token of "
        "prompt; 1 s to the first token, 36 ms from token to token, two fifths of it left "
        "unused; 100 rollouts of 2,000 tokens each in a cache of 400,000",
    }
