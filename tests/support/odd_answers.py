"""An environment that anything can play: a reward for what is said, told after two commands. Not a test module."""

from __future__ import annotations

from typing import Any

from rollout import Environment, Observation


class OddAnswers(Environment):
    image = "debian"
    system = "Write one line of shell."
    max_turns = 2

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.said: list[int] = []
        return Observation(text=f"Task {seed}: list the files.")

    async def cut(self, sandbox: Any, action: str) -> Observation | None:
        """Answers of random weights have no end: what there is of them counts."""
        return await self.step(sandbox, action)

    async def step(self, sandbox: Any, action: str) -> Observation:
        self.said.append(len(action))
        result = await sandbox.exec("ls /", timeout=30)
        done = len(self.said) == 2
        return Observation(text=result.text, reward=float(sum(self.said) % 2) if done else 0.0, done=done)
