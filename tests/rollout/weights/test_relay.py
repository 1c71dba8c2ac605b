"""Versions over HTTP: one copy over the slow link, resumed when it breaks, fetched again when it is wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rollout.weights.mirror import Mirror
from rollout.weights.puller import Puller
from rollout.weights.relay import Relay
from rollout.weights.source import HttpSource
from rollout.weights.store import VersionStore
from rollout.weights.versions import Ref
from sandbox.errors import EngineFailed, NotFound, Unauthorized
from tests.support.daemon_host import free_port
from tests.support.weights import FILES, Walk, same
from trainer.weights import Publisher


@contextlib.asynccontextmanager
async def served(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Trouble:
    """Stands before a relay, and spoils the answers that it is told to."""

    def __init__(self, url: str):
        self.url, self.session = url, aiohttp.ClientSession(auto_decompress=False)
        self.flip = self.cut = self.refuse = 0
        self.ranges: list[str] = []

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self.get), web.put("/{path:.*}", self.put)])
        return app

    async def put(self, request: web.Request) -> web.Response:
        await self.session.put(self.url + request.path, data=await request.read())
        return web.Response()

    async def get(self, request: web.Request) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in ("Range", "Cache-Control") if name in request.headers}
        async with self.session.get(self.url + request.path, headers=headers) as answer:
            body, status = await answer.read(), answer.status
        if "Range" in request.headers:
            self.ranges.append(request.headers["Range"])
        if not request.path.startswith("/chunks/") or len(body) < 2_000:
            return web.Response(status=status, body=body)
        if self.refuse:
            self.refuse -= 1
            return web.Response(status=503)
        if self.flip:
            self.flip -= 1
            body = body[:1000] + bytes([body[1000] ^ 1]) + body[1001:]
        response = web.StreamResponse(status=status)
        response.content_length = len(body)
        await response.prepare(request)
        if self.cut:
            self.cut -= 1
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(body)
        return response


async def test_engines_behind_a_relay_cost_one_copy(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "weights")
    walk, publisher = Walk(scale=8), Publisher(store)
    relay = Relay(VersionStore(tmp_path / "relay"))
    async with served(Relay(store).application()) as origin:
        relay.upstream = HttpSource(origin)
        async with served(relay.application()) as near:
            pullers = [Puller(HttpSource(near), Mirror(tmp_path / f"m{n}"), name=f"m{n}") for n in range(6)]
            for version in range(3):
                publisher.publish(version, walk.step(), FILES)
                await asyncio.sleep(0.25)  # the relay's listing
                pulled = await asyncio.gather(*(puller.pull(version) for puller in pullers))
                assert {item.version for item in pulled} == {version}
                assert all(same(tmp_path / f"m{n}", walk.tensors) for n in range(6))
            item = sum(path.stat().st_size for path in (tmp_path / "relay").glob("chunks/??/*"))
            assert relay.statistics.fetched_bytes == item  # nothing crossed twice
            assert relay.statistics.served_bytes > 5 * item
            assert set(store.readers()) == {f"m{n}" for n in range(6)}  # the publisher knows who stands where
            for puller in pullers:
                await puller.close()
        await relay.upstream.close()


async def test_a_broken_connection_goes_on_where_it_broke(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "weights")
    ref = store.put(bytes(range(256)) * 4096)
    async with served(Relay(store).application()) as origin:
        trouble = Trouble(origin)
        trouble.cut = 3
        async with served(trouble.application()) as url:
            source = HttpSource(url)
            assert await source.chunk(ref) == store.get(ref)
            assert len(trouble.ranges) == 3
            assert source.received == ref.size  # no byte came twice
            await source.close()
        await trouble.session.close()


async def test_a_flipped_byte_is_fetched_again(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "weights")
    ref = store.put(bytes(range(256)) * 4096)
    async with served(Relay(store).application()) as origin:
        trouble = Trouble(origin)
        trouble.flip, trouble.refuse = 2, 2
        async with served(trouble.application()) as url:
            source = HttpSource(url)
            assert await source.chunk(ref) == store.get(ref)
            assert source.refetched == 2
            trouble.flip = 10**9
            with pytest.raises(EngineFailed, match="do not match their hash"):
                await source.chunk(ref)
            await source.close()
        await trouble.session.close()


async def test_a_relay_whose_copy_was_damaged_fetches_it_again(tmp_path: Path) -> None:
    store, cache = VersionStore(tmp_path / "weights"), VersionStore(tmp_path / "relay")
    ref = store.put(bytes(range(256)) * 4096)
    async with served(Relay(store).application()) as origin:
        relay = Relay(cache, HttpSource(origin))
        async with served(relay.application()) as near:
            source = HttpSource(near)
            await source.chunk(ref)
            cache.path(ref.digest).write_bytes(bytes(ref.size))
            assert await source.chunk(ref) == store.get(ref)
            assert relay.statistics.fetched_chunks == 2
            await source.close()
        assert relay.upstream is not None
        await relay.upstream.close()


async def test_a_relay_that_died_is_waited_for(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "weights")
    walk, publisher = Walk(), Publisher(store)
    publisher.publish(0, walk.tensors, FILES)
    port = free_port()  # which nobody takes while the relay is away
    async with served(Relay(store).application(), port) as url:
        puller = Puller(HttpSource(url), Mirror(tmp_path / "m"), name="m")
        await puller.pull()
    publisher.publish(1, walk.step(), FILES)
    pulling = asyncio.create_task(puller.pull(1))
    await asyncio.sleep(0.5)
    assert not pulling.done()
    async with served(Relay(store).application(), port):
        assert (await pulling).version == 1
    assert same(tmp_path / "m", walk.tensors)
    await puller.close()


async def test_who_has_no_token_gets_nothing(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "weights")
    ref = store.put(b"secret weights")
    async with served(Relay(store, token="right").application()) as url:
        for token in (None, "wrong"):
            source = HttpSource(url, token=token)
            with pytest.raises(Unauthorized, match="wants a token"):
                await source.chunk(ref)
            await source.close()
        source = HttpSource(url, token="right")
        assert await source.chunk(ref) == b"secret weights"
        with pytest.raises(NotFound, match="no weights"):
            await source.chunk(Ref("0" * 64, 10))
        await source.close()


async def test_a_cache_keeps_within_its_bounds(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "weights")
    refs = [store.put(bytes([number]) * 100_000) for number in range(10)]
    async with served(Relay(store).application()) as origin:
        relay = Relay(VersionStore(tmp_path / "relay"), HttpSource(origin), limit=350_000)
        async with served(relay.application()) as near:
            source = HttpSource(near)
            for ref in refs:
                assert await source.chunk(ref) == store.get(ref)
            held = [ref for ref in refs if relay.cache.has(ref.digest)]
            assert held == refs[-3:]
            assert await source.chunk(refs[0]) == store.get(refs[0])
            await source.close()
        assert relay.upstream is not None
        await relay.upstream.close()
