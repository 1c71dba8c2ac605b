"""An environment of two methods, as the README shows one: say the number that lies in a file. Not a test module."""

from __future__ import annotations

from typing import Any

from rollout import Environment, Observation


class FindTheNumber(Environment):
    image = "debian"
    max_turns = 3

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.seed = seed
        await sandbox.exec(f"echo {seed * 7} > /srv/number", ends_turn=False)
        return Observation(text="A number lies below /srv. Find it, then say it as: answer NUMBER\n$ ")

    async def step(self, sandbox: Any, action: str) -> Observation:
        if action.startswith("answer "):
            return Observation(text="", reward=float(action == f"answer {self.seed * 7}"), done=True)
        result = await sandbox.exec(action, timeout=30)
        return Observation(text=result.text + "$ ")
