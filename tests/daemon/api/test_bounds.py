"""Bounds of single requests, each passed by one: time and bytes of a body, labels and settings, connections."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web

from daemon.api import wire
from daemon.host import create
from daemon.network import ruleset
from sandbox.errors import Invalid, PagurusError, Timeout
from sandbox.image.store import StoredImage
from sandbox.messages import CreateRequest, ImageConfig

MAX_BODY = 1000


async def refused(head: str, body: bytes) -> PagurusError | None:
    """Why a request, whose sender then says nothing more, is not taken; None: it is."""
    result: asyncio.Future[PagurusError | None] = asyncio.get_running_loop().create_future()

    async def handle(request: web.Request) -> web.Response:
        request[wire.ROUTE] = SimpleNamespace(max_body=MAX_BODY)  # type: ignore[misc]
        try:
            async for _ in wire.chunks(request):
                pass
            result.set_result(None)
        except PagurusError as error:
            result.set_result(error)
        return web.Response()

    app = web.Application()
    app.router.add_put("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        _, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(f"PUT / HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
        said = await result
        writer.close()
        await writer.wait_closed()
        return said
    finally:
        await runner.cleanup()


async def test_a_sender_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire.TIMEOUT == 30.0
    monkeypatch.setattr(wire, "TIMEOUT", 0.2)
    said = await refused(f"Content-Length: {MAX_BODY}", b"x" * 10)
    assert isinstance(said, Timeout) and "no byte of the body" in str(said)


async def test_a_body_is_as_long_as_its_route_allows() -> None:
    assert await refused(f"Content-Length: {MAX_BODY}", b"x" * MAX_BODY) is None
    assert await refused(f"Content-Length: {MAX_BODY + 1}", b"") is not None, "before a byte of it has come"
    complete = b"%x\r\n%s\r\n0\r\n\r\n" % (MAX_BODY, b"x" * MAX_BODY)
    more = b"%x\r\n%s\r\n0\r\n\r\n" % (MAX_BODY + 1, b"x" * (MAX_BODY + 1))
    assert await refused("Transfer-Encoding: chunked", complete) is None
    assert await refused("Transfer-Encoding: chunked", more) is not None


def test_labels_and_settings_are_bounded(tmp_path: object) -> None:
    create.need_labels({"a": "x" * (create.MAX_LABELS - 1)})
    with pytest.raises(Invalid, match="labels of a sandbox are 65536 bytes"):
        create.need_labels({"a": "x" * create.MAX_LABELS})
    image = StoredImage("0" * 64, tmp_path, ImageConfig())  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="settings of a sandbox are 524288 bytes"):
        create.template(CreateRequest(image="x", env={"A": "x" * create.MAX_SETTINGS}), image, [])


def test_the_packet_filter_counts_connections_of_each_sandbox() -> None:
    """That it holds is the act that fills the host's memory of connections."""
    assert ruleset.MAX_FLOWS == 1024
    assert "ip saddr ct count over 1024 } goto refuse" in ruleset.ruleset("t", "p", 1)
