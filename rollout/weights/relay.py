"""`Relay`: the versions of a publisher, served to the engines of one cluster.

Guarantee: however many engines ask, a chunk crosses the link to the upstream once while it is in the cache; it is
served only after its hash was checked; a relay that died begins with what its directory holds.

::

    GET  /versions             list[VersionRef], as msgpack
    GET  /chunks/DIGEST        content, with byte ranges
    PUT  /readers/NAME         Lease: passed on to the upstream, so that nothing is collected under a reader
    GET  /statistics           Statistics, as JSON

The publisher's own server is a relay without an upstream. As a role: ``python -m rollout.weights.relay``.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from rollout.weights.source import DirectorySource, WeightSource, source_of
from rollout.weights.store import ReaderLease, VersionStore
from rollout.weights.versions import Ref
from sandbox import structs
from sandbox.errors import Invalid, NotFound, PagurusError, TooMany, Unauthorized
from sandbox.termination import termination_signals

log = logging.getLogger("pagurus.relay")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_SERVING = 256  # answers under way; further clients get an error to retry
MAX_CHUNK = 1 << 30  # bytes
AT_ONCE = 2  # chunks over the slow link; few, so that the first is whole, and can be served, soon
LISTING_FRESH = 0.2  # seconds for which a listing is not requested again
STATUS: dict[type[PagurusError], int] = {Invalid: 400, Unauthorized: 401, NotFound: 404, TooMany: 429}


class RelayStatistics(msgspec.Struct, kw_only=True):
    """relay -> people: since its start."""

    fetched_bytes: int = 0  # from the upstream
    served_bytes: int = 0
    fetched_chunks: int = 0
    served_chunks: int = 0
    refetched: int = 0  # chunks that arrived damaged


class Relay:
    """``relay = Relay(VersionStore(cache), HttpSource(url)); web.run_app(relay.application())``"""

    def __init__(
        self,
        cache: VersionStore,
        upstream: WeightSource | None = None,
        *,
        token: str | None = None,
        limit: int | None = None,
    ):
        """`limit`: bytes that the cache may hold; what was used least recently goes. A publisher's own is collected."""
        self.cache, self.upstream, self.limit = cache, upstream, limit
        self.statistics = RelayStatistics()
        self._token = token
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._line = asyncio.Semaphore(AT_ONCE)
        self.serving = 0
        self._listing: tuple[float, bytes] | None = None
        self._listed = asyncio.Lock()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._gate], client_max_size=1 << 16)
        app.add_routes(
            [
                web.get("/versions", self._versions),
                web.get("/chunks/{digest}", self._chunk),
                web.put("/readers/{name}", self._reader),
                web.get("/statistics", self._statistics),
            ]
        )
        return app

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._token is not None and not hmac.compare_digest(
                request.headers.get("Authorization", "").encode(), f"Bearer {self._token}".encode()
            ):
                raise Unauthorized("this relay wants a token", hint="send `Authorization: Bearer TOKEN`")
            return await handler(request)
        except PagurusError as error:
            status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 503)
            return web.Response(status=status, text=str(error))

    async def _versions(self, _: web.Request) -> web.Response:
        async with self._listed:  # one question to the upstream, for all callers until then
            if self._listing is None or time.monotonic() - self._listing[0] > LISTING_FRESH:
                source = self.upstream or DirectorySource(self.cache)
                self._listing = (time.monotonic(), msgspec.msgpack.encode(await source.versions()))
        return web.Response(body=self._listing[1], content_type="application/msgpack")

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["digest"]
        path = self.cache.path(name)
        if self.serving >= MAX_SERVING:
            raise TooMany("this relay serves as many as it can", hint="ask again in a moment")
        if request.headers.get("Cache-Control") == "no-cache":  # its reader says that it was damaged
            await asyncio.to_thread(self.cache.check, name)
        if not path.exists():
            await self._fetch(name)
        os.utime(path)
        return _Content(self, path)

    async def _fetch(self, name: str) -> None:
        """Bring content here, once for all who ask."""
        if self.upstream is None:
            raise NotFound(f"no weights {name[:12]} here", hint="ask for what /versions and its manifests name")
        task = self._fetching.get(name)
        if task is None:
            task = self._fetching[name] = asyncio.create_task(self._bring(name, self.upstream))
            task.add_done_callback(lambda _: self._fetching.pop(name, None))
        await asyncio.shield(task)  # the first caller may leave: the others wait on

    async def _bring(self, name: str, upstream: WeightSource) -> None:
        async with self._line:
            content = await upstream.chunk(Ref(name, MAX_CHUNK))
        await asyncio.to_thread(self.cache.put, content, existing=Ref(name, len(content)))
        self.statistics.fetched_chunks += 1
        self.statistics.fetched_bytes += len(content)
        self.statistics.refetched = upstream.refetched
        if self.limit is not None:
            await asyncio.to_thread(self.cache.trim, self.limit)

    async def _reader(self, request: web.Request) -> web.Response:
        try:
            lease = msgspec.msgpack.decode(await request.read(), type=ReaderLease)
        except msgspec.MsgspecError as error:
            raise Invalid(f"that is no lease: {error}", hint="update reader and relay to the same version") from None
        await (self.upstream or DirectorySource(self.cache)).lease(request.match_info["name"], lease)
        return web.Response()

    async def _statistics(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.statistics), content_type="application/json")


