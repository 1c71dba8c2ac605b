"""A taskset of verifiers whose tasks bring a tool, as an environment: what a user's file looks like. Not a test."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from rollout.environments.verifiers import verifiers_environment
from rollout.environments.verifiers_classic import tool_call


class Hidden(vf.TaskData):
    words: list[str]
    shelf: int


class Shelves(vf.Toolset[vf.ToolsetConfig]):
    async def setup_task(self, task: vf.Task[Hidden]) -> None:
        self.words = task.data.words

    @vf.tool
    def poll(self, shelf: int) -> str:
        """What lies on a shelf."""
        return self.words[shelf]


class HiddenTask(vf.Task[Hidden]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Shelves(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        looked = any(message.role == "tool" for message in trace.messages)
        return float(looked and trace.last_reply.strip() == self.data.words[self.data.shelf])


class Hiding(vf.Taskset[HiddenTask]):
    def load(self) -> Iterable[HiddenTask]:
        for n in range(3):
            yield HiddenTask(Hidden(prompt=f"What lies on shelf {n}?", words=["ash", "elm", "oak"], shelf=n))


ENVIRONMENT = verifiers_environment(
    Hiding(vf.TasksetConfig()),
    existing=lambda data: [tool_call("shelves_look", shelf=data.shelf), data.words[data.shelf]],
)
