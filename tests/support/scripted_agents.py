"""Coding agents as npm and PyPI have them, and a model for all of them, which says what is written here.

The task: a program with a fault, which three commands look at, repair and check; aider, which runs no commands, is
given a wrong repair and, after the failed check, the right one. Not a test module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.gateway_upstream import Upstream

COMMANDS = [
    "cat calc.py; echo looked >> log",
    "sed -i 's/a - b/a + b/' calc.py; echo repaired >> log",
    "python3 check.py && echo checked >> log",
]
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "check.py": "from calc import add\nassert add(2, 3) == 5\nprint('good')\n",
}
REPAIRED = "def add(a, b):\n    return a + b\n"
LOG = "looked\nrepaired\nchecked\n"
TASK = "add() is wrong"
OPENCODE = {
    "model": "host/scripted",
    "small_model": "host/scripted",
    "provider": {
        "host": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "http://127.0.0.1:7000/v1", "apiKey": "held-by-the-host"},
            "models": {"scripted": {}},
        }
    },
}
CODEX = (
    'model_providers.host={name="host", base_url="http://127.0.0.1:7000/v1", '
    'env_key="OPENAI_API_KEY", wire_api="responses"}'
)


@dataclass(frozen=True)
class CodingAgent:
    """One of them. `hold`: the request in the middle of which it is killed, counted from 1."""

    command: str  # of a shell
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # below its home, or absolute
    hold: int = 3
    log: str = LOG


AGENTS = {
    "claude-code": CodingAgent(
        f"claude -p '{TASK}' --dangerously-skip-permissions",
        env={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    "codex": CodingAgent(
        "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
        f" -c model=scripted -c model_provider=host -c '{CODEX}' '{TASK}'"
    ),
    "gemini-cli": CodingAgent(
        f"gemini --skip-trust -y -m gemini-2.5-flash -p '{TASK}'",
        files={".gemini/settings.json": json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}})},
    ),
    "opencode": CodingAgent(  # it asks for a title, too
        f"opencode run '{TASK}'", files={"/srv/opencode.json": json.dumps(OPENCODE)}, hold=4
    ),
    "aider": CodingAgent(
        "python3 -m aider --yes-always --no-git --no-check-update --no-analytics --no-show-model-warnings"
        " --model openai/scripted --edit-format diff --auto-test"
        f" --test-cmd 'python3 check.py && echo checked >> log' --message '{TASK}' calc.py",
        env={"PYTHONPATH": "/opt/aider", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        hold=2,
        log="checked\n",
    ),
    "qwen-code": CodingAgent(f"qwen --auth-type openai -y -p '{TASK}'", env={"OPENAI_MODEL": "scripted"}),
}


# --------------------------------------------------------------------------- the model


def reply(body: dict[str, Any]) -> Any:
    """What the model says next, by how far the conversation is, in the protocol of the request."""

    async def answer(_: Upstream, request: web.Request) -> web.StreamResponse:
        if "enerateContent" in request.path:
            return await _gemini(request, body)
        if request.path == "/v1/messages":
            return await _messages(request, body)
        if request.path == "/v1/responses":
            return await _responses(request, body)
        if request.path == "/v1/chat/completions":
            return await _chat(request, body)
        return web.json_response({"input_tokens": 1, "totalTokens": 1})

    return answer


async def _events(request: web.Request, events: list[dict[str, Any]], end: bytes = b"") -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        named = f"event: {event['type']}\n" if "type" in event else ""
        await response.write(f"{named}data: {json.dumps(event)}\n\n".encode())
    await response.write(end)
    await response.write_eof()
    return response


def _call(names: list[str], done: int) -> tuple[str, dict[str, Any]] | None:
    """The tool by which this agent runs commands, and the next command; None: all has been done, or it has none."""
    if done >= len(COMMANDS):
        return None
    said = COMMANDS[done]
    tools = {
        "Bash": {"command": said, "description": "next"},
        "bash": {"command": said, "description": "next"},
        "run_shell_command": {"command": said, "description": "next", "is_background": False},
        "exec_command": {"cmd": said},
        "shell_command": {"command": said},
    }
    name = next((name for name in tools if name in names), None)
    return None if name is None else (name, tools[name])


async def _messages(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    parts = [
        part for message in body["messages"] if isinstance(message["content"], list) for part in message["content"]
    ]
    done = sum(part.get("type") == "tool_result" for part in parts)
    call = _call([tool["name"] for tool in body.get("tools", [])], done)
    stop = "end_turn" if call is None else "tool_use"
    block: dict[str, Any] = {"type": "text", "text": ""}
    delta = {"type": "text_delta", "text": "done"}
    if call is not None:
        block = {"type": "tool_use", "id": f"toolu_{done}", "name": call[0], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
    message = {
        "id": f"m{done}", "type": "message", "role": "assistant", "model": "scripted", "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1}, "content": [], "stop_reason": None,
    }  # fmt: skip
    if not body.get("stream"):
        return web.json_response({**message, "content": [{"type": "text", "text": "done"}], "stop_reason": "end_turn"})
    return await _events(
        request,
        [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 1}},
            {"type": "message_stop"},
        ],
    )


async def _responses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    done = sum(item.get("type") == "function_call_output" for item in body["input"])
    call = _call([tool.get("name", "") for tool in body.get("tools", [])], done)
    text = [{"type": "output_text", "text": "done", "annotations": []}]
    item: dict[str, Any] = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": text}
    if call is not None:
        item = {"type": "function_call", "id": f"f{done}", "call_id": f"c{done}", "status": "completed"}
        item |= {"name": call[0], "arguments": json.dumps(call[1])}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    response = {"id": f"r{done}", "object": "response", "created_at": 1, "model": "scripted", "usage": usage}
    response |= {
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
    return await _events(
        request,
        [
            {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": response},
        ],
    )


async def _chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    names = [tool["function"]["name"] for tool in body.get("tools", [])]
    done = sum(message["role"] == "tool" for message in body["messages"])
    call = _call(names, done)
    message: dict[str, Any] = {"role": "assistant", "content": "done"}
    if call is not None:
        function = {"name": call[0], "arguments": json.dumps(call[1])}
        tool = {"index": 0, "id": f"call_{done}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [tool]}
    elif not names and "SEARCH" in json.dumps(body["messages"]):  # aider's form
        said = [str(item["content"]) for item in body["messages"] if item["role"] == "assistant"]
        old, new = ("a * b", "a + b") if any("a * b" in text for text in said) else ("a - b", "a * b")
        edit = f"<<<<<<< SEARCH\n    return {old}\n=======\n    return {new}\n>>>>>>> REPLACE"
        message = {"role": "assistant", "content": f"calc.py\n```python\n{edit}\n```\n"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    base = {"id": f"x{done}", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    finish = "stop" if call is None else "tool_calls"
    return await _events(
        request,
        [
            {**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": usage},
        ],
        b"data: [DONE]\n\n",
    )


async def _gemini(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    done = sum("functionResponse" in part for content in body["contents"] for part in content["parts"])
    tools = [item["name"] for tool in body.get("tools", []) for item in tool.get("functionDeclarations", [])]
    call = _call(tools, done)
    part = {"text": "done"} if call is None else {"functionCall": {"name": call[0], "args": call[1]}}
    candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    answer = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "scripted"}
    if "stream" not in request.path:
        return web.json_response(answer)
    return await _events(request, [answer])
