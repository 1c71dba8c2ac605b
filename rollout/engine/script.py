"""An engine that knows beforehand what it says: the oracle, or who gives up at once.

Nothing of it may be learned from.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engine.chat import END, VERSION, WRITTEN
from rollout.engine.client import Generation, Sampling, WeightSpan

NOTHING = "exit"  # what is said when there is no more


class Script:
    """Says one action after another, then `NOTHING`. Its tokens are those of `rollout.engine.chat.Characters`."""

    def __init__(self, actions: Sequence[str] = ()):
        self.actions = list(actions)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        said = prompt_ids.count(END)
        action = self.actions[said] if said < len(self.actions) else NOTHING
        ids = [WRITTEN + ord(char) for char in action] + [END]
        spans = [WeightSpan(VERSION, 0, len(ids))]
        return Generation(token_ids=ids, logprobs=[0.0] * len(ids), spans=spans, finish_reason="stop")
