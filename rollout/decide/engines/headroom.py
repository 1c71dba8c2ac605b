"""How much rollout work a serving engine may do in its next step without being late for its own users. Pure.

Guarantee: no step is chosen whose predicted time makes the first token of a waiting request, or the next token of a
running one, later than its budget; rollouts get only what is left.

For a request that waits and one that is answered (ROSE, arXiv:2605.06534)::

    S_prefill = (arrival + TTFT budget) - now - predicted prefill
    S_decode  = (last token + TPOT budget) - now - predicted decode

No step is longer than the TPOT budget, however much of the TTFT budget is left: the next user waits for its end
too. Where no user was there for as long as the TTFT budget, none is expected.

A burst of users takes its cache from the rollouts, once: their cache is cut and they are suspended until the next
version of the weights, since the cache would have to be rebuilt then in any case.
"""

from __future__ import annotations

import msgspec


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What users of a serving engine were promised, in seconds."""

    ttft: float  # from arrival to the first token
    tpot: float  # from one token to the next
    margin: float = 0.1  # share of each budget that is left unused


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step of an engine: ``base + per_answer * answers + per_prompt_token * tokens``."""

    base: float
    per_answer: float
    per_prompt_token: float

    def step(self, answers: int, prompt_tokens: int) -> float:
        return self.base + self.per_answer * answers + self.per_prompt_token * prompt_tokens


class WaitingRequest(msgspec.Struct, frozen=True, array_like=True):
    """A user's request of which no token was answered."""

    arrival: float
    left: int  # tokens of its prompt that are to be read


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One serving engine before a step."""

    waiting: list[WaitingRequest]  # in the order in which they are read
    last_tokens: list[float]  # of each running user's request, when it got its last token
    rollouts: int  # answers of rollouts that could continue
    rollout_prompt: int  # tokens of rollouts' prompts that could be read
    free: int  # tokens of cache that is free
    target: int  # tokens of cache that waiting users need
    held: int  # tokens of cache that rollouts hold
    frozen: bool = False  # rollouts are suspended until the next version


class HeadroomStep(msgspec.Struct, frozen=True):
    """What the next step does."""

    users_prompt: int  # tokens of users' prompts
    rollouts: int  # answers of rollouts that get a token
    rollout_prompt: int  # tokens of rollouts' prompts, after the users'
    cut: bool = False  # rollouts lose their cache and are suspended until the next version


CHUNK = 512  # tokens of prompts that a step reads at most


def headroom(view: EngineView, budget: Budget, cost: StepCost, now: float, *, alone: float = float("inf")) -> float:
    """Seconds that a step may take beyond what users need of it; below 0 when a user is late whatever is done.

    `alone`: seconds since a user was there.
    """
    answers, read = len(view.last_tokens), 0
    step = budget.tpot * (1 - budget.margin)
    own = cost.step(answers, min(CHUNK, sum(request.left for request in view.waiting)))
    left = step - own if view.waiting or alone < budget.ttft else float("inf")
    for request in view.waiting:
        read += request.left
        steps = -(-read // CHUNK)
        needed = steps * cost.step(answers, 0) + read * cost.per_prompt_token
        left = min(left, (request.arrival + budget.ttft * (1 - budget.margin) - now - needed) / steps)
    for last in view.last_tokens:
        left = min(left, last + step - now - own)
    return left


def next_step(
    view: EngineView, budget: Budget, cost: StepCost, now: float, *, alone: float = float("inf")
) -> HeadroomStep:
    """What fits. Users' prompts go first, then answers of rollouts, then their prompts."""
    users = min(CHUNK, sum(request.left for request in view.waiting))
    if view.target > view.free and view.held and not view.frozen:
        return HeadroomStep(users, 0, 0, cut=True)
    if view.frozen:
        return HeadroomStep(users, 0, 0)
    left = headroom(view, budget, cost, now, alone=alone)
    if left <= 0:
        return HeadroomStep(users, 0, 0)
    answers = _fitting(left, cost.per_answer, view.rollouts)
    left -= answers * cost.per_answer
    return HeadroomStep(users, answers, _fitting(left, cost.per_prompt_token, min(view.rollout_prompt, CHUNK - users)))


def _fitting(left: float, item: float, limit: int) -> int:
    return limit if item * limit <= left else max(0, int(left / item))
