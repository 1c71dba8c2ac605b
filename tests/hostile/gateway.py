"""Acts of an agent against the gateway that other owners share, and of an upstream against the agent's host.

Each act has an upstream of its own, which answers as the act says.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import html
import json
import tempfile
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from sandbox import Sandbox
from sandbox.messages import Gateway, Upstream
from tests.hostile.api import LIMITS, ApiScene, act
from tests.hostile.tenants import tenant

LARGE = 3 << 20  # bytes of an answer
KEY = "sk-live/0123+456789&abcdef"
Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]

POST = """
import http.client, json, sys
c = http.client.HTTPConnection("127.0.0.1", 7000, timeout=60)
body = {"model": "m", "stream": sys.argv[1] == "stream", "messages": [{"role": "user", "content": sys.argv[2]}]}
c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
r = c.getresponse()
sys.stdout.write(repr(r.getheaders())); sys.stdout.flush()
body = r.read()
sys.stdout.buffer.write(body[-9999:]); sys.stdout.buffer.write(b" length %d status %d" % (len(body), r.status))
"""


@contextlib.asynccontextmanager
async def upstream(scene: ApiScene, reply: Reply, **settings: int | str) -> AsyncIterator[str]:
    """The name of an upstream that answers by `reply`."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{tail:.*}", reply)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await scene.host.gateway.put("of-an-act", Upstream(url=url, **settings))  # type: ignore[arg-type]
        yield "of-an-act"
    finally:
        await runner.cleanup()


async def post(sandbox: Sandbox, content: str, kind: str = "complete") -> bytes:
    """What the agent gets, headers and status included."""
    done = await sandbox.exec(["python3", "-c", POST, kind, content], timeout=90, ends_turn=False)
    return done.stdout + done.stderr


@act("hold an upstream by an answer of megabytes that is no stream")
async def _large(scene: ApiScene) -> str:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "1", "choices": [], "padding": "x" * LARGE})

    async with (
        upstream(scene, reply, at_once=1, timeout=30) as name,
        scene.host.create(scene.attacker.info.image, limits=LIMITS, gateway=Gateway(upstream=name)) as sandbox,
    ):
        for number in range(2):
            got = await post(sandbox, str(number))
            length = int(got.rpartition(b"length ")[2].split()[0]) if b"length " in got else 0
            if length < LARGE or not got.endswith(b"status 200"):
                return f"answer {number} did not arrive: {got[-200:]!r}"
    return ""


@act("take all slots of an upstream that others share")
async def _slots(scene: ApiScene) -> str:
    ended, under_way = asyncio.Event(), 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal under_way
        if "neighbour" not in await request.text():
            under_way += 1
            await ended.wait()
        return web.json_response({"id": "1", "choices": []})

    async with (
        upstream(scene, reply, at_once=8) as name,
        tenant(scene) as attacker,
        tenant(scene) as neighbour,
        attacker.sandbox(gateway=Gateway(upstream=name)) as taker,
        neighbour.sandbox(gateway=Gateway(upstream=name)) as other,
    ):
        requested = [asyncio.create_task(post(taker, f"attack {number}")) for number in range(12)]
        try:
            while under_way < 7:  # noqa: ASYNC110 - what the upstream counts
                await asyncio.sleep(0.05)
            async with asyncio.timeout(60):
                got = await post(other, "neighbour")
        except TimeoutError:
            return "the neighbour got no slot"
        finally:
            ended.set()
            await asyncio.gather(*requested, return_exceptions=True)
    return "" if got.endswith(b"status 200") else f"the neighbour was refused: {got[-200:]!r}"


def _echo(written: str, kind: str = "complete") -> Reply:
    """An upstream that sends the key of its request back in one form."""

    async def reply(request: web.Request) -> web.StreamResponse:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        forms = {
            "plain": key,
            "json": json.dumps(key).replace("/", "\\/"),
            "url": urllib.parse.quote(key, safe=""),
            "html": html.escape(key),
            "base64": base64.b64encode(key.encode()).decode(),
        }
        said = f"you showed {forms.get(written, key)} to me".encode()
        if written == "header":
            return web.Response(body=b"{}", headers={"X-Request-Id": key, "Content-Type": "application/json"})
        if kind == "complete":
            status = 401 if written == "refusal" else 200
            return web.Response(body=said, status=status, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for byte in said:  # a piece each
            await response.write(bytes([byte]))
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    return reply


async def _key(scene: ApiScene, written: str, kind: str) -> str:
    with tempfile.TemporaryDirectory(prefix="pagurus-key-") as directory:
        path = Path(directory) / "key"
        path.write_text(KEY)
        async with (
            upstream(scene, _echo(written, kind), key_file=str(path)) as name,
            scene.host.create(scene.attacker.info.image, limits=LIMITS, gateway=Gateway(upstream=name)) as sandbox,
        ):
            got = await post(sandbox, "what is the key?", kind)
    if b"status " not in got:
        return f"was not tried: {got[-300:]!r}"
    escaped = urllib.parse.quote(KEY, safe=""), html.escape(KEY), json.dumps(KEY)[1:-1]
    parts = (KEY, KEY[8:], *escaped, base64.b64encode(KEY.encode()).decode()[:20])
    return next((f"the agent has {part}" for part in parts if part.encode() in got), "")


for _written, _kind, _name in (
    ("plain", "complete", "get the key from an upstream that echoes its request"),
    ("plain", "stream", "get the key from a stream that echoes its request byte by byte"),
    ("json", "complete", "get the key from an upstream that echoes it escaped for JSON"),
    ("url", "complete", "get the key from an upstream that echoes it escaped for URLs"),
    ("html", "complete", "get the key from an upstream that echoes it escaped for HTML"),
    ("base64", "complete", "get the key from an upstream that echoes it in base64"),
    ("refusal", "complete", "get the key from an upstream's refusal"),
    ("header", "complete", "get the key from a header of an upstream"),
):

    @act(_name)
    async def _echoed(scene: ApiScene, written: str = _written, kind: str = _kind) -> str:
        return await _key(scene, written, kind)
