"""What becomes of calls under way when their token ceases to be valid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from daemon.auth import tokens
from daemon.auth.tokens import TokenStore


class Clock:
    """Stands still until a test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[TokenStore, Clock, str]]:
    monkeypatch.setattr(tokens, "POLL_INTERVAL", 0.02)
    clock = Clock()
    store = TokenStore(tmp_path / "tokens.json", clock=clock)

    async def handle(request: web.Request) -> web.StreamResponse:
        with store.watched(store.caller(request), request):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"begun")
            if request.query.get("short"):
                await asyncio.sleep(0.2)  # several looks
                await response.write(b" and ended")
            while not request.query.get("short") and request.transport is not None:  # noqa: ASYNC110 - whoever asked left
                await asyncio.sleep(0.01)
            return response

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield store, clock, f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_a_stream_ends_with_its_token(served: tuple[TokenStore, Clock, str], how: str) -> None:
    store, clock, url = served
    (grant, text), (_, other) = store.create(name="a", scope="exec", lifetime=10), store.create(name="b", scope="exec")
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {text}"}
        async with session.get(url, headers=headers) as answer:
            assert await answer.content.readany() == b"begun"
            if how == "revoked":
                store.revoke(grant.id)
            else:
                clock.now += 11
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        async with session.get(f"{url}?short=1", headers={"Authorization": f"Bearer {other}"}) as answer:
            assert await answer.read() == b"begun and ended", "others go on"
