"""What the simulation says that rollouts get on a real engine that serves users.

Owns: what the engine's steps cost, measured where users and rollouts are not together. Does not own: playing them
(bench.harness.lent_engine), the simulation (coordinator.simulate.serving).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from bench.harness.lent_engine import ANSWER, LIVE, READ, Seen, StepSeen, slices
from coordinator.simulate import serving
from rollout.decide.engines.lending import Lending
from rollout.decide.engines.slack import Budget, StepCost

AT_ONCE = 0.010  # seconds after a step in which the next one begins, if there is something to do
MODES: tuple[serving.Mode, ...] = ("slack", "naive")


def measured(steps: list[StepSeen], quiet: list[tuple[float, float]]) -> tuple[StepCost, Iterator[float]]:
    """What steps cost in the slices `quiet`, and how many times of that they took, in the order in which they did:
    those that something held up come together. A step lasts from the end of the one before it."""
    found = [
        (after.answers, after.prompt_tokens, after.ended - before.ended)
        for before, after in itertools.pairwise(steps)
        if after.began - before.ended < AT_ONCE and any(began <= after.began < ended for began, ended in quiet)
    ]
    if not found:
        raise ValueError("no step of users alone or of rollouts alone is in the engine's log: play more requests")
    answers, tokens, took = np.array(found).T
    line = np.stack([np.ones(len(found)), answers, tokens], axis=1)
    base, each, token = (float(part) for part in np.linalg.lstsq(line / took[:, None], np.ones(len(found)))[0])
    cost = StepCost(base=max(base, 1e-4), per_answer=max(each, 1e-6), per_prompt_token=max(token, 1e-6))
    scatter = [seconds / cost.step(count, read) for count, read, seconds in found]
    return cost, itertools.cycle(scatter)


def foretold(
    traffic: serving.Traffic, every: float, budget: Budget, steps: list[StepSeen], seen: Mapping[str, Seen]
) -> dict[str, float]:
    """Rollouts' tokens a second in the simulation over those that were seen, within the slack and in one queue.

    A simulated slice begins with what the engine had learned of its steps until then.
    """
    cost, scatter = measured(steps, [*seen["alone"].slices, *seen["slack"].empty_slices, *seen["naive"].empty_slices])
    found: dict[str, float] = {}
    for mode in MODES:
        came = list[serving.Served]()
        for part, (began, _) in zip(slices(traffic, every), seen["slack"].slices, strict=True):
            lending = Lending(budget)
            for step in steps:
                if step.ended < began:
                    lending.took(step.answers, step.prompt_tokens, step.ended - step.began)
            served = serving.serve(
                part, budget, cost, mode, rollouts=LIVE, version_every=10.0, reads=READ / float(np.mean(ANSWER)),
                prompt=READ, lending=lending, varied=scatter.__next__,
            )  # fmt: skip
            came.append(served)
        said = sum(each.rollout_tokens for each in came) / sum(each.seconds for each in came)
        found[mode] = round(said / (seen[mode].rollout_tokens / seen[mode].seconds), 3)
    return found
