"""Tasksets of `verifiers` (from 0.4 on, `verifiers.v1`) as environments: one prompt, one answer, no sandbox.

What a taskset needs beyond that (a container, a runtime for its rewards, a simulated user) is refused when the
environment is made: it is never left out in silence. Guarantee: the reward is what the task itself records for this
answer, all its rewards with their weights. `verifiers` is no dependency: who uses this has it.

::

    ENVIRONMENT = verifiers_environment("gsm8k-v1")      # an installed taskset, or a Taskset of yours
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rollout.chat_families import calls_in
from rollout.environments import splits
from rollout.environments.base import AgentSandbox, Environment, Observation
from rollout.environments.verifiers_classic import spoken
from rollout.environments.verifiers_tools import Toolbox, closed, more_than_tools, ready
from sandbox.errors import Invalid, Unsupported


class VerifiersEnvironment(Environment):
    """Seed n is the task n of a taskset; the last is followed by the first. Made by `verifiers_environment`."""

    image = ""
    shares_reset = False
    max_turns = 1
    tasks: ClassVar[list[Any]] = []
    reference: ClassVar[Callable[[Any], str | list[str]] | None] = None

    def __init__(self) -> None:
        self.seed = 0

    @classmethod
    def distinct(cls) -> int | None:
        return len(cls.tasks)

    @classmethod
    def identities(cls) -> list[str] | None:
        return [splits.key({"system": _system(task.data), "prompt": _prompt(task.data)}) for task in cls.tasks]

    def of(self, seed: int) -> tuple[Environment, int]:
        self.system = _system(self._task(seed).data)
        return self, seed

    def _task(self, seed: int) -> Any:
        return self.tasks[seed % len(self.tasks)]

    def oracle(self, seed: int) -> list[str] | None:
        reference = type(self).reference
        if reference is None:
            return None
        right = reference(self._task(seed).data)
        return [right] if isinstance(right, str) else right

    async def reset(self, sandbox: AgentSandbox, seed: int) -> Observation:
        self.seed = seed
        return Observation(_prompt(self._task(seed).data))

    async def step(self, sandbox: AgentSandbox, action: str) -> Observation:
        task = self._task(self.seed)
        trace = begun(task)
        answered(trace, messages_of(task.data), action)
        return await self.scored(trace)

    async def scored(self, trace: Any) -> Observation:
        trace.is_completed = trace.ok = True
        await self._task(self.seed).score(trace)
        return Observation("", reward=float(trace.reward), done=True)


class ToolsEnvironment(VerifiersEnvironment):
    """A conversation that ends with an answer without calls. Actions are as those of `ClassicEnvironment`."""

    max_turns = 50
    taskset: ClassVar[Any]
    common: ClassVar[asyncio.Task[list[Any]] | None] = None  # toolsets of all tasks, set up or on the way to it
    _sets: Sequence[Any] = ()  # of this task

    def snapshot(self) -> bytes | None:
        return None  # tools keep what they like in memory

    async def reset(self, sandbox: AgentSandbox, seed: int) -> Observation:
        first, task = await super().reset(sandbox, seed), self._task(seed)
        common = await self._common()
        self._sets = type(task).toolsets(task.config)
        self._box = await Toolbox.of([*common, *await ready(self._sets, task)])
        self.tools = self._box.tools
        self._trace, self._requested, self._turns = begun(task), messages_of(task.data), 0
        return first

    @classmethod
    async def _common(cls) -> list[Any]:
        """Set up once for all episodes; again where that failed. An episode that is cancelled leaves it to others."""
        if cls.common is None or (cls.common.done() and (cls.common.cancelled() or cls.common.exception() is not None)):
            cls.common = asyncio.create_task(ready(cls.taskset.toolsets(cls.taskset.config)))
        return await asyncio.shield(cls.common)

    async def step(self, sandbox: AgentSandbox, action: str) -> Observation:
        from verifiers.v1.types import ToolCall, ToolMessage

        content, called, _ = calls_in(action)
        calls = [
            ToolCall(id=f"call_{self._turns}_{n}", name=name, arguments=text) for n, (name, text) in enumerate(called)
        ]
        self._requested.append(answered(self._trace, self._requested, content, calls, self.tools))
        self._turns += 1
        if not calls or self._turns == self.max_turns:
            return await self.scored(self._trace)
        results = [await self._box.call(call.name, call.arguments) for call in calls]
        for call, text in zip(calls, results, strict=True):
            self._requested.append(ToolMessage(tool_call_id=call.id, content=text, name=call.name))
        return Observation("\n".join(results), results=tuple(results))

    async def close(self) -> None:
        await closed(self._sets)

    def read_action(self, content: str, calls: Sequence[tuple[str, str]]) -> str:
        return spoken(content, calls)


def verifiers_environment(
    taskset: Any, *, reference: Callable[[Any], str | list[str]] | None = None, **options: Any
) -> type[Environment]:
    """`taskset`: the name of an installed one, with `options` of its configuration, or a Taskset. `reference`: the
    right
    answer, or with tools the right actions, from a task's data, for the oracle."""
    if isinstance(taskset, str):
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

        taskset = load_taskset(taskset_config_type(taskset)(id=taskset, **options))
    if not taskset.bounded:
        raise Invalid("this taskset has no end", hint="hand over `taskset.take(1000)`")
    tasks = list(taskset)
    if not tasks:
        raise Invalid("this taskset has no tasks", hint="look at its options")
    tools = _need_playable(taskset, tasks)
    content = {
        "tasks": tasks,
        "reference": None if reference is None else staticmethod(reference),
        "__module__": __name__,
    }
    if not tools:
        return type("Verifiers", (VerifiersEnvironment,), content)
    return type("VerifiersTools", (ToolsEnvironment,), content | {"taskset": taskset})


