"""OpenAI's responses, to our messages and back. Pure."""

from __future__ import annotations

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
    refuse,
    texts,
    usage,
)
from rollout.pool.recorder import AgentReply
from sandbox.errors import Invalid

ONLY: dict[str, tuple[Any, ...]] = {  # see rollout.pool.dialects.NEUTRAL
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),  # one that a server keeps
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
}


def _request(body: Body, before: Sequence[Message]) -> ChatRequest:
    """The conversation `before` and what is new."""
    refuse(body, ONLY)
    text = body.get("text")
    if text not in (None, {}) and (text.get("format") or {"type": "text"}) != {"type": "text"}:
        raise Invalid("text.format other than text is not implemented", hint="leave it out")
    given = body.get("input")
    row = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(row, list) or not (row or before):
        raise Invalid("input must be a text or a list of items", hint="see OpenAI's responses API")
    try:
        messages = [*before, *_messages(row)]
        tools = [_tool(tool) for tool in body.get("tools") or ()]
        return ChatRequest(messages=messages, tools=tools, instructions=str(body.get("instructions") or ""))
    except (KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"an item or tool lacks {error}", hint="add the field") from None


def _tool(tool: dict[str, Any]) -> Tool:
    if tool["type"] != "function":
        raise Invalid(f"no engine here has the tool {tool['type']!r}", hint="name tools of type function")
    return function(tool)


def _messages(row: Sequence[dict[str, Any]]) -> list[Message]:
    """Items as messages: what the model said in one go (reasoning, text, calls) are several items of theirs."""
    result: list[Message] = []
    saying: Message | None = None  # an assistant's message to which further items may belong
    for item in row:
        kind = item.get("type", "message")
        spoken = kind in ("reasoning", "function_call") or (kind == "message" and item["role"] == "assistant")
        if not spoken:
            result.append(_last_seen(kind, item))
            saying = None
            continue
        if saying is None or (kind != "function_call" and (saying["content"] or "tool_calls" in saying)):
            saying = {"role": "assistant", "content": ""}
            result.append(saying)
        if kind == "reasoning":
            saying["reasoning_content"] = texts(item.get("content") or item.get("summary") or [])
        elif kind == "message":
            saying["content"] = texts(item["content"])
        else:
            saying.setdefault("tool_calls", []).append(call(item["call_id"], item["name"], item["arguments"]))
    return result


def _last_seen(kind: str, item: dict[str, Any]) -> Message:
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": texts(item["output"])}
    if kind != "message" or item["role"] not in ("user", "system", "developer"):
        raise Invalid(
            f"an item of type {kind!r} and role {item.get('role')!r} is not implemented",
            hint="leave it out, or use /v1/chat/completions",
        )
    role = "user" if item["role"] == "user" else "system"
    return {"role": role, "content": texts(item["content"])}


# ---------------------------------------------------------------------- answers


def _complete(frame: ReplyHeader, answered: AgentReply) -> dict[str, Any]:
    status = FINISH[answered.finish][2]
    return {
        **_begun(frame),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": [_shown(frame, item, status) for item in items(answered)],
        "usage": {
            **usage(answered, "input_tokens", "output_tokens", "total_tokens"),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _begun(frame: ReplyHeader) -> dict[str, Any]:
    body = frame.body
    return {
        "id": frame.name,
        "object": "response",
        "created_at": 0,
        "status": "in_progress",
        "model": frame.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p") or 1.0,
        "usage": None,
    }


def _name(frame: ReplyHeader, item: Item) -> str:
    if item.kind == "call":
        return f"fc_{item.call['id']}"
    return f"{'rs' if item.kind == 'reasoning' else 'msg'}_{frame.name}"


def _part(item: Item) -> dict[str, Any]:
    """What an item of text holds."""
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}


def _shown(frame: ReplyHeader, item: Item, status: str, *, empty: bool = False) -> dict[str, Any]:
    content = [] if empty else [_part(item)]
    base: dict[str, Any] = {"id": _name(frame, item), "status": status}
    if item.kind == "call":
        arguments = "" if empty else item.text
        named = {"call_id": item.call["id"], "name": item.call["function"]["name"]}
        return {**base, "type": "function_call", **named, "arguments": arguments}
    if item.kind == "reasoning":
        return {**base, "type": "reasoning", "summary": [], "content": content}
    return {**base, "type": "message", "role": "assistant", "content": content}


# ---------------------------------------------------------------------- events


def _at(frame: ReplyHeader, item: Item) -> dict[str, Any]:
    place = {"item_id": _name(frame, item), "output_index": item.at}
    return place if item.kind == "call" else {**place, "content_index": 0}


def _kind(item: Item, what: str) -> str:
    said = {"call": "function_call_arguments", "text": "output_text", "reasoning": "reasoning_text"}
    return f"response.{said[item.kind]}.{what}"


def _more_of(item: Item) -> dict[str, Any]:
    return {"logprobs": []} if item.kind == "text" else {}


def _begin(frame: ReplyHeader) -> list[Event]:
    begun = {"response": _begun(frame)}
    return [("response.created", begun), ("response.in_progress", begun)]


def _open(frame: ReplyHeader, item: Item) -> list[Event]:
    shown = _shown(frame, item, "in_progress", empty=True)
    added: list[Event] = [("response.output_item.added", {"output_index": item.at, "item": shown})]
    if item.kind != "call":
        part = _part(Item(item.kind, ""))
        added.append(("response.content_part.added", {**_at(frame, item), "part": part}))
    return added


def _more(frame: ReplyHeader, item: Item, text: str) -> list[Event]:
    return [(_kind(item, "delta"), {**_at(frame, item), "delta": text, **_more_of(item)})]


def _close(frame: ReplyHeader, item: Item) -> list[Event]:
    at, shown = _at(frame, item), _shown(frame, item, "completed")
    if item.kind == "call":
        done: list[Event] = [(_kind(item, "done"), {**at, "name": shown["name"], "arguments": item.text})]
    else:
        done = [
            (_kind(item, "done"), {**at, "text": item.text, **_more_of(item)}),
            ("response.content_part.done", {**at, "part": _part(item)}),
        ]
    return [*done, ("response.output_item.done", {"output_index": item.at, "item": shown})]


def _end(frame: ReplyHeader, answered: AgentReply) -> list[Event]:
    complete = _complete(frame, answered)
    return [(f"response.{complete['status']}", {"response": complete})]


def _fail(frame: ReplyHeader, error: dict[str, Any]) -> list[Event]:
    reported = {"code": "server_error", "message": error["message"]}
    return [("response.failed", {"response": {**_begun(frame), "status": "failed", "error": reported}})]


RESPONSES = Dialect(
    prefix="resp_",
    request=_request,
    complete=_complete,
    begin=_begin,
    open=_open,
    more=_more,
    close=_close,
    end=_end,
    fail=_fail,
    numbered=True,
)
