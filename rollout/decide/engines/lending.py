"""What the next step of an engine does that serves users and lends to rollouts what they leave. Pure.

Owns: what steps have cost so far, whether rollouts stand still. Does not own: the slack of a step
(rollout.decide.engines.slack), requests, engines, clocks. Both engines choose by it: the embedded one
(rollout.engine.embedded.lending), and vLLM, in whose process only this module and the one of the slack are loaded
(rollout/engine/inside/pagurus_lending.py).

What a step costs is learned while it works: seconds against answers and tokens of prompts, by least squares, of which
the newest steps count most. A step is taken for as long as the line says and half the usual error more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.decide.engines.slack import Budget, EngineView, Step, StepCost, next_step

FIRST = StepCost(base=0.005, per_answer=0.0005, per_prompt_token=0.0001)  # of an engine that has not worked yet
TRUSTED = 16.0  # steps by which what is learned replaces `FIRST`
KEPT = 1e-3  # share of that which stays: what was not seen for long costs what it cost at first, and not nothing
HALF = 400  # steps: half of the weight is on the last so many


class Lending:
    """``step = lending.step(view, now)``, and after that step ``lending.took(answers, tokens, seconds)``"""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.frozen = False  # rollouts stand still until the next version, at which the caller makes it false
        self._keep = 0.5 ** (1 / HALF)
        guess = np.array([FIRST.base, FIRST.per_answer, FIRST.per_prompt_token])
        some = np.array([[1.0, 0.0, 0.0], [1.0, 32.0, 0.0], [1.0, 0.0, 500.0]])
        self._first: NDArray[np.float64] = some.T @ some * (TRUSTED / 3)
        self._guess: NDArray[np.float64] = self._first @ guess
        self._squares, self._products = self._first * (1 - KEPT), self._guess * (1 - KEPT)
        self._error = 0.0

    @property
    def cost(self) -> StepCost:
        squares, products = self._squares + KEPT * self._first, self._products + KEPT * self._guess
        base, answer, token = np.linalg.solve(squares, products).clip(0.0)
        return StepCost(base=float(base) + self._error / 2, per_answer=float(answer), per_prompt_token=float(token))

    def took(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        missed = abs(seconds - self.cost.step(answers, prompt_tokens))
        self._error += (min(missed, seconds) - self._error) / 32
        seen = np.array([1.0, float(answers), float(prompt_tokens)])
        self._squares = self._squares * self._keep + np.outer(seen, seen)
        self._products = self._products * self._keep + seen * seconds

    def step(self, view: EngineView, now: float) -> Step:
        """What fits beside users. If it says `cut`, the caller ends all rollouts, and refuses others while `frozen`."""
        step = next_step(view, self.budget, self.cost, now)
        idle = not view.last_tokens and not view.waiting and not view.frozen
        if idle and not step.rollouts and not step.rollout_prompt:
            return Step(0, 1, 1)  # rollouts are slower than any promise, but nobody else is here
        self.frozen = self.frozen or step.cut
        return step