class _Content(web.FileResponse):
    """One answer with content, counted."""

    def __init__(self, relay: Relay, path: Path):
        super().__init__(path, headers={"Content-Type": "application/octet-stream"})
        self._relay = relay

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._relay.serving += 1
        try:
            return await super().prepare(request)
        finally:
            self._relay.serving -= 1
            self._relay.statistics.served_chunks += 1
            self._relay.statistics.served_bytes += self.content_length or 0


async def serve(
    relay: Relay, host: str, port: int, *, tls: ssl.SSLContext | None = None, ready: Callable[[int], None] | None = None
) -> None:
    """Runs until a signal ends it. `ready` gets the port."""
    runner = web.AppRunner(relay.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port, ssl_context=tls)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    log.info("serving weights on %s:%d", host, port)
    if ready is not None:
        ready(port)
    stop = asyncio.Event()
    for number in termination_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        await runner.cleanup()
        if relay.upstream is not None:
            await relay.upstream.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rollout.weights.relay", description="Serve weights by content.")
    parser.add_argument("--directory", type=Path, required=True, help="a run's weights, or with --upstream a cache")
    parser.add_argument(
        "--upstream", help="URL of the publisher's server, or another relay's; of several ranks with commas"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float, help="bytes a second from the upstream")
    parser.add_argument("--cache", type=int, help="bytes that the cache may hold")
    parser.add_argument("--certificate", type=Path, help="PEM of certificate and key: serve by TLS")
    parser.add_argument("--authority", type=Path, help="PEM of the authority that signed the upstream's certificate")
    parser.add_argument("--port-file", type=Path, help="write the port there once it listens")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    token = os.environ.get("PAGURUS_WEIGHTS_TOKEN")
    if token is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        raise SystemExit("a relay that others reach wants a token: set PAGURUS_WEIGHTS_TOKEN")
    tls = None
    if options.certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(options.certificate)
    trusted = ssl.create_default_context(cafile=options.authority) if options.authority else None
    upstream = source_of(options.upstream, token=token, tls=trusted, rate=options.rate) if options.upstream else None
    relay = Relay(VersionStore(options.directory), upstream, token=token, limit=options.cache)
    structs.learn()
    asyncio.run(
        serve(
            relay,
            options.host,
            options.port,
            tls=tls,
            ready=lambda port: _report(options.port_file, port),
        )
    )


def _report(path: Path | None, port: int) -> None:
    if path is not None:
        aside = path.with_name(f".{path.name}.new")
        aside.write_text(str(port))
        aside.rename(path)


if __name__ == "__main__":
    main()
