"""What a real engine's users and rollouts saw, mode by mode, and why tokens were late.

Owns: the users that are drawn, the figures. Does not own: playing them (bench.harness.lent_engine).
"""

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

from bench.harness import aftermath, lent_engine, lent_foretold
from bench.harness.drawn_runs import MODEL
from bench.harness.lent_engine import Seen, StepSeen, Token
from bench.harness.paced_engine import paced
from coordinator.simulate import serving
from rollout.decide.engines.lending import Lending, LendingDecision
from rollout.decide.engines.slack import Budget
from rollout.engine import launch, step_log
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


def _scaled(drawn: Any, median: float, most: int) -> list[int]:
    return [int(each) for each in np.clip(np.array(drawn) * median / np.median(drawn), 2, most)]


def lent(users: Users, kind: str, step_ms: float, tpot: float, margin: float, log: Path | None) -> dict[str, Any]:
    """Users alone, rollouts within their slack, rollouts in one queue with them."""
    budget = Budget(ttft=TTFT, tpot=tpot, margin=margin)
    with aftermath.TemporaryFolder("pagurus-steps-") as home:
        folder = log or Path(home)
        folder.mkdir(exist_ok=True)
        seen = asyncio.run(_played(users, kind, budget, step_ms, folder))
        steps = [step for path in folder.glob(step_log.PATTERN) for step in steps_of(path)]
        said = lent_foretold.foretold(users.traffic(), users.every, budget, steps, seen)
        replayed = msgspec.to_builtins(decisions.replay(folder))
        return _compared(budget, seen, steps) | {"simulated_over_live": said, "replayed": replayed}


async def _played(users: Users, kind: str, budget: Budget, step_ms: float, folder: Path) -> dict[str, Seen]:
    plain = launch.vllm(slots=SLOTS) if kind == "vllm" else launch.embedded(slots=SLOTS)
    server = launch.lent(plain, budget, steps=folder)
    server, traffic, clock = paced(server, step_ms) if step_ms else server, users.traffic(), CLOCKS[kind]
    async with lent_engine.started(server, MODEL) as engine:
        came = await lent_engine.play(engine, traffic, lent_engine.MODES, users.every, clock)
    seen = {str(mode): each for mode, each in came.items()}
    if kind == "vllm":
        async with lent_engine.started(lent_engine.unlent(plain), MODEL) as engine:
            seen["priority"] = (await lent_engine.play(engine, traffic, ("slack",), users.every, clock))["slack"]
    return seen


def _compared(budget: Budget, seen: dict[str, Seen], steps: list[StepSeen]) -> dict[str, Any]:
    alone, slack, naive = (seen[mode] for mode in lent_engine.MODES)
    most, lent = (seen.empty_tokens / seen.empty_seconds for seen in (naive, slack))
    idle = max(most, lent) * slack.seconds - len(slack.first) - len(slack.later)
    return {
        **{mode: _figures(each, budget, steps if mode in lent_engine.MODES else []) for mode, each in seen.items()},
        "ttft_p99_over_alone": round(_p99(slack.first) / _p99(alone.first), 3),
        "tpot_p99_over_alone": round(_p99(slack.later) / _p99(alone.later), 3),
        "harvested_share_of_idle": round(slack.rollout_tokens / idle, 3),
        "tokens_per_s_without_users": round(max(most, lent)),
        "control": round(lent / most, 3),
    }


def _p99(tokens: list[Token]) -> float:
    return float(np.percentile([token.wait for token in tokens], 99))


def _figures(seen: Seen, budget: Budget, steps: list[StepSeen]) -> dict[str, Any]:
    late = [(token, budget.ttft) for token in seen.first if token.wait > budget.ttft]
    late += [(token, budget.tpot) for token in seen.later if token.wait > budget.tpot]
    return {
        "requests": len(seen.first),
        "tokens": len(seen.first) + len(seen.later),
        "violations": len(late),
        "because": dict(Counter(cause(token, promised, steps) for token, promised in late if steps)),
        "ttft_p99_s": round(_p99(seen.first), 4),
        "tpot_p99_s": round(_p99(seen.later), 4),
        "worst_s": [round(max(token.wait for token in tokens), 3) for tokens in (seen.first, seen.later)],
        "rollout_tokens_per_s": round(seen.rollout_tokens / seen.seconds),
    }


def steps_of(path: Path) -> Iterator[StepSeen]:
    """Of an engine's log; what was predicted is what it had learned until then."""
    budget, events = step_log.read(path)
    lending, before = Lending(budget), None
    for event in events:
        if isinstance(event, LendingDecision):
            before = event
        elif before is not None:
            predicted, ended = lending.cost.step(event.answers, event.prompt_tokens), before.now + event.seconds
            lending.took(event.answers, event.prompt_tokens, event.seconds)
            tokens = before.view.last_tokens
            late = any(ended - each.arrival > budget.ttft for each in before.view.waiting)
            late = late or any(ended - last > budget.tpot for last in tokens)
            age = before.now - min(tokens, default=before.now)
            yield StepSeen(before.now, ended, predicted, late, event.answers, event.prompt_tokens, len(tokens), age)


def cause(token: Token, promised: float, steps: list[StepSeen]) -> str:
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
