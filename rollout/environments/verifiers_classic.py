"""Environments of `verifiers` before 0.4 as ours: `MultiTurnEnv`, `ToolEnv`, `StatefulToolEnv` and their like.

Guarantee: an episode takes the same steps as the package's own loop, `MultiTurnEnv.rollout`, but that the answers are
the policy's. An error of a tool that the environment stops at ends the episode, which is scored; any other error is the
environment's failure. What is no conversation of texts, rewrites what was said before, or is scored as a group is
refused. `verifiers` is no dependency: who uses this has it.

::

    ENVIRONMENT = classic_environment("wiki-search")      # an installed one, or an Environment of yours
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rollout.chat_families import calls_in
from rollout.environments import splits
from rollout.environments.base import AgentSandbox, Environment, Observation
from sandbox.errors import Invalid, Unsupported


class ClassicEnvironment(Environment):
    """Seed n is row n of the data set; the last is followed by the first. Made by `classic_environment`.

    An action is what the model said, with each call as ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``.
    """

    image = ""
    shares_reset = False
    inner: ClassVar[Any]
    rows: ClassVar[Any]
    reference: ClassVar[Callable[[Mapping[str, Any]], list[str]] | None] = None

    def __init__(self) -> None:
        self._state: Any = None
        self._requested: list[Any] = []  # all messages before the answer that is awaited

    @classmethod
    def distinct(cls) -> int | None:
        return len(cls.rows)

    @classmethod
    def identities(cls) -> list[str] | None:
        """By the question: a row may have numbers and notes of its own."""
        return [splits.key(repr(row.get("prompt", row))) for row in map(dict, cls.rows)]

    def _row(self, seed: int) -> dict[str, Any]:
        return dict(self.rows[seed % len(self.rows)])

    def oracle(self, seed: int) -> list[str] | None:
        reference = type(self).reference
        return None if reference is None else reference(self._row(seed))

    async def reset(self, sandbox: AgentSandbox, seed: int) -> Observation:
        self._state = await self.inner.init_state(self._row(seed), _nobody(), "policy", None)
        self._state = await self.inner.setup_state(self._state) or self._state
        self._requested = await self._messages()
        reported = [item for item in self._requested if item.role == "system"]
        requested = [item for item in self._requested if item.role != "system"]
        if any(item.role == "assistant" for item in requested):
            raise Unsupported("the prompt has answers in it", hint="leave out its examples")
        self.system = _text(reported)
        self.tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in self._state["tool_defs"]
        ]
        return Observation(_text(requested))

    async def step(self, sandbox: AgentSandbox, action: str) -> Observation:
        return await self._answered(action, complete=True)

    async def cut(self, sandbox: AgentSandbox, action: str) -> Observation:
        return await self._answered(action, complete=False)

    async def _answered(self, action: str, *, complete: bool) -> Observation:
        await self.inner.add_model_response(self._state, self._requested, _response(action, complete=complete))
        said = self._state["trajectory"][-1]["completion"]
        if (now := await self._next()) is None:
            return await self._end()
        before = [*self._requested, *said]
        if now[: len(before)] != before:
            raise Unsupported("the environment rewrites its conversation", hint="let it only add messages")
        self._requested = now
        return Observation(_text(now[len(before) :]))

    async def _next(self) -> list[Any] | None:
        """The conversation before the next answer; None when the episode has ended."""
        from verifiers.errors import ToolError

        while not await self.inner.is_completed(self._state):
            try:
                messages = await self._messages()
            except ToolError as error:
                self._state["error"] = error
                continue
            if self._state.get("final_env_response") is None:
                return messages
        return None

    async def _messages(self) -> list[Any]:
        from verifiers.utils.message_utils import normalize_messages

        messages: list[Any] = normalize_messages(await self.inner.get_prompt_messages(self._state))
        return messages

    async def _end(self) -> Observation:
        from verifiers.utils.message_utils import normalize_messages

        await self.inner.cleanup(self._state)
        await self.inner.rubric.score_rollout(self._state)
        await self.inner.rubric.cleanup(self._state)
        last = self._state.get("final_env_response")
        return Observation(_text(normalize_messages(last or [])), reward=float(self._state["reward"]), done=True)

    def read_action(self, content: str, calls: Sequence[tuple[str, str]]) -> str:
        return spoken(content, calls)


def classic_environment(
    environment: Any,
    *,
    reference: Callable[[Mapping[str, Any]], list[str]] | None = None,
    turns: int = 50,
    **options: Any,
) -> type[Environment]:
    """`environment`: the name of an installed one, with `options` for its `load_environment`, or an Environment.

    `reference`: the right actions, from a row, for the oracle; `tool_call` writes one that calls a tool. `turns`: where
    the environment itself sets no limit.
    """
    if isinstance(environment, str):
        from verifiers import load_environment

        environment = load_environment(environment, **options)
    if not hasattr(environment, "get_prompt_messages"):
        raise Unsupported(f"{type(environment).__name__} plays no turns", hint="make it a MultiTurnEnv")
    if environment.rubric.has_group_rewards:
        raise Unsupported("its rubric scores whole groups", hint="score each episode by itself")
    rows = environment.get_dataset()
    if not len(rows):
        raise Invalid("this environment has no rows", hint="look at its data set")
    if environment.max_turns <= 0:
        environment.max_turns = turns
    content = {
        "inner": environment,
        "rows": rows,
        "reference": None if reference is None else staticmethod(reference),
        "max_turns": environment.max_turns,
        "__module__": __name__,
    }
    return type("VerifiersClassic", (ClassicEnvironment,), content)


def tool_call(name: str, **arguments: Any) -> str:
    """An action that calls a tool. Example: ``tool_call("search", query="CRIU")``"""
    return _tagged(name, json.dumps(arguments))


def spoken(content: str, calls: Sequence[tuple[str, str]]) -> str:
    """An action: what a model said, and its calls."""
    return "\n".join([*([content] if content else []), *(_tagged(name, text) for name, text in calls)])


def _tagged(name: str, arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _response(action: str, *, complete: bool) -> Any:
    """An answer in the package's types."""
    from verifiers.types import Response, ResponseMessage, ToolCall

    content, called, _ = calls_in(action)
    calls = [ToolCall(id=f"call_{n}", name=name, arguments=text) for n, (name, text) in enumerate(called)]
    ended = "length" if not complete else "tool_calls" if calls else "stop"
    message = ResponseMessage(
        content=content, tool_calls=calls or None, finish_reason=ended, is_truncated=not complete, tokens=None
    )
    return Response(id="answer", created=int(time.time()), model="policy", message=message)


def _nobody() -> Any:
    """A client that answers nothing: the policy's answers come by `step`."""
    from verifiers.clients import Client

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise Unsupported("the environment asks a model of its own by the policy's client", hint="give it a client")

    methods = dict.fromkeys([*Client.__abstractmethods__, "get_response"], refuse)
    return type("Nobody", (Client,), methods)(None)


def _text(messages: Sequence[Any]) -> str:
    return "\n".join(_content(message) for message in messages)


def _content(message: Any) -> str:
    parts = message.content
    if isinstance(parts, str):
        return parts
    texts = [part.get("text") if isinstance(part, dict) else getattr(part, "text", None) for part in parts or ()]
    if not all(isinstance(item, str) for item in texts):
        raise Unsupported(f"a message of the {message.role} is more than text", hint="leave pictures and sound out")
    return "\n".join(str(item) for item in texts)
