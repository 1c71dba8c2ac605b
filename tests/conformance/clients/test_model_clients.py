"""The clients of OpenAI and Anthropic as they come from PyPI, against the gateway. `make setup-clients` brings them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sandbox import Client, paths
from sandbox.messages import Gateway
from sandbox.messages import Upstream as Address
from tests.support.daemon_host import IMAGE, Daemon, free_port, missing
from tests.support.gateway_upstream import Upstream, chat
from tests.support.tools import record

ROOT = Path(__file__).parents[3]
PYTHON = paths.prefix() / "clients/models/bin/python"
pytestmark = pytest.mark.long
TEXT = "well met crab"
BETAS = "interleaved-thinking-2025-05-14," + "b" * 2000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    if not PYTHON.exists():
        pytest.skip("the clients of models are not installed: run `make setup-clients`")
    config: Path = tmp_path_factory.mktemp("config") / "gateway.toml"
    config.write_text(f'listen = "127.0.0.1:{free_port()}"\n')
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGURUS_GATEWAY_CONFIG", str(config))
        try:
            yield daemon.start()
        finally:
            daemon.clean()


class Model:
    """A model that says the next word of a stream when the client has shown the last one."""

    def __init__(self) -> None:
        self.shown = asyncio.Semaphore(0)

    async def reply(self, upstream: Upstream, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.path.endswith(("count_tokens", "input_tokens")):
            return web.json_response({"input_tokens": 3, "object": "response.input_tokens"})
        if request.path == "/v1/responses":
            return web.json_response(_response())
        if request.path == "/v1/messages":
            return await _anthropic(request, stream=body.get("stream") is True)
        return await self._stream(request) if body.get("stream") else web.json_response(chat(TEXT))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in TEXT.split():
            delta = [{"index": 0, "delta": {"content": word}, "finish_reason": None}]
            event = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": delta}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await self.shown.acquire()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def test_every_call_of_the_clients(host: Client, tmp_path: Path) -> None:
    model = Model()
    async with Upstream(lambda _: model.reply) as upstream:
        await host.gateway.put("scripted", Address(url=upstream.url))
        async with host.create(IMAGE, gateway=Gateway(upstream="scripted", agent="outside")) as sandbox:
            token = await sandbox.gateway.token()
            made = await _calls(str(token.base_url), token.token, model, tmp_path)
            exchanges = [item.path for item in await sandbox.gateway.exchanges()]
    assert made == [
        ("chat", TEXT),
        *(("chat stream", word) for word in TEXT.split()),
        ("responses", TEXT),
        ("input tokens", 3),
        ("models", ["scripted"]),
        ("surrogate", True),
        ("count tokens", 3),
        ("beta", TEXT),
        ("messages stream", TEXT),
        ("too long", True),
        ("hello", 200),
    ]
    assert [value for lines in upstream.lines for name, value in lines if name == "anthropic-beta"] == [BETAS]
    record("models", {f"{number} {call}": "passed" for number, (call, _) in enumerate(made)})
    chats, messages = ["/v1/chat/completions"] * 2, ["/v1/messages"] * 2
    assert exchanges == [*chats, "/v1/responses", *messages]  # what was refused or asked beside the model is none


async def _calls(base: str, token: str, model: Model, tmp_path: Path) -> list[tuple[str, Any]]:
    names = {"OPENAI_API_KEY": token, "ANTHROPIC_API_KEY": token, "HOME": str(tmp_path)}
    addresses = {"OPENAI_BASE_URL": f"{base}/v1", "ANTHROPIC_BASE_URL": base, "PATH": os.environ["PATH"]}
    program = await asyncio.create_subprocess_exec(
        PYTHON,
        ROOT / "tests/support/model_calls.py",
        env={**names, **addresses},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert program.stdin is not None and program.stdout is not None and program.stderr is not None
    made = []
    async for line in program.stdout:
        item = json.loads(line)
        made.append((item["call"], item["gave"]))
        if item["call"] == "chat stream":
            program.stdin.write(b"\n")
            model.shown.release()
    errors = await program.stderr.read()
    assert await program.wait() == 0, errors.decode()[-3000:]
    return made


def _response() -> dict[str, Any]:
    content = [{"type": "output_text", "text": TEXT, "annotations": []}]
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
    return {
        "id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": [message],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


async def _anthropic(request: web.Request, *, stream: bool) -> web.StreamResponse:
    message = {
        "id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
        "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip
    if not stream:
        return web.json_response({**message, "content": [{"type": "text", "text": TEXT}]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in (
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ):
        await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
    await response.write_eof()
    return response
