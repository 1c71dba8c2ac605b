"""What agents say to models, in OpenAI's and in Anthropic's words, to our messages and back. Pure.

Owns: the forms of requests and answers, but for OpenAI's responses (rollout.pool.responses). Does not own: HTTP,
tokens.
Guarantee: a parameter that would change what is sampled and that no engine here implements is refused, not passed over.
"""

from __future__ import annotations

import json
from typing import Any

from rollout.engine.client import Sampling
from rollout.episode.renderer import Message, Tool
from rollout.pool.recorder import Answered, Completed
from sandbox.errors import Invalid

NEUTRAL: dict[str, tuple[Any, ...]] = {  # what a parameter may be without changing anything
    "top_p": (None, 1, 1.0),
    "top_k": (None, -1, 0),
    "n": (None, 1),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "stop": (None, []),
    "stop_sequences": (None, []),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", {"type": "auto"}),
}
COMPLETIONS: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
}
FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # OpenAI's word: Anthropic's


def refuse(body: dict[str, Any], only: dict[str, tuple[Any, ...]]) -> None:
    """Raise where a parameter has another value than these."""
    for name, values in only.items():
        if body.get(name) not in values:
            raise Invalid(f"{name} = {body[name]!r} is not implemented", remedy="leave it out")


def sampling_of(body: dict[str, Any], default: Sampling) -> Sampling:
    """How a request wants to be sampled."""
    refuse(body, NEUTRAL)
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    most = next((body[name] for name in names if body.get(name)), default.max_tokens)
    temperature = body.get("temperature")
    try:
        found = Sampling(
            max_tokens=min(int(most), default.max_tokens),
            temperature=default.temperature if temperature is None else float(temperature),
            stop_token_ids=default.stop_token_ids,
            seed=default.seed if body.get("seed") is None else int(body["seed"]),
            ignore_eos=default.ignore_eos,
        )
    except (TypeError, ValueError) as error:
        raise Invalid(f"max_tokens, temperature or seed is no number: {error}") from None
    if found.max_tokens < 1 or not 0 <= found.temperature < 100:
        raise Invalid("max_tokens must be at least 1, temperature from 0 to 100")
    return found


# --------------------------------------------------------------------------- OpenAI


def openai_request(body: dict[str, Any]) -> tuple[list[Message], list[Tool]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise Invalid("messages must be a list of objects with a role")
    return [
        {**message, "role": "system" if message["role"] == "developer" else message["role"]} for message in messages
    ], list(body.get("tools") or ())


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("system", "developer", "user", "assistant", "tool")
        and isinstance(message.get("content") or "", (str, list))
        and all(
            isinstance(call, dict) and "name" in call.get("function", {}) for call in message.get("tool_calls") or ()
        )
    )


def openai_answer(answered: Answered, *, name: str, model: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": answered.message, "finish_reason": answered.finish, "logprobs": None}],
        "usage": openai_usage(answered),
    }


def openai_usage(answered: Answered | Completed) -> dict[str, int]:
    return {
        "prompt_tokens": answered.prompt_tokens,
        "completion_tokens": answered.tokens,
        "total_tokens": answered.prompt_tokens + answered.tokens,
    }


def openai_stream(answered: Answered, *, name: str, model: str, usage: bool) -> list[dict[str, Any]]:
    """The same in the pieces of a stream: the message, its calls, its end."""
    calls = [{"index": n, **call} for n, call in enumerate(answered.message.get("tool_calls") or ())]
    delta = {key: value for key, value in answered.message.items() if key != "tool_calls"}
    pieces: list[tuple[dict[str, Any], str | None]] = [(delta, None)]
    pieces += [({"tool_calls": [call]}, None) for call in calls]
    pieces.append(({}, answered.finish))
    base = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": model}
    found: list[dict[str, Any]] = [
        {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]} for delta, finish in pieces
    ]
    if usage:
        found.append({**base, "choices": [], "usage": openai_usage(answered)})
    return found


# --------------------------------------------------------------------------- OpenAI's completions


def completion_request(body: dict[str, Any]) -> str | list[int]:
    """The prompt: text, or tokens."""
    refuse(body, COMPLETIONS)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    if not isinstance(prompt, str) or not prompt:
        raise Invalid("prompt must be one text, or one list of tokens", remedy="send several prompts one by one")
    return prompt


def completion_answer(completed: Completed, *, name: str, model: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "text_completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "text": completed.text, "finish_reason": completed.finish, "logprobs": None}],
        "usage": openai_usage(completed),
    }


def completion_stream(completed: Completed, *, name: str, model: str, usage: bool) -> list[dict[str, Any]]:
    """The same in the pieces of a stream."""
    whole = completion_answer(completed, name=name, model=model)
    counted = whole.pop("usage")
    found = [whole]
    if usage:
        found.append({**whole, "choices": [], "usage": counted})
    return found


# --------------------------------------------------------------------------- Anthropic


def anthropic_request(body: dict[str, Any]) -> tuple[list[Message], list[Tool]]:
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _texts(body["system"])})
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Invalid("messages must be a list")
    try:
        for message in body["messages"]:
            messages += _from_anthropic(message)
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool.get("input_schema", {}),
                },
            }
            for tool in body.get("tools") or ()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"a message or tool lacks {error}") from None
    return messages, tools


def _from_anthropic(message: dict[str, Any]) -> list[Message]:
    """A message of blocks: results of tools are messages of their own, before what else is said."""
    blocks = message["content"]
    if isinstance(blocks, str):
        return [{"role": message["role"], "content": blocks}]
    results = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _texts(block.get("content") or "")}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if message["role"] == "user":
        return [*results, *([{"role": "user", "content": text}] if text or not results else [])]
    return [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}]


def _texts(content: Any) -> str:
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


def anthropic_answer(answered: Answered, *, name: str, model: str) -> dict[str, Any]:
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(answered),
        "stop_reason": FINISH[answered.finish],
        "stop_sequence": None,
        "usage": {"input_tokens": answered.prompt_tokens, "output_tokens": answered.tokens},
    }


def _blocks(answered: Answered) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answered.message["content"]:
        blocks.append({"type": "text", "text": answered.message["content"]})
    for call in answered.message.get("tool_calls") or ():
        try:
            value = json.loads(call["function"]["arguments"])
        except ValueError:
            value = {"text": call["function"]["arguments"]}
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value})
    return blocks or [{"type": "text", "text": ""}]


def anthropic_stream(answered: Answered, *, name: str, model: str) -> list[tuple[str, dict[str, Any]]]:
    """The same in the events of a stream."""
    whole = anthropic_answer(answered, name=name, model=model)
    begun = {**whole, "content": [], "stop_reason": None}
    events: list[tuple[str, dict[str, Any]]] = [("message_start", {"message": begun})]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        events += [
            ("content_block_start", {"index": index, "content_block": empty}),
            ("content_block_delta", {"index": index, "delta": delta}),
            ("content_block_stop", {"index": index}),
        ]
    ended = {"delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None}, "usage": whole["usage"]}
    return [*events, ("message_delta", ended), ("message_stop", {})]
