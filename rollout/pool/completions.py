"""OpenAI's chat completions and the older completions in text, to our messages and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.episode.renderer import Message
from rollout.pool.dialects import FINISH, Body, ChatRequest, Dialect, Event, Item, ReplyHeader, refuse, texts, usage
from rollout.pool.recorder import AgentReply
from sandbox.errors import Invalid

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
TEXT_ONLY: dict[str, tuple[Any, ...]] = {  # of completions in text, see rollout.pool.dialects.NEUTRAL
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
}


def _request_chat(body: Body, _: Sequence[Message]) -> ChatRequest:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise Invalid("messages must be a list of objects with a role", hint="see OpenAI's chat completions API")
    shown = [{**item, "role": ROLES[item["role"]], "content": texts(item.get("content"))} for item in messages]
    return ChatRequest(messages=shown, tools=list(body.get("tools") or ()))


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and all(
            isinstance(item, dict) and "name" in item.get("function", {}) for item in message.get("tool_calls") or ()
        )
    )


def _request_text(body: Body, _: Sequence[Message]) -> ChatRequest:
    """The prompt: text, or tokens."""
    refuse(body, TEXT_ONLY)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    if not prompt or not (tokens or isinstance(prompt, str)):
        raise Invalid("prompt must be one text, or one list of tokens", hint="send several prompts one by one")
    return ChatRequest(prompt=prompt)


def _frame(frame: ReplyHeader, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
    shown = [{"index": 0, "logprobs": None, "finish_reason": None, **choice} for choice in choices]
    return {"id": frame.name, "object": kind, "created": 0, "model": frame.model, "choices": shown}


def _counted(answered: AgentReply) -> dict[str, Any]:
    return {"usage": usage(answered, "prompt_tokens", "completion_tokens", "total_tokens")}


def _usage_event(frame: ReplyHeader, answered: AgentReply, kind: str) -> list[Event]:
    """After the end, where the agent has requested it."""
    target = (frame.body.get("stream_options") or {}).get("include_usage")
    return [("", {**_frame(frame, kind), **_counted(answered)})] if target else []


def _fail(_: ReplyHeader, error: dict[str, Any]) -> list[Event]:
    return [("", {"error": error})]


# ---------------------------------------------------------------------- chat

CHUNK = "chat.completion.chunk"


def _chat(frame: ReplyHeader, answered: AgentReply) -> dict[str, Any]:
    choice = {"message": answered.message, "finish_reason": FINISH[answered.finish][0]}
    return {**_frame(frame, "chat.completion", choice), **_counted(answered)}


def _chat_begin(frame: ReplyHeader) -> list[Event]:
    return [("", _frame(frame, CHUNK, {"delta": {"role": "assistant", "content": ""}}))]


def _chat_more(frame: ReplyHeader, item: Item, text: str) -> list[Event]:
    """A call comes in one piece."""
    delta: dict[str, Any] = {"tool_calls": [{"index": item.nth, **item.call}]}
    if item.kind != "call":
        delta = {"content" if item.kind == "text" else "reasoning_content": text}
    return [("", _frame(frame, CHUNK, {"delta": delta}))]


def _chat_end(frame: ReplyHeader, answered: AgentReply) -> list[Event]:
    last = _frame(frame, CHUNK, {"delta": {}, "finish_reason": FINISH[answered.finish][0]})
    return [("", last), *_usage_event(frame, answered, CHUNK)]


CHAT = Dialect(
    prefix="chatcmpl-",
    request=_request_chat,
    complete=_chat,
    begin=_chat_begin,
    more=_chat_more,
    end=_chat_end,
    fail=_fail,
    done="[DONE]",
)

# ---------------------------------------------------------------------- text

TEXT_KIND = "text_completion"


def _text(frame: ReplyHeader, answered: AgentReply) -> dict[str, Any]:
    choice = {"text": answered.message["content"], "finish_reason": FINISH[answered.finish][0]}
    return {**_frame(frame, TEXT_KIND, choice), **_counted(answered)}


def _text_more(frame: ReplyHeader, _: Item, text: str) -> list[Event]:
    return [("", _frame(frame, TEXT_KIND, {"text": text}))]


def _text_end(frame: ReplyHeader, answered: AgentReply) -> list[Event]:
    last = _frame(frame, TEXT_KIND, {"text": "", "finish_reason": FINISH[answered.finish][0]})
    return [("", last), *_usage_event(frame, answered, TEXT_KIND)]


TEXT = Dialect(
    prefix="cmpl-", request=_request_text, complete=_text, more=_text_more, end=_text_end, fail=_fail, done="[DONE]"
)
