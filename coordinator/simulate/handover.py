"""Steps of a run whose GPUs roll out and train, with engines that go over to gradients in the middle of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coordinator.simulate.clock import VirtualClock
from coordinator.simulate.engines import SimulatedEngine, SimulatedRequest, StepCosts
from coordinator.simulate.plot import Plot, PlotSpan
from rollout.decide.engines import handover

ENGINES, GROUPS, SIZE = 8, 64, 8
SWITCH = 2.0  # seconds until an engine's GPUs compute gradients: model and optimiser wait in host memory


@dataclass
class HandoverStep:
    """Seconds."""

    rollout: float = 0.0
    complete: float = 0.0  # with the gradients that were left
    hidden: float = 0.0  # share of the gradients that were computed during the rollout
    gone: float = 0.0  # when engines went over; 0: none did


@dataclass(frozen=True, kw_only=True)
class SharedMachinePool:
    """What engines and trainer share."""

    engines: int = ENGINES
    trained_on: int = ENGINES  # of the engines' machines, by gradients that have all of them
    switch: float = SWITCH
    prompt: float = 0.0  # tokens of a prompt, for the gradients


class Rollout:
    def __init__(
        self,
        lengths: np.ndarray,
        rates: StepCosts,
        train: float,
        *,
        moves: bool,
        machines: SharedMachinePool | None = None,
    ) -> None:
        """`lengths` [groups, size]: tokens of answers. `train`: seconds of all gradients on all that they may have."""
        self.clock, self.rates, self.moves, self.machines = (
            VirtualClock(),
            rates,
            moves,
            machines or SharedMachinePool(),
        )
        self.engines = [SimulatedEngine(self.clock, rates) for _ in range(self.machines.engines)]
        self.size, self.train, self.step = lengths.size, train, HandoverStep()
        self._left = dict(enumerate([lengths.shape[1]] * len(lengths)))
        self._tokens = (lengths + self.machines.prompt).sum(axis=1)
        self._on_way: dict[tuple[int, int], tuple[SimulatedEngine, SimulatedRequest]] = {}
        self._computed, self._since, self._pace = 0.0, 0.0, 0.0  # gradients in seconds of all GPUs; of them a second
        for (group, member), tokens in np.ndenumerate(lengths):
            self._request(
                (group, member),
                self.engines[(group * lengths.shape[1] + member) % len(self.engines)],
                0.0,
                float(tokens),
            )

    def run(self) -> HandoverStep:
        self.clock.run()
        self._compute(1.0)
        self.step.rollout = self.clock.now
        self.step.hidden = self._computed / self.train
        self.step.complete = self.step.rollout + self.train - self._computed
        self.step.complete += self.machines.switch if self.step.gone else 0.0
        return self.step

    def _request(self, answer: tuple[int, int], engine: SimulatedEngine, prompt: float, tokens: float) -> None:
        request = engine.request(prompt=prompt, tokens=tokens, done=lambda: self._ended(answer))
        self._on_way[answer] = engine, request

    def _ended(self, answer: tuple[int, int]) -> None:
        self._compute(self._ready)
        del self._on_way[answer]
        self._left[answer[0]] -= 1
        if self.moves:
            self.clock.after(0.0, self._hand_over)  # when all are out that end in the same step

    @property
    def _ready(self) -> float:
        """Share of the tokens that are of whole groups."""
        complete = sum(self._tokens[group] for group, left in self._left.items() if not left)
        return float(complete / self._tokens.sum())

    def _compute(self, ready: float) -> None:
        """Gradients up to now, of no more than what was whole since the last answer ended."""
        now = self.clock.now
        more = self._pace * max(0.0, now - max(self._since, self.step.gone + self.machines.switch))
        self._computed, self._since = min(self._computed + more, max(self._computed, ready * self.train)), now

    def _hand_over(self) -> None:
        stay = handover.staying(
            len(self.engines), len(self._on_way), 1 - len(self._on_way) / self.size,
            base=self.rates.base, item=self.rates.per_sequence, slots=self.rates.slots,
        )  # fmt: skip
        if self.step.gone or stay == len(self.engines):
            return
        self.step.gone = self.clock.now
        self._pace = min(1.0, (len(self.engines) - stay) / self.machines.trained_on)
        for answer, (engine, request) in list(self._on_way.items()):
            if engine not in self.engines[:stay]:
                sampled, left = engine.progress(request)
                engine.cancel(request)
                self._request(answer, min(self.engines[:stay], key=lambda item: item.load), sampled, left)


def _plot(observed: dict[bool, list[HandoverStep]], steps: int = 4) -> Plot:
    spans = list[PlotSpan]()
    for number, pair in enumerate(zip(observed[False][:steps], observed[True][:steps], strict=True)):
        for step, name in zip(pair, ("gradients afterwards", "engines go over"), strict=True):
            row = f"step {number + 1}, {name}"
            went = step.gone + SWITCH if step.gone else step.rollout
            spans += [
                PlotSpan(row, 0.0, went, "all engines sample"),
                PlotSpan(row, step.rollout, step.complete, "gradients"),
            ]
            spans.append(PlotSpan(row, went, step.rollout, "some sample, the others compute gradients"))
    title = "Gradients that are computed while the last answers are awaited need not be computed after them"
    return Plot(title=title, x="seconds", y="", spans=spans)


def metrics(seed: int, steps: int = 12) -> dict[str, Any]:
    """Engines that go over to gradients before the last answers have ended, against engines that stay."""
    rates = StepCosts(base=0.0169, per_sequence=0.000004, prefill=20_000.0, slots=256)

    def played(spread: float, share: float) -> dict[bool, list[HandoverStep]]:
        draw, observed = np.random.default_rng(seed), {False: list[HandoverStep](), True: list[HandoverStep]()}
        for _ in range(steps):
            lengths = np.clip(2000 * draw.lognormal(-(spread**2) / 2, spread, (GROUPS, SIZE)), 16, 16_384)
            train = share * Rollout(lengths, rates, 1.0, moves=False).run().rollout
            for moves, result in observed.items():
                result.append(Rollout(lengths, rates, train, moves=moves).run())
        return observed

    def ratio(observed: dict[bool, list[HandoverStep]]) -> dict[str, float]:
        rollouts = [sum(item.rollout for item in result) for result in observed.values()]
        return {
            "ratio": round(sum(s.complete for s in observed[False]) / sum(s.complete for s in observed[True]), 3),
            "rollout_slower": round(rollouts[1] / rollouts[0], 3),
            "hidden": round(float(np.mean([item.hidden for item in observed[True]])), 3),
            "gone_after": round(float(np.mean([item.gone / item.rollout for item in observed[True]])), 2),
        }

    drawn = played(1.4, 0.5)
    return {
        **ratio(drawn),
        "control": ratio(played(0.0, 0.5))["ratio"],
        "plot": _plot(drawn),
        "inputs": "8 engines; 64 prompts x 8 answers, log-normal around 2,000 tokens, deviation of the logarithm 1.4, "
        "at most 16,384; a decoding step takes 16.9 ms and 4 us for each answer; gradients take half as long as the "
        "rollout, on all GPUs; engines change over in 2 s; control: equal lengths",
    }
