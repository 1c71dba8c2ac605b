"""What a real engine's users and rollouts saw, mode by mode, and why tokens were late."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.harness import aftermath, colocated_engine, colocated_prediction
from bench.harness.colocated_engine import Observed, StepObserved, Token
from bench.harness.drawn_runs import MODEL
from bench.harness.paced_engine import paced
from coordinator.simulate import serving
from rollout import step_log
from rollout.decide.engines.colocation import Colocation, ColocationDecision
from rollout.decide.engines.headroom import Budget
from rollout.engine import launch
from rollout.store import decisions

TTFT = 0.5  # seconds to the first token that users were promised
CLOCKS = {"embedded": time.monotonic, "vllm": time.time}  # of their steps
SLOTS = 96


class Users(NamedTuple):
    """Who is served: so many requests, as many a second outside of bursts; medians of tokens; seconds of a slice."""

    requests: int
    rate: float
    prompt: float
    answer: float
    every: float

    def traffic(self) -> serving.Traffic:
        drawn = serving.bursty(0, requests=self.requests, rate=self.rate, every=self.every)
        return serving.Traffic(
            arrivals=drawn.arrivals,
            prompts=_scaled(drawn.prompts, self.prompt, 400),
            answers=_scaled(drawn.answers, self.answer, 128),
        )


def _scaled(drawn: Any, median: float, limit: int) -> list[int]:
    return [int(item) for item in np.clip(np.array(drawn) * median / np.median(drawn), 2, limit)]


def colocated(users: Users, kind: str, step_ms: float, tpot: float, margin: float, log: Path | None) -> dict[str, Any]:
    """Users alone, rollouts within their slack, rollouts in one queue with them."""
    budget = Budget(ttft=TTFT, tpot=tpot, margin=margin)
    with aftermath.TemporaryDirectory("pagurus-steps-") as home:
        directory = log or Path(home)
        directory.mkdir(exist_ok=True)
        observed = asyncio.run(_played(users, kind, budget, step_ms, directory))
        steps = [step for path in directory.glob(step_log.PATTERN) for step in steps_of(path)]
        said = colocated_prediction.foretold(users.traffic(), users.every, budget, steps, observed)
        replayed = msgspec.to_builtins(decisions.replay(directory))
        return _compared(budget, observed, steps) | {"simulated_over_live": said, "replayed": replayed}


async def _played(users: Users, kind: str, budget: Budget, step_ms: float, directory: Path) -> dict[str, Observed]:
    plain = launch.vllm(slots=SLOTS) if kind == "vllm" else launch.embedded(slots=SLOTS)
    server = launch.colocated(plain, budget, steps=directory)
    server, traffic, clock = paced(server, step_ms) if step_ms else server, users.traffic(), CLOCKS[kind]
    async with colocated_engine.started(server, MODEL) as engine:
        came = await colocated_engine.play(engine, traffic, colocated_engine.MODES, users.every, clock)
    observed = {str(mode): item for mode, item in came.items()}
    if kind == "vllm":
        async with colocated_engine.started(colocated_engine.unlent(plain), MODEL) as engine:
            observed["priority"] = (await colocated_engine.play(engine, traffic, ("headroom",), users.every, clock))[
                "headroom"
            ]
    return observed


def _compared(budget: Budget, observed: dict[str, Observed], steps: list[StepObserved]) -> dict[str, Any]:
    alone, headroom, naive = (observed[mode] for mode in colocated_engine.MODES)
    limit, colocated = (observed.empty_tokens / observed.empty_seconds for observed in (naive, headroom))
    idle = max(limit, colocated) * headroom.seconds - len(headroom.first) - len(headroom.later)
    return {
        **{
            mode: _metrics(item, budget, steps if mode in colocated_engine.MODES else [])
            for mode, item in observed.items()
        },
        "ttft_p99_over_alone": round(_p99(headroom.first) / _p99(alone.first), 3),
        "tpot_p99_over_alone": round(_p99(headroom.later) / _p99(alone.later), 3),
        "harvested_share_of_idle": round(headroom.rollout_tokens / idle, 3),
        "tokens_per_s_without_users": round(max(limit, colocated)),
        "control": round(colocated / limit, 3),
    }


def _p99(tokens: list[Token]) -> float:
    return float(np.percentile([token.wait for token in tokens], 99))


def _metrics(observed: Observed, budget: Budget, steps: list[StepObserved]) -> dict[str, Any]:
    late = [(token, budget.ttft) for token in observed.first if token.wait > budget.ttft]
    late += [(token, budget.tpot) for token in observed.later if token.wait > budget.tpot]
    return {
        "requests": len(observed.first),
        "tokens": len(observed.first) + len(observed.later),
        "violations": len(late),
        "because": dict(Counter(cause(token, promised, steps) for token, promised in late if steps)),
        "ttft_p99_s": round(_p99(observed.first), 4),
        "tpot_p99_s": round(_p99(observed.later), 4),
        "worst_s": [round(max(token.wait for token in tokens), 3) for tokens in (observed.first, observed.later)],
        "rollout_tokens_per_s": round(observed.rollout_tokens / observed.seconds),
    }


def steps_of(path: Path) -> Iterator[StepObserved]:
    """Of an engine's log; what was predicted is what it had learned until then."""
    budget, events = step_log.read(path)
    colocation, before = Colocation(budget), None
    for event in events:
        if isinstance(event, ColocationDecision):
            before = event
        elif before is not None:
            predicted, ended = colocation.cost.step(event.answers, event.prompt_tokens), before.now + event.seconds
            colocation.took(event.answers, event.prompt_tokens, event.seconds)
            tokens = before.view.last_tokens
            late = any(ended - item.arrival > budget.ttft for item in before.view.waiting)
            late = late or any(ended - last > budget.tpot for last in tokens)
            age = before.now - min(tokens, default=before.now)
            yield StepObserved(before.now, ended, predicted, late, event.answers, event.prompt_tokens, len(tokens), age)


def cause(token: Token, promised: float, steps: list[StepObserved]) -> str:
    """Why it was late.

    `outside`: without the time in which no step ran, or its news travelled, it would have been in time; so it was when
    its step ended. `machine`: it would have been, had no step taken longer than predicted. `decision`: neither.
    """
    began = token.came - token.wait
    first = bisect.bisect_right(steps, began, key=lambda step: step.ended)
    during = steps[first : bisect.bisect_left(steps, token.came, key=lambda step: step.began)]
    if not any(step.late for step in during):
        return "outside"
    inside = predicted = 0.0
    for step in during:
        seconds = min(step.ended, token.came) - max(step.began, began)
        inside += seconds
        predicted += min(seconds, step.predicted)
    if inside <= promised:
        return "outside"
    return "machine" if token.wait - inside + predicted <= promised else "decision"
