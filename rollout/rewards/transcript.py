"""An episode as messages, as reward models read it. Pure."""

from __future__ import annotations

from itertools import pairwise

from rollout.rewards.messages import Score, ScoringRequest

Said = list[dict[str, str]]


def transcripts(request: ScoringRequest, *, turns: bool) -> list[Said]:
    """Up to the last action; with `turns`, up to each of them."""
    messages: Said = [{"role": "user", "content": request.opening}]
    result: list[Said] = []
    for turn in request.turns:
        messages = [*messages, {"role": "assistant", "content": turn.action}]
        result.append(messages)
        messages = [*messages, {"role": "user", "content": turn.observation}]
    if not result:
        return [messages]
    return result if turns else result[-1:]


def by_turn(said: list[float]) -> Score:
    """Each turn is rewarded by what it adds. Example: 1, 3, 2 are rewards of turns 1, 2, -1."""
    return Score(reward=0.0, turns=[after - before for before, after in pairwise([0.0, *said])])
