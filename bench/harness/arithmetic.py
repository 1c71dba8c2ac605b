"""Sums of two digits as a task of text: the prompt is plain English, the sandbox decides whether a number is right."""

from __future__ import annotations

import random
import re
from typing import Any

from rollout import Environment, Observation


def question(seed: int) -> tuple[str, int, int]:
    """The prompt and both digits. TRL's side asks the same."""
    rng = random.Random(f"sum {seed}")
    left, right = rng.randint(1, 9), rng.randint(1, 9)
    return f"What is {left} + {right}? Answer with the number alone.", left, right


def number(text: str) -> str:
    """The last number of an answer; "" where it has none."""
    numbers = re.findall(r"\d+", text)
    return numbers[-1] if numbers else ""


class Arithmetic(Environment):
    max_turns = 1

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        text, self.left, self.right = question(seed)
        return Observation(text)

    async def step(self, sandbox: Any, action: str) -> Observation:
        judged = ["sh", "-c", '[ "$1" = "$(($2 + $3))" ]', "sum", number(action), str(self.left), str(self.right)]
        done = await sandbox.exec(judged)
        return Observation("", reward=float(done.exit_code == 0), done=True)

    async def cut(self, sandbox: Any, action: str) -> Observation | None:
        return await self.step(sandbox, action)
