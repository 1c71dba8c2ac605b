"""What the simulation says that rollouts get on a real engine that serves users."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bench.harness.colocated_engine import ANSWER, LIVE, READ, Observed, StepObserved, slices
from coordinator.simulate import serving
from coordinator.simulate.serving import Ran
from rollout.decide.engines.colocation import Colocation
from rollout.decide.engines.headroom import Budget

AT_ONCE = 0.010  # seconds after a step in which the next one begins, if there is something to do
LIKE = 30  # steps, of which one is drawn
CHANGE = 1.0  # seconds of a slice in which the bench, which ends the requests of the one before, holds up the engine
Slices = list[tuple[float, float]]  # when they began and ended
MODES: tuple[serving.Mode, ...] = ("headroom", "naive")


class Pair(NamedTuple):
    """A step, and how the next one followed on it."""

    step: StepObserved
    next: StepObserved


def pairs_of(steps: Sequence[StepObserved], among: Slices) -> list[Pair]:
    """Of these slices."""
    pairs = itertools.starmap(Pair, itertools.pairwise(steps))
    return [item for item in pairs if item.next.began - item.step.ended < AT_ONCE and _within(item.step, among)]


def measured(pairs: list[Pair], seed: int = 0) -> Callable[[int, int, int], Ran]:
    """A step goes as one of the `LIKE` of these that answered as many users and rollouts and read as much, about.

    How old its tokens are when the next one is chosen is a line over the users who were told theirs, and over the
    rollouts that got theirs.
    """
    did = np.array([(step.users, step.answers - step.users, step.prompt_tokens) for step, _ in pairs])
    limit = np.maximum(did.max(axis=0), 1)
    aged = [(1, next.users, step.answers - step.users, next.age) for step, next in pairs if next.users]
    *over, ages = np.array(aged).T
    line = np.linalg.lstsq(np.stack(over, axis=1), ages)[0]
    draw = random.Random(seed)

    def ran(users: int, rollouts: int, read: int) -> Ran:
        away = np.square((did - (users, rollouts, read)) / limit).sum(axis=1)
        like = np.argpartition(away, min(LIKE, len(away) - 1))[:LIKE]
        step, next = pairs[draw.choice(like)]
        rest = next.began - step.ended
        return Ran(step.ended - step.began, rest, max(rest, float(line @ (1, users, rollouts))))

    return ran


def _within(step: StepObserved, slices: Slices) -> bool:
    return any(began + CHANGE <= step.began < ended for began, ended in slices)


def foretold(
    traffic: serving.Traffic, every: float, budget: Budget, steps: list[StepObserved], observed: Mapping[str, Observed]
) -> dict[str, float]:
    """Rollouts' tokens a second in the simulation over those that were seen, within the slack and in one queue.

    A slice is foretold by the steps of the other ones of its mode, which other users had. It begins with what the
    engine had learned of its steps when the bench had changed to it.
    """
    result: dict[str, float] = {}
    for mode in MODES:
        came, played = list[serving.ServingResult](), observed[mode]
        for part, here in zip(slices(traffic, every), played.slices, strict=True):
            others = pairs_of(steps, [item for item in [*played.slices, *played.empty_slices] if item != here])
            if not any(next.users for _, next in others):
                raise ValueError("the engine's log has no other slice to learn from: play more requests")
            came.append(_simulated(part, budget, mode, _learned(budget, steps, here[0] + CHANGE), measured(others)))
        said = sum(item.rollout_tokens for item in came) / sum(item.seconds for item in came)
        result[mode] = round(said / (played.rollout_tokens / played.seconds), 3)
    return result


def _learned(budget: Budget, steps: list[StepObserved], until: float) -> Colocation:
    colocation = Colocation(budget)
    for step in steps:
        if step.ended < until:
            colocation.took(step.answers, step.prompt_tokens, step.ended - step.began)
    return colocation


def _simulated(
    part: serving.Traffic,
    budget: Budget,
    mode: serving.Mode,
    colocation: Colocation,
    ran: Callable[[int, int, int], Ran],
) -> serving.ServingResult:
    def as_observed(users: int, rollouts: int, read: int) -> Ran:  # in one queue all are users
        return ran(users, rollouts, read) if mode == "headroom" else ran(users + rollouts, 0, read)

    return serving.serve(
        part, budget, colocation.cost, mode, rollouts=LIVE, version_every=10.0, prompt=READ,
        reads=READ / float(np.mean(ANSWER)), colocation=colocation, ran=as_observed,
    )  # fmt: skip
