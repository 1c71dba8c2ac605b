"""Tasksets of `verifiers` (from 0.4 on, `verifiers.v1`) as environments: one prompt, one answer, no sandbox.

Owns: prompts as observations, the answer as the trace that a task's own rewards look at. Does not own: tasks, rewards,
judges. What a taskset needs beyond that (tools, a container, a runtime for its rewards, a simulated user) is refused
when the environment is made: it is never left out in silence.
Guarantee: the reward is what the task itself records for this answer, all its rewards with their weights.
`verifiers` is no dependency: who uses this has it.

::

    ENVIRONMENT = verifiers_environment("gsm8k-v1")      # an installed taskset, or a Taskset of yours
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rollout.environments.base import Environment, Observation
from sandbox.errors import Invalid, Unsupported


class VerifiersEnvironment(Environment):
    """Seed n is the task n of a taskset; the last is followed by the first. Made by `verifiers_environment`."""

    image = ""
    shares_reset = False
    max_turns = 1
    tasks: ClassVar[list[Any]] = []
    known: ClassVar[Callable[[Any], str] | None] = None

    def __init__(self) -> None:
        self.seed = 0

    @classmethod
    def distinct(cls) -> int | None:
        return len(cls.tasks)

    def of(self, seed: int) -> tuple[Environment, int]:
        self.system = _system(self._task(seed).data)
        return self, seed

    def _task(self, seed: int) -> Any:
        return self.tasks[seed % len(self.tasks)]

    def oracle(self, seed: int) -> list[str] | None:
        known = type(self).known
        return None if known is None else [known(self._task(seed).data)]

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.seed = seed
        return Observation(_prompt(self._task(seed).data))

    async def step(self, sandbox: Any, action: str) -> Observation:
        task = self._task(self.seed)
        trace = _trace(task, action)
        await task.score(trace)
        return Observation("", reward=float(trace.reward), done=True)


def verifiers_environment(
    taskset: Any, *, known: Callable[[Any], str] | None = None, **options: Any
) -> type[Environment]:
    """`taskset`: the name of an installed one, with `options` of its configuration, or a Taskset. `known`: the right
    answer, from a task's data, for the oracle."""
    if isinstance(taskset, str):
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

        taskset = load_taskset(taskset_config_type(taskset)(id=taskset, **options))
    if not taskset.bounded:
        raise Invalid("this taskset has no end", remedy="hand over `taskset.take(1000)`")
    tasks = list(taskset)
    if not tasks:
        raise Invalid("this taskset has no tasks", remedy="look at its options")
    _need_playable(taskset, tasks)
    content = {"tasks": tasks, "known": None if known is None else staticmethod(known), "__module__": __name__}
    return type("Verifiers", (VerifiersEnvironment,), content)


def _need_playable(taskset: Any, tasks: Sequence[Any]) -> None:
    """Refuses what is more than a prompt and an answer."""
    first = tasks[0]
    needs = ["tools"] if [*taskset.toolsets(taskset.config), *type(first).toolsets(first.config)] else []
    needs += ["a container"] if type(first).NEEDS_CONTAINER or any(task.data.image for task in tasks) else []
    scorers = [*first.hooks("reward"), *first.hooks("metric"), *(judge.score for judge in first.plugged_judges())]
    needs += ["a runtime for its rewards"] if any(_asks_runtime(each) for each in scorers) else []
    if needs:
        raise Unsupported(
            f"tasks of {type(taskset).__name__} need {' and '.join(needs)}; one prompt and one answer can be played",
            remedy="write it as an Environment, or as a folder of Harbor tasks",
        )
    for task in tasks:
        _prompt(task.data)


def _asks_runtime(scorer: Callable[..., Any]) -> bool:
    parameter = inspect.signature(scorer).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _messages(data: Any) -> list[Any]:
    """The conversation before the answer, by verifiers' own types."""
    from verifiers.v1.types import SystemMessage, UserMessage

    asked = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    return [SystemMessage(content=data.system_prompt), *asked] if data.system_prompt else asked


def _system(data: Any) -> str:
    return "\n".join(message.content for message in _messages(data) if message.role == "system")


def _prompt(data: Any) -> str:
    """The one message of the user."""
    asked = [message for message in _messages(data) if message.role != "system"]
    if [message.role for message in asked] != ["user"] or not isinstance(asked[0].content, str):
        raise Unsupported(
            f"task {data.name or data.idx} begins with something else than one message of text",
            remedy="make its prompt a text",
        )
    text: str = asked[0].content
    return text


def _trace(task: Any, answer: str) -> Any:
    """What its rewards look at: this task, and this answer to its prompt."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, Response

    kind = type(task)
    trace: Any = Trace(
        task=TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(kind)(),
        agent=AgentInfo(config=AgentConfig()),
    )
    said = Response(
        id="answer",
        created=int(time.time()),
        model="policy",
        message=AssistantMessage(content=answer),
        finish_reason="stop",
    )
    prepare_turn(trace, _messages(task.data)).commit(said)
    trace.is_completed = trace.ok = True
    return trace