def _need_playable(taskset: Any, tasks: Sequence[Any]) -> bool:
    """Refuses what is more than a prompt, tools and an answer; whether there are tools."""
    first = tasks[0]
    sets = [*taskset.toolsets(taskset.config), *type(first).toolsets(first.config)]
    needs = more_than_tools(first, sets) if sets else []
    needs += ["a container"] if type(first).NEEDS_CONTAINER or any(task.data.image for task in tasks) else []
    scorers = [*first.hooks("reward"), *first.hooks("metric"), *(judge.score for judge in first.plugged_judges())]
    needs += ["a runtime for its rewards"] if any(_requests_runtime(item) for item in scorers) else []
    if needs:
        raise Unsupported(
            f"tasks of {type(taskset).__name__} need {' and '.join(needs)}; a prompt, tools and answers can be played",
            hint="write it as an Environment, or as a directory of Harbor tasks",
        )
    for task in tasks:
        _prompt(task.data)
    return bool(sets)


def _requests_runtime(scorer: Callable[..., Any]) -> bool:
    parameter = inspect.signature(scorer).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def messages_of(data: Any) -> list[Any]:
    """The conversation before the answer, by verifiers' own types."""
    from verifiers.v1.types import SystemMessage, UserMessage

    requested = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    return [SystemMessage(content=data.system_prompt), *requested] if data.system_prompt else requested


def _system(data: Any) -> str:
    return "\n".join(message.content for message in messages_of(data) if message.role == "system")


def _prompt(data: Any) -> str:
    """The one message of the user."""
    requested = [message for message in messages_of(data) if message.role != "system"]
    if [message.role for message in requested] != ["user"] or not isinstance(requested[0].content, str):
        raise Unsupported(
            f"task {data.name or data.idx} begins with something else than one message of text",
            hint="make its prompt a text",
        )
    text: str = requested[0].content
    return text


def begun(task: Any) -> Any:
    """What its rewards look at: this task, and no answer yet."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    kind = type(task)
    return Trace(
        task=TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(kind)(),
        agent=AgentInfo(config=AgentConfig()),
    )


def answered(
    trace: Any, requested: list[Any], answer: str, calls: Sequence[Any] = (), tools: Sequence[Mapping[str, Any]] = ()
) -> Any:
    """Add what the policy has said after these messages, and with these tools; the message."""
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.types import AssistantMessage, Response, Tool

    message = AssistantMessage(content=answer, tool_calls=list(calls) or None)
    said = Response(
        id="answer",
        created=int(time.time()),
        model="policy",
        message=message,
        finish_reason="tool_calls" if calls else "stop",
    )
    prepare_turn(trace, list(requested), [Tool(**tool["function"]) for tool in tools]).commit(said)
    return message
