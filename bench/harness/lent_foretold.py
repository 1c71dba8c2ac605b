"""What the simulation says that rollouts get on a real engine that serves users.

Owns: how the engine's steps go, measured where users and rollouts are not together. Does not own: playing them
(bench.harness.lent_engine), the simulation (coordinator.simulate.serving).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from bench.harness.lent_engine import ANSWER, LIVE, READ, Seen, StepSeen, slices
from coordinator.simulate import serving
from coordinator.simulate.serving import Ran
from rollout.decide.engines.lending import Lending
from rollout.decide.engines.slack import CHUNK, Budget

AT_ONCE = 0.010  # seconds after a step in which the next one begins, if there is something to do
LIKE = 30  # steps, of which one is drawn
CHANGE = 1.0  # seconds of a slice in which the bench, which ends the requests of the one before, holds up the engine
Slices = list[tuple[float, float]]  # when they began and ended
MODES: tuple[serving.Mode, ...] = ("slack", "naive")


class Pair(NamedTuple):
    """A step, and how the next one followed on it."""

    step: StepSeen
    next: StepSeen


def measured(steps: list[StepSeen], alone: Slices, empty: Slices, seed: int = 0) -> Callable[[int, int, int], Ran]:
    """How steps went in the slices of users alone, and of rollouts alone, which are users like others there.

    A step goes as one of the `LIKE` seen that answered and read about as much. How old its tokens are when the next one
    is chosen is a line over the users who were told theirs, and over the rollouts that got theirs.
    """
    pairs = [Pair(*each) for each in itertools.pairwise(steps) if each[1].began - each[0].ended < AT_ONCE]
    users = [each for each in pairs if _within(each.next, alone)]
    rollouts = [each for each in pairs if _within(each.next, empty)]
    if not users or not rollouts:
        raise ValueError("no step of users alone or of rollouts alone is in the engine's log: play more requests")
    found = [*users, *rollouts]
    most = max(step.answers for step, _ in found), CHUNK
    where = np.array([(step.answers, step.prompt_tokens) for step, _ in found]) / most
    aged = [(1, next.users, 0, next.age) for _, next in users if next.users]
    aged += [(1, 0, next.users, next.age) for _, next in rollouts if next.users]
    *over, ages = np.array(aged).T
    line = np.linalg.lstsq(np.stack(over, axis=1), ages)[0]
    draw = random.Random(seed)

    def ran(users: int, rollouts: int, read: int) -> Ran:
        away = np.square(where - np.array((users + rollouts, read)) / most).sum(axis=1)
        like = np.argpartition(away, min(LIKE, len(away) - 1))[:LIKE]
        step, next = found[draw.choice(like)]
        rest = next.began - step.ended
        return Ran(step.ended - step.began, rest, max(rest, float(line @ (1, users, rollouts))))

    return ran


def _within(step: StepSeen, slices: Slices) -> bool:
    return any(began <= step.began < ended for began, ended in slices)


def foretold(
    traffic: serving.Traffic, every: float, budget: Budget, steps: list[StepSeen], seen: Mapping[str, Seen]
) -> dict[str, float]:
    """Rollouts' tokens a second in the simulation over those that were seen, within the slack and in one queue.

    A simulated slice begins with what the engine had learned of its steps when the bench had changed to it.
    """
    ran = measured(steps, seen["alone"].slices, [*seen["slack"].empty_slices, *seen["naive"].empty_slices])
    found: dict[str, float] = {}
    for mode in MODES:
        came = list[serving.Served]()
        for part, (began, _) in zip(slices(traffic, every), seen["slack"].slices, strict=True):
            lending = Lending(budget)
            for step in steps:
                if step.ended < began + CHANGE:
                    lending.took(step.answers, step.prompt_tokens, step.ended - step.began)
            served = serving.serve(
                part, budget, lending.cost, mode, rollouts=LIVE, version_every=10.0, prompt=READ,
                reads=READ / float(np.mean(ANSWER)), lending=lending, ran=ran,
            )  # fmt: skip
            came.append(served)
        said = sum(each.rollout_tokens for each in came) / sum(each.seconds for each in came)
        found[mode] = round(said / (seen[mode].rollout_tokens / seen[mode].seconds), 3)
    return found
