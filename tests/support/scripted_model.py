"""A model that follows a script, for tools that call functions: the n-th answer of a conversation is the n-th step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Step = tuple[str, dict[str, Any]] | str  # a function and its arguments, or what the model says


def script(*steps: Step) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What `Upstream` replies. The last step is repeated."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        spoken = sum(message.get("role") == "assistant" for message in body["messages"])
        step = steps[min(spoken, len(steps) - 1)]
        message: dict[str, Any] = {"role": "assistant", "content": step if isinstance(step, str) else ""}
        if not isinstance(step, str):
            function = {"name": step[0], "arguments": json.dumps(step[1])}
            message["tool_calls"] = [{"id": f"call_{spoken}", "type": "function", "function": function}]
        finish = "stop" if isinstance(step, str) else "tool_calls"
        return {
            "id": f"chatcmpl-{spoken}",
            "object": "chat.completion",
            "created": 1,
            "model": "scripted",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }

    return reply
