"""What passes between agents and models as it is: headers, encodings, events, redirects, requests beside the model."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zstandard
from aiohttp import web
from multidict import CIMultiDict

from sandbox import Client
from sandbox.messages import Gateway
from tests.support.daemon_host import IMAGE, Daemon, free_port, missing
from tests.support.gateway_upstream import Upstream, chat

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    config: Path = tmp_path_factory.mktemp("config") / "gateway.toml"
    config.write_text(f'listen = "127.0.0.1:{free_port()}"\n')
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGURUS_GATEWAY_CONFIG", str(config))
        try:
            yield daemon.start()
        finally:
            daemon.clean()


@pytest.fixture
async def agent(host: Client, upstream: Upstream) -> AsyncIterator[aiohttp.ClientSession]:
    """A connection to the gateway that speaks for a sandbox."""
    async with host.create(IMAGE, gateway=Gateway(upstream="scripted", agent="outside")) as sandbox:
        token = await sandbox.gateway.token()
        headers = {"x-api-key": token.token}
        async with aiohttp.ClientSession(token.base_url, headers=headers) as session:
            yield session


async def test_each_line_of_a_header_arrives(agent: aiohttp.ClientSession, upstream: Upstream) -> None:
    lines = [("anthropic-beta", "one"), ("anthropic-beta", "t" * 5000), ("anthropic-beta", "three,four")]
    async with agent.post("/v1/messages", json=HELLO, headers=CIMultiDict(lines)) as answer:
        assert answer.status == 200
    assert [line for line in upstream.lines[0] if line[0] == "anthropic-beta"] == lines


async def test_a_header_that_is_too_long_is_refused(agent: aiohttp.ClientSession, upstream: Upstream) -> None:
    lines = [("anthropic-beta", "x" * 4500), ("anthropic-beta", "x" * 4500)]
    async with agent.post("/v1/messages", json=HELLO, headers=CIMultiDict(lines)) as answer:
        assert answer.status == 400
        assert "anthropic-beta" in (await answer.json())["error"]["message"]
    assert upstream.requested == []


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
async def test_a_compressed_body_arrives_unpacked(
    agent: aiohttp.ClientSession, upstream: Upstream, encoding: str, pack: Any
) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    body = pack(json.dumps(HELLO).encode())
    async with agent.post("/v1/chat/completions", data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    assert upstream.requested[0][1] == HELLO
    assert "content-encoding" not in upstream.headers[0]


async def test_a_client_that_waits_for_a_word_gets_it(agent: aiohttp.ClientSession, upstream: Upstream) -> None:
    host, port = agent._base_url.host, agent._base_url.port  # type: ignore[union-attr]
    body = json.dumps(HELLO).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nX-Api-Key: {agent.headers['x-api-key']}\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )

    def speak() -> tuple[bytes, bytes]:
        with socket.create_connection((host, port), timeout=120) as peer:
            peer.sendall(head.encode())
            word = peer.recv(len(b"HTTP/1.1 100 Continue\r\n\r\n"))
            peer.sendall(body)
            rest = b""
            while part := peer.recv(65536):
                rest += part
            return word, rest

    word, rest = await asyncio.to_thread(speak)
    assert word == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert rest.startswith(b"HTTP/1.1 200 ") and b"answer 1" in rest


async def test_each_event_goes_out_when_it_comes(agent: aiohttp.ClientSession, upstream: Upstream) -> None:
    events = [f'data: {{"choices": [{{"delta": {{"content": "{n}"}}}}]}}\n\n'.encode() for n in range(3)]
    gates = [asyncio.Event() for _ in events]

    async def stream(_: Upstream, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event, gate in zip(events, gates, strict=True):
            await response.write(event)
            await gate.wait()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    upstream.reply = lambda _: stream
    async with agent.post("/v1/chat/completions", json={**HELLO, "stream": True}) as answer:
        for event, gate in zip(events, gates, strict=True):
            assert await answer.content.readexactly(len(event)) == event  # the next one has not been sent yet
            gate.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"


async def test_a_lone_surrogate_is_refused_by_name(agent: aiohttp.ClientSession, upstream: Upstream) -> None:
    body = rb'{"model": "m", "messages": [{"role": "user", "content": "\udc80"}]}'
    async with agent.post("/v1/messages", data=body, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 400
        assert "lone surrogate" in (await answer.json())["error"]["message"]
    assert upstream.requested == []


async def test_a_redirect_says_where_it_leads(agent: aiohttp.ClientSession, upstream: Upstream) -> None:
    for location, observed in ((f"{upstream.url}/v1/other?x=1", "/v1/other?x=1"), ("https://else.where/", None)):

        async def redirect(_: Upstream, __: web.Request, location: str = location) -> web.Response:
            return web.Response(status=307, headers={"Location": location})

        upstream.reply = lambda _, redirect=redirect: redirect
        async with agent.post("/v1/chat/completions", json=HELLO, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (307, observed or location)


async def test_requests_beside_the_model_pass(agent: aiohttp.ClientSession, upstream: Upstream) -> None:
    upstream.reply = lambda _: {"input_tokens": 3}
    for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/api/event_logging/batch"):
        async with agent.post(path, json=HELLO) as answer:
            assert (answer.status, await answer.json()) == (200, {"input_tokens": 3})
    async with agent.head("/") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    async with agent.get("/api/hello") as answer:
        assert await answer.json() == {"message": "hello"}
    assert upstream.others == ["HEAD /", "GET /api/hello"]
    async with agent.get("/api/other") as answer:
        assert answer.status == 404


async def test_a_compaction_is_an_exchange(host: Client, agent: aiohttp.ClientSession, upstream: Upstream) -> None:
    upstream.reply = lambda _: chat("compact")
    async with agent.post("/v1/responses/compact", json={"input": [{"role": "user", "content": "x"}]}) as answer:
        assert answer.status == 200
        assert answer.headers["x-pagurus-turn"] == "1"
