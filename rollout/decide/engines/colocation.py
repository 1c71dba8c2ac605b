"""What the next step of an engine does that serves users and leaves the rest to rollouts. Pure.

Both engines choose by it: the embedded one (rollout.engine.embedded.colocation), and vLLM, in whose process only this
module, that of the headroom and that of the log (rollout.step_log) are loaded
(rollout/engine/inside/pagurus_colocation.py). Guarantee: the same promise and the same events give the same steps, on
every machine: no library computes them.

What a step costs is learned while it works: seconds against answers and tokens of prompts, by least squares, of which
the newest steps count most. Steps that took longer than the line says count ten times as much as those that took less
(an expectile: Newey and Powell, Econometrica 55, 1987), because users feel the long ones: steps that read much scatter
more, and the line is higher there. What holds up a single step says little of its kind: none counts for more than the
line and four times the usual distance from it, a mean in which the newest sixteen steps count most (as the time-out of
TCP is set: Jacobson, SIGCOMM 1988). A step is taken for as long as the line says. If the worst step of late took so
much longer that the budget's margin would not do, that is left unused instead: what holds up one step may hold up the
next ones.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rollout.decide.engines.headroom import Budget, EngineView, HeadroomStep, StepCost, next_step

FIRST = StepCost(base=0.005, per_answer=0.0005, per_prompt_token=0.0001)  # of an engine that has not worked yet
TRUSTED = 16.0  # steps by which what is learned replaces `FIRST`
RETAINED = 1e-3  # share of that which stays: what was not seen for long costs what it cost at first, and not nothing
KEEP = 0.5 ** (1 / 400)  # half of the weight is on the last 400 steps
SHORTER = 0.1  # what a step counts for that took less than the line says
DISTANCES = 4.0  # from the line that a step counts for at most
CLOSER = 1 / 16  # weight of the newest step in the usual distance
FADES = 0.5 ** (1 / 100)  # so does what the worst step took too long, with each step


class ColocationDecision(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Before a step."""

    now: float
    view: EngineView
    step: HeadroomStep


class Took(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """After it: what it computed, and for how long. Not of one that computed nothing."""

    answers: int
    prompt_tokens: int
    seconds: float


Event = ColocationDecision | Took


class Colocation:
    """``step = lending.step(view, now)``, and after that step ``colocation.took(answers, tokens, seconds)``"""

    def __init__(self, budget: Budget, *, log: Callable[[Event], None] | None = None):
        self.budget = budget
        self.frozen = False  # rollouts are suspended until the next version, at which the caller makes it false
        self._log = log
        first = [_sums(*point) for point in (_at(0, 0), _at(32, 0), _at(0, 500))]
        self._first = [sum(item) * TRUSTED / 3 for item in zip(*first, strict=True)]
        self._observed = [item * (1 - RETAINED) for item in self._first]
        self._worse = 0.0  # seconds
        self._distance = FIRST.base  # seconds
        self._served = float("-inf")  # when a user was last there

    @property
    def cost(self) -> StepCost:
        base, answer, token = _line(
            [observed + RETAINED * first for observed, first in zip(self._observed, self._first, strict=True)]
        )
        return StepCost(base=base, per_answer=answer, per_prompt_token=token)

    def took(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        usual = self.cost.step(answers, prompt_tokens)
        self._worse = max(min(seconds - usual, self.budget.tpot), self._worse * FADES)
        believed = min(seconds, 2 * usual)
        new = _sums(answers, prompt_tokens, min(believed, usual + DISTANCES * self._distance))
        self._distance += CLOSER * (abs(believed - usual) - self._distance)
        counts = 1.0 if seconds > usual else SHORTER
        self._observed = [KEEP * observed + counts * item for observed, item in zip(self._observed, new, strict=True)]
        if self._log is not None:
            self._log(Took(answers=answers, prompt_tokens=prompt_tokens, seconds=seconds))

    def step(self, view: EngineView, now: float) -> HeadroomStep:
        """What fits next to users. If it says `cut`, the caller ends all rollouts, and refuses others while
        `frozen`."""
        step = self._fitting(view, now)
        self.frozen = self.frozen or step.cut
        if self._log is not None:
            self._log(ColocationDecision(now=now, view=view, step=step))
        return step

    def _fitting(self, view: EngineView, now: float) -> HeadroomStep:
        nobody = not view.last_tokens and not view.waiting
        self._served = self._served if nobody else now
        margin = max(self.budget.margin, self._worse / self.budget.tpot)
        budget = msgspec.structs.replace(self.budget, margin=margin)
        step = next_step(view, budget, self.cost, now, alone=now - self._served)
        if nobody and not view.frozen and not step.rollouts and not step.rollout_prompt:
            return HeadroomStep(0, 1, 1)  # rollouts are slower than any promise, but there is no user
        return step


def _at(answers: int, tokens: int) -> tuple[int, int, float]:
    return answers, tokens, FIRST.step(answers, tokens)


def _sums(answers: float, tokens: float, seconds: float) -> list[float]:
    """What one step adds to the normal equations of ``seconds = base + answer * answers + token * tokens``."""
    a, t, s = answers, tokens, seconds
    return [1.0, a, t, a * a, a * t, t * t, s, s * a, s * t]


def _line(sums: list[float]) -> tuple[float, float, float]:
    """Base, seconds of an answer and of a token that fit best of those of which none is below 0."""
    n, a, t, aa, at, tt, s, sa, st = sums
    aa, at, tt, sa, st = aa - a * a / n, at - a * t / n, tt - t * t / n, sa - a * s / n, st - t * s / n
    token = (st - sa * at / aa) / (tt - at * at / aa)
    answer = (sa - at * token) / aa
    if answer < 0:
        answer, token = 0.0, st / tt
    if token < 0:
        answer, token = max(0.0, sa / aa), 0.0
    return max(0.0, (s - a * answer - t * token) / n), answer, token
