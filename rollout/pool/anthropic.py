"""Anthropic's messages, to ours and back. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollout.episode.renderer import Message, Tool
from rollout.pool.dialects import (
    FINISH,
    Body,
    ChatRequest,
    Dialect,
    Event,
    Item,
    ReplyHeader,
    call,
    function,
    items,
    texts,
    usage,
)
from rollout.pool.recorder import AgentReply
from sandbox.errors import Invalid


def _request(body: Body, _: Sequence[Message]) -> ChatRequest:
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Invalid("messages must be a list", hint="see Anthropic's messages API")
    messages: list[Message] = []
    try:
        if body.get("system"):
            messages.append({"role": "system", "content": texts(body["system"])})
        for message in body["messages"]:
            messages += _messages(message)
        return ChatRequest(messages=messages, tools=[_tool(tool) for tool in body.get("tools") or ()])
    except (KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"a message or tool lacks {error}", hint="add the field") from None


def _tool(tool: dict[str, Any]) -> Tool:
    if tool.get("type", "custom") != "custom":
        raise Invalid(f"no engine here has the tool {tool['type']!r}", hint="describe it with an input_schema")
    return function(tool, "input_schema")


def _messages(message: dict[str, Any]) -> list[Message]:
    """A message of blocks: results of tools are messages of their own, before what else is said."""
    role, blocks = message["role"], message["content"]
    if role not in ("user", "assistant"):
        raise Invalid(f"a message of role {role!r} is not implemented", hint="user or assistant")
    if isinstance(blocks, str):
        return [{"role": role, "content": blocks}]
    results = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": texts(block.get("content"))}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    existing = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    text = texts([block for block in blocks if block["type"] not in existing])
    if role == "user":
        return [*results, *([{"role": "user", "content": text}] if text or not results else [])]
    calls = [
        call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}]


def _hidden(frame: ReplyHeader) -> tuple[str, ...]:
    """Reasoning, unless the agent wants to see it."""
    return () if (frame.body.get("thinking") or {}).get("type") in ("enabled", "adaptive") else ("reasoning",)


def _block(item: Item) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    if item.kind == "text":
        return {"type": "text", "text": item.text}
    try:
        value = json.loads(item.text or "{}")
    except (ValueError, RecursionError):
        value = {"text": item.text}
    return {"type": "tool_use", "id": item.call["id"], "name": item.call["function"]["name"], "input": value}


def _message(frame: ReplyHeader, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": frame.name, "type": "message", "role": "assistant", "model": frame.model, "content": content,
        "stop_reason": None, "stop_sequence": None,
    }  # fmt: skip


def _end_of(answered: AgentReply) -> dict[str, Any]:
    stopped = answered.stopped if answered.finish == "stop_string" else None
    return {"stop_reason": FINISH[answered.finish][1], "stop_sequence": stopped}


def _counted(answered: AgentReply) -> dict[str, Any]:
    return {"usage": usage(answered, "input_tokens", "output_tokens")}


def _complete(frame: ReplyHeader, answered: AgentReply) -> dict[str, Any]:
    shown = [_block(item) for item in items(answered) if item.kind not in _hidden(frame)]
    return {**_message(frame, shown), **_end_of(answered), **_counted(answered)}


# ---------------------------------------------------------------------- events


def _begin(frame: ReplyHeader) -> list[Event]:
    counted = {"usage": {"input_tokens": frame.prompt_tokens, "output_tokens": 0}}
    return [("message_start", {"message": {**_message(frame, []), **counted}})]


def _open(_: ReplyHeader, item: Item) -> list[Event]:
    empty = _block(Item(item.kind, "", call=item.call))
    return [("content_block_start", {"index": item.at, "content_block": empty})]


def _more(_: ReplyHeader, item: Item, text: str) -> list[Event]:
    if item.kind == "call":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(_block(item)["input"])}
    elif item.kind == "text":
        delta = {"type": "text_delta", "text": text}
    else:
        delta = {"type": "thinking_delta", "thinking": text}
    return [("content_block_delta", {"index": item.at, "delta": delta})]


def _close(_: ReplyHeader, item: Item) -> list[Event]:
    return [("content_block_stop", {"index": item.at})]


def _end(_: ReplyHeader, answered: AgentReply) -> list[Event]:
    return [("message_delta", {"delta": _end_of(answered), **_counted(answered)}), ("message_stop", {})]


def _fail(_: ReplyHeader, error: dict[str, Any]) -> list[Event]:
    return [("error", {"error": error})]


MESSAGES = Dialect(
    prefix="msg_",
    request=_request,
    complete=_complete,
    begin=_begin,
    open=_open,
    more=_more,
    close=_close,
    end=_end,
    fail=_fail,
    hidden=_hidden,
)
