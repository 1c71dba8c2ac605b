"""A taskset of verifiers, by its published interface, as an environment: what a user's file looks like. Not a test."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from rollout.environments.verifiers import verifiers_environment


class Sum(vf.TaskData):
    answer: int


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        for n in range(5):
            yield SumTask(Sum(prompt=f"{n} + 2?", answer=n + 2, system_prompt="Answer with a number."))


ENVIRONMENT = verifiers_environment(Sums(vf.TasksetConfig()), existing=lambda data: str(data.answer))
