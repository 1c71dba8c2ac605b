"""OpenAI's responses, to our messages and back. Pure.

Owns: the form of this route's requests, answers and events. Does not own: HTTP, tokens, what was answered before
(rollout.pool.doors keeps it for `previous_response_id`).
Guarantee: as in rollout.pool.dialects: what would change the answer and is not implemented is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.episode.renderer import Message, Tool
from rollout.pool.dialects import NEUTRAL, refuse
from rollout.pool.recorder import Answered
from sandbox.errors import Invalid

ONLY: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),  # one that a server keeps
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
}


def request(body: dict[str, Any], before: Sequence[Message]) -> tuple[list[Message], list[Tool]]:
    """The messages that are new after those of the response that it names, `before`, and its tools. The instructions
    are not among them: they are those of one request, see `instructed`."""
    refuse(body, ONLY)
    text = body.get("text")
    if text not in (None, {}) and (text.get("format") or {"type": "text"}) != {"type": "text"}:
        raise Invalid("text.format other than text is not implemented", remedy="leave it out")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not (items or before):
        raise Invalid("input must be a text or a list of items")
    try:
        return _messages(items), [_tool(tool) for tool in body.get("tools") or ()]
    except (KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"an item or tool lacks {error}") from None


def instructed(body: dict[str, Any], messages: Sequence[Message]) -> list[Message]:
    """The conversation with the instructions of this request before it."""
    told = body.get("instructions")
    return [*([{"role": "system", "content": str(told)}] if told else []), *messages]


def _tool(tool: dict[str, Any]) -> Tool:
    if tool["type"] != "function":
        raise Invalid(f"no engine here has the tool {tool['type']!r}", remedy="name tools of type function")
    kept = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": kept}


def _messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Items as messages: what the model said in one go (reasoning, text, calls) are several items of theirs."""
    found: list[Message] = []
    saying: Message | None = None  # an assistant's message to which further items may belong
    for item in items:
        kind = item.get("type", "message")
        spoken = kind in ("reasoning", "function_call") or (kind == "message" and item["role"] == "assistant")
        if not spoken:
            found.append(_heard(kind, item))
            saying = None
            continue
        if saying is None or (kind != "function_call" and (saying["content"] or "tool_calls" in saying)):
            saying = {"role": "assistant", "content": ""}
            found.append(saying)
        if kind == "reasoning":
            saying["reasoning_content"] = _texts(item.get("content") or item.get("summary") or [])
        elif kind == "message":
            saying["content"] = _texts(item["content"])
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            saying.setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
    return found


def _heard(kind: str, item: dict[str, Any]) -> Message:
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _texts(item["output"])}
    if kind != "message" or item["role"] not in ("user", "system", "developer"):
        raise Invalid(f"an item of type {kind!r} and role {item.get('role')!r} is not implemented")
    role = "user" if item["role"] == "user" else "system"
    return {"role": role, "content": _texts(item["content"])}


def _texts(content: Any) -> str:
    """The text of parts; a picture has none, and would be lost."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def answer(answered: Answered, body: dict[str, Any], *, name: str, model: str) -> dict[str, Any]:
    cut = answered.finish == "length"
    return {
        **_frame(body, name=name, model=model),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answered, name, "incomplete" if cut else "completed"),
        "usage": {
            "input_tokens": answered.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answered.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answered.prompt_tokens + answered.tokens,
        },
    }


def _frame(body: dict[str, Any], *, name: str, model: str) -> dict[str, Any]:
    """What is known before the model has spoken."""
    return {
        "id": name,
        "object": "response",
        "created_at": 0,
        "status": "in_progress",
        "model": model,
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
        "top_p": 1.0,
        "usage": None,
    }


def _output(answered: Answered, name: str, status: str) -> list[dict[str, Any]]:
    said, items = answered.message, list[dict[str, Any]]()
    calls = said.get("tool_calls") or ()
    if said.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": said["reasoning_content"]}
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [part], "status": status})
    if said["content"] or not calls:
        part = {"type": "output_text", "text": said["content"], "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part], "status": status})
    items += [
        {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], **call["function"], "status": status}
        for call in calls
    ]
    return items


def stream(answered: Answered, body: dict[str, Any], *, name: str, model: str) -> list[tuple[str, dict[str, Any]]]:
    """The same in the events of a stream, numbered."""
    begun, whole = _frame(body, name=name, model=model), answer(answered, body, name=name, model=model)
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        empty = {**item, "status": "in_progress"}
        if item["type"] == "function_call":
            inside = [
                ("response.function_call_arguments.delta", {**at, "delta": item["arguments"]}),
                (
                    "response.function_call_arguments.done",
                    {**at, "name": item["name"], "arguments": item["arguments"]},
                ),
            ]
            empty["arguments"] = ""
        else:
            inside, empty["content"] = _part(item, at), []
        events += [
            ("response.output_item.added", {"output_index": index, "item": empty}),
            *inside,
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]
    events.append((f"response.{whole['status']}", {"response": whole}))
    return [(kind, {**event, "sequence_number": number}) for number, (kind, event) in enumerate(events)]


def _part(item: dict[str, Any], at: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events of an item's only part."""
    part = item["content"][0]
    at, kind = {**at, "content_index": 0}, part["type"]
    more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    return [
        ("response.content_part.added", {**at, "part": {**part, "text": ""}}),
        (f"response.{kind}.delta", {**at, "delta": part["text"], **more}),
        (f"response.{kind}.done", {**at, "text": part["text"], **more}),
        ("response.content_part.done", {**at, "part": part}),
    ]
