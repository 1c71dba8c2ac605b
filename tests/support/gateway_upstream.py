"""A scripted model server for the tests of the gateway: OpenAI and Anthropic, streams included. Not a test module."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], Any]


def chat(text: str = "", *, command: str | None = None, number: int = 0) -> dict[str, Any]:
    """An answer of /v1/chat/completions: a text, or a call of the tool `bash`."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if command is not None:
        call = {"name": "bash", "arguments": json.dumps({"command": command})}
        message["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": call}]
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop" if command is None else "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


class Upstream:
    """``async with Upstream(reply) as upstream``: serves `reply(body)` on every POST route. See `requested`."""

    def __init__(self, reply: Reply | None = None) -> None:
        self.reply = reply or (lambda body: chat(f"answer {len(self.requested)}"))
        self.requested: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.lines: list[list[tuple[str, str]]] = []  # of headers, as they came
        self.others: list[str] = []  # what else was asked: method and path
        self.status = 200
        self.gate = asyncio.Event()  # answers wait for it
        self.gate.set()
        self.holds = 0  # from the request of this number on the gate is closed; 0: it is left alone
        self.requested_once = asyncio.Event()
        self.sent = 0  # bytes of an endless stream
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Upstream:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("GET", "/v1/models", self._models)
        app.router.add_route("POST", "/{tail:.*}", self._answer)
        app.router.add_get("/{tail:.*}", self._other)  # HEAD as well
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _other(self, request: web.Request) -> web.Response:
        self.others.append(f"{request.method} {request.path}")
        return web.json_response({"message": "hello"})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requested.append((request.path, body))
        self.lines.append([(name.lower(), value) for name, value in request.headers.items()])
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.requested_once.set()
        if len(self.requested) == self.holds:
            self.gate.clear()
        await self.gate.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status, headers={"retry-after": "0"})
        answer = self.reply(body)
        if isinstance(answer, web.StreamResponse):
            return answer
        if callable(answer):
            return await answer(self, request)
        if not body.get("stream"):
            return web.json_response(answer)
        return await self._stream(request, answer)

    async def _stream(self, request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        message = answer["choices"][0]["message"]
        words = message["content"].split(" ")
        for index, word in enumerate(words):
            delta: dict[str, Any] = {"content": word if index == 0 else " " + word}
            if index == 0:
                delta["role"] = "assistant"
            await self._event(response, answer, delta, None)
        last: dict[str, Any] = {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
        await self._event(response, answer, last, answer["choices"][0]["finish_reason"])
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _event(self, response: web.StreamResponse, answer: dict[str, Any], delta: Any, finish: Any) -> None:
        chunk = {
            "id": answer["id"],
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "scripted",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def endless(upstream: Upstream, request: web.Request) -> web.StreamResponse:
    """A stream that never ends."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunk = b"data: " + b"x" * 65_000 + b"\n\n"
    try:
        while True:
            await response.write(chunk)
            upstream.sent += len(chunk)
    except ConnectionError:
        return response


async def broken(upstream: Upstream, request: web.Request) -> web.StreamResponse:
    """A stream that breaks off in the middle."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: half\n\n")
    assert request.transport is not None
    request.transport.abort()
    return response
