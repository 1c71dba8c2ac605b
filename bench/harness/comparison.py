"""Which of two numbers is larger, as a task of text: the prompt is plain English, the sandbox decides what is right.

SmolLM2-135M answers one of eight at a temperature of 1, so that most groups of eight have an answer to learn from.
"""

from __future__ import annotations

import random
import re
from typing import Any

from rollout import Environment, Observation


def question(seed: int) -> tuple[str, int, int]:
    """The prompt and both numbers. TRL's side asks the same."""
    left, right = random.Random(f"larger {seed}").sample(range(10, 100), 2)
    return f"Which number is larger, {left} or {right}? Answer with the number alone.", left, right


def number(text: str) -> str:
    """The only number of an answer; "" where it has none or several."""
    numbers = re.findall(r"\d+", text)
    return numbers[0] if len(numbers) == 1 else ""


class Comparison(Environment):
    max_turns = 1

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        text, self.left, self.right = question(seed)
        return Observation(text)

    async def step(self, sandbox: Any, action: str) -> Observation:
        larger = 'printf "%s\\n" "$2" "$3" | sort -n | tail -n 1'
        judged = ["sh", "-c", f'[ "$1" = "$({larger})" ]', "larger", number(action), str(self.left), str(self.right)]
        done = await sandbox.exec(judged)
        return Observation("", reward=float(done.exit_code == 0), done=True)

    async def cut(self, sandbox: Any, action: str) -> Observation | None:
        return await self.step(sandbox, action)
