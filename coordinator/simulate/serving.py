"""A serving engine, step by step on a virtual clock, with rollouts in what its users leave."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from rollout.decide.engines.colocation import Colocation
from rollout.decide.engines.headroom import CHUNK, Budget, EngineView, HeadroomStep, StepCost, WaitingRequest, next_step

Mode = Literal["alone", "headroom", "naive"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Users' requests of one engine: when, how many tokens of prompt, how many of answer."""

    arrivals: Sequence[float]
    prompts: Sequence[int]
    answers: Sequence[int]


def bursty(seed: int, *, requests: int, rate: float, burst: float = 4.2, every: float = 60.0) -> Traffic:
    """Poisson arrivals; in ten seconds of each `every` the rate is `burst` times as high, from one moment on."""
    draw = np.random.default_rng(seed)
    now, arrivals = 0.0, list[float]()
    while len(arrivals) < requests:
        high = now % every >= every - 10.0
        now += float(draw.exponential(1 / (rate * (burst if high else 1.0))))
        arrivals.append(now)
    return Traffic(
        arrivals=arrivals,
        prompts=[int(item) for item in np.clip(draw.lognormal(5.5, 0.8, requests), 16, 2048)],
        answers=[int(item) for item in np.clip(draw.lognormal(4.6, 0.7, requests), 8, 512)],
    )


@dataclass
class ServingResult:
    """What users saw, and what rollouts got."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)  # of each token after the first
    seconds: float = 0.0
    rollout_tokens: int = 0
    cuts: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)  # when each ended, and rollouts' tokens in it

    def stepped(self, now: float, rollouts: int) -> None:
        self.rollout_tokens += rollouts
        self.steps.append((now, rollouts))

    def violations(self, budget: Budget) -> int:
        return sum(item > budget.ttft for item in self.ttft) + sum(item > budget.tpot for item in self.tpot)


class Ran(NamedTuple):
    """A step of an engine, in seconds."""

    took: float
    rest: float = 0.0  # until the next one is chosen
    age: float = 0.0  # of its tokens then


@dataclass
class _User:
    arrival: float
    left: int
    answer: int
    context: int
    last: float = 0.0


def serve(
    traffic: Traffic,
    budget: Budget,
    cost: StepCost,
    mode: Mode,
    *,
    rollouts: int = 256,
    cache: int = 400_000,
    context: int = 2_000,
    version_every: float = 120.0,
    reads: float = 0.0,
    prompt: float = 1.0,
    colocation: Colocation | None = None,
    ran: Callable[[int, int, int], Ran] | None = None,
) -> ServingResult:
    """Until every user is answered.

    `rollouts`: answers of rollouts that always want a token, each holding `context` tokens of cache out of `cache`.
    `version_every`: seconds between two versions of the weights. `reads`: tokens of prompts that a rollout reads for
    each token that it samples, `prompt` at a time, while it samples none. Under `naive` they are served as users are.
    `colocation`: it chooses the steps, by what it has learned of their cost. `ran`: how one goes that answers so many
    users and rollouts and reads so many tokens of prompts, where `cost` does not say it.
    """
    came, now, number = ServingResult(), 0.0, 0
    waiting: deque[_User] = deque()
    running: list[_User] = []
    begun = live = 0 if mode == "alone" else min(rollouts, cache // context // 2)
    frozen, version = False, 0
    pending = live * prompt if reads else 0.0  # tokens of rollouts' prompts
    while number < len(traffic.arrivals) or waiting or running:
        number = _arrive(traffic, number, now, waiting)
        if int(now / version_every) > version:
            version, frozen, live = int(now / version_every), False, begun
        if not waiting and not running and not live:
            now = traffic.arrivals[number]
            continue
        reading = math.ceil(pending / prompt)
        view = _view(waiting, running, max(0, live - reading), int(pending), cache, live * context, frozen=frozen)
        step = next_step(view, budget, cost, now) if colocation is None else colocation.step(view, now)
        step = _in_turn(view, step) if mode == "naive" else step
        if step.cut:
            came.cuts, frozen, live, pending = came.cuts + 1, True, 0, 0.0
        answers, read = len(running) + step.rollouts, step.users_prompt + step.rollout_prompt
        took, rest, age = Ran(cost.step(answers, read)) if ran is None else ran(len(running), step.rollouts, read)
        if colocation is not None:
            colocation.took(answers, read, took)
        now += took + rest
        pending += reads * step.rollouts - step.rollout_prompt
        came.stepped(now - age, step.rollouts)
        _answer(running, now - age, came)
        _read(waiting, running, step.users_prompt, now - age, came)
    came.seconds = now
    return came


def _arrive(traffic: Traffic, number: int, now: float, waiting: deque[_User]) -> int:
    """From this user on, all that have come until now; who is next."""
    while number < len(traffic.arrivals) and traffic.arrivals[number] <= now:
        requested = traffic.prompts[number]
        waiting.append(_User(traffic.arrivals[number], requested, traffic.answers[number], requested))
        number += 1
    return number


def _view(
    waiting: deque[_User], running: list[_User], rollouts: int, pending: int, cache: int, held: int, *, frozen: bool
) -> EngineView:
    return EngineView(
        waiting=[WaitingRequest(user.arrival, user.left) for user in list(waiting)[:64]],
        last_tokens=[user.last for user in running],
        rollouts=rollouts,
        rollout_prompt=pending,
        free=cache - held - sum(user.context + user.answer for user in running),
        target=sum(user.context + user.answer for user in waiting),
        held=held,
        frozen=frozen,
    )


def _in_turn(view: EngineView, step: HeadroomStep) -> HeadroomStep:
    """Where rollouts are users like all others."""
    return HeadroomStep(step.users_prompt, view.rollouts, min(CHUNK - step.users_prompt, view.rollout_prompt))


def _answer(running: list[_User], now: float, came: ServingResult) -> None:
    for user in running:
        came.tpot.append(now - user.last)
        user.last, user.answer = now, user.answer - 1
    running[:] = [user for user in running if user.answer > 0]


def _read(waiting: deque[_User], running: list[_User], tokens: int, now: float, came: ServingResult) -> None:
    while tokens and waiting:
        user = waiting[0]
        part = min(tokens, user.left)
        user.left, tokens = user.left - part, tokens - part
        if user.left == 0:
            waiting.popleft()
            came.ttft.append(now - user.arrival)
            user.last, user.answer = now, user.answer - 1
            running.append(user)
