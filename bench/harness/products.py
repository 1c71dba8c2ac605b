"""Products of two numbers, as a task of text for chat models from half a billion parameters on; it needs no sandbox."""

from __future__ import annotations

import random
import re
from typing import Any

from rollout import Environment, Observation

RANGES = ((12, 99), (12, 999))  # so that small models answer some, and large ones not all


class Products(Environment):
    image = ""
    max_turns = 1

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        draw = random.Random(f"product {seed}")
        left, right = (draw.randint(*item) for item in RANGES)
        self.product = left * right
        return Observation(f"What is {left} times {right}? Think step by step, and end with the number alone.")

    async def step(self, sandbox: Any, action: str) -> Observation:
        numbers = re.findall(r"\d+", action.replace(",", ""))
        return Observation("", reward=float(bool(numbers) and int(numbers[-1]) == self.product), done=True)

    async def cut(self, sandbox: Any, action: str) -> Observation | None:
        return await self.step(sandbox, action)
