"""Acts of a tenant: somebody with a token of scope exec, against the daemon that other tenants share.

Each act has two tokens of one daemon besides its two sandboxes. What the attacker asks is within the API's bounds for
one call; many of them together are what must not reach anybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from daemon.auth.shares import MAX_DISK, memory_part
from sandbox import Client, PagurusError, Sandbox
from sandbox.messages.tokens import ApiToken, NewToken, TokenRequest
from tests.hostile.api import LIMITS, ApiScene, act

SWELLING = 30  # requests with as many labels as one may have
MAX_SETTINGS = 1 << 20  # bytes of what is told of a sandbox
FORKS = 40
TIMEOUT = 300.0  # seconds after which something is held to have no end
MAX_SENT = 1 << 30  # bytes of a stream
FLOOD = 30  # answers of 8 MB, which are more than the daemon keeps


class Tenant:
    """Somebody with a token. What it asks goes by plain HTTP: the SDK would not send it."""

    def __init__(self, scene: ApiScene, text: str, session: aiohttp.ClientSession, client: Client) -> None:
        self.scene, self.session, self.client = scene, session, client
        self.headers = {"Authorization": f"Bearer {text}"}

    async def request(self, method: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """(status, what was answered)"""
        data = io.BytesIO(msgspec.json.encode(body))
        headers = {**self.headers, "Content-Type": "application/json", **headers}
        async with self.session.request(method, path, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    def sandbox(self, **options: Any) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        return self.client.create(self.scene.attacker.info.image, **{"limits": LIMITS, **options})


@contextlib.asynccontextmanager
async def tenant(scene: ApiScene) -> AsyncIterator[Tenant]:
    """A new token, which ends with the act."""
    socket = scene.run / "pagurus.sock"
    made = await scene.host.call("POST", "/v1/tokens", NewToken, TokenRequest(name="tenant", scope="exec"))
    connector = aiohttp.UnixConnector(str(socket), limit=0)
    try:
        async with (
            aiohttp.ClientSession("http://daemon", connector=connector) as session,
            Client(socket, token=made.text) as client,
        ):
            yield Tenant(scene, made.text, session, client)
    finally:
        await scene.host.call("DELETE", f"/v1/tokens/{made.token.id}", ApiToken)


@act("swell what the daemon knows of a sandbox by labels")
async def _labels(scene: ApiScene) -> str:
    """Each turn writes it down, on behalf of all."""
    async with tenant(scene) as attacker, attacker.sandbox() as sandbox:
        place = f"/v1/sandboxes/{sandbox.id}"
        refused = 0
        for _ in range(SWELLING):
            labels = {secrets.token_hex(8): "x" * 2_000_000}
            refused += (await attacker.request("PATCH", f"{place}/labels", {"labels": labels}))[0] != 200
            status, _ = await attacker.request("POST", f"{place}/checkpoints", {"label": "y" * 2_000_000})
            refused += status != 201
        if not refused:
            return f"{2 * SWELLING} requests of 2 MB were all carried out"
        for path in ("", "/checkpoints"):
            async with attacker.session.get(place + path, headers=attacker.headers) as answer:
                if (size := len(await answer.read())) > MAX_SETTINGS:
                    return f"{size} bytes are told of one sandbox ({path or 'itself'})"
        target = {"image": scene.attacker.info.image, "env": {"A": "x" * 3_000_000}}
        status, made = await attacker.request("POST", "/v1/sandboxes", target)
        if status == 201:
            await (await attacker.client.get(made["id"])).remove()
            return "a sandbox was made with a variable of 3 MB"
    return ""


@act("have the daemon forget a neighbour's answers (idempotency keys)")
async def _forget(scene: ApiScene) -> str:
    async with (
        tenant(scene) as attacker,
        tenant(scene) as neighbour,
        attacker.sandbox() as taker,
        neighbour.sandbox() as victim,
    ):
        counted = {"command": "echo x >> /tmp/count; wc -l < /tmp/count", "ends_turn": False}
        large = {"command": "head -c 6000000 /dev/zero", "output_limit": 8 << 20, "ends_turn": False}
        short = {"command": "true", "ends_turn": False}
        ours, theirs = (f"/v1/sandboxes/{item.id}/exec" for item in (taker, victim))
        first = await neighbour.request("POST", theirs, counted, **{"Idempotency-Key": "once"})
        for number, command in enumerate([large] * FLOOD + [short] * 300):  # now and then it looks what is too much
            status, _ = await attacker.request("POST", ours, command, **{"Idempotency-Key": f"flood-{number}"})
            if status != 200:
                return f"was not tried: {status}"
        again = await neighbour.request("POST", theirs, counted, **{"Idempotency-Key": "once"})
        if first[1].get("stdout") != again[1].get("stdout"):
            return f"a neighbour's command was carried out twice: {again[1].get('stdout')}"
    retained = sum(path.stat().st_size for path in scene.run.glob("answers*"))
    return "" if retained < 160 << 20 else f"{retained >> 20} MiB of answers are kept"


async def refused_while_held(tenant: Tenant, method: str, path: str, size: int, limit: int) -> str:
    """Requests whose bodies, `size` bytes each, never end, until they hold more than `limit` bytes: one is refused."""
    over, sent = asyncio.Event(), 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(size >> 20):
            yield bytes(1 << 20)
        sent += 1
        await over.wait()

    async def request() -> int:
        headers = {**tenant.headers, "Content-Type": "application/octet-stream"}
        try:
            async with tenant.session.request(method, path, data=body(), headers=headers) as answer:
                return answer.status
        except aiohttp.ClientError:  # it answered, and closed the connection before all was sent
            return 429

    requested: set[asyncio.Task[int]] = set()
    try:
        for number in range(1, 2 + limit // size):
            requested.add(asyncio.create_task(request()))
            while sent < number and not any(task.done() for task in requested):  # noqa: ASYNC110 - either of two ends it
                await asyncio.sleep(0.05)
            if ended := [task.result() for task in requested if task.done()]:
                return "" if ended == [429] else f"was not tried: {ended}"
        return f"{sent} requests hold {sent * size >> 20} MiB"
    finally:
        for task in requested:
            task.cancel()
        await asyncio.gather(*requested, return_exceptions=True)
        over.set()


@act("fill the daemon's memory with requests that never end")
async def _bodies(scene: ApiScene) -> str:
    async with tenant(scene) as attacker, tenant(scene) as neighbour, attacker.sandbox() as sandbox:
        path, size = f"/v1/sandboxes/{sandbox.id}/exec", 60 << 20
        said = await refused_while_held(attacker, "POST", path, size, memory_part())
        async with neighbour.sandbox() as other:
            return said or ("" if (await other.exec("echo on")).text == "on\n" else "the neighbour is not served")


@act("fill the daemon's memory with outputs")
async def _outputs(scene: ApiScene) -> str:
    async with tenant(scene) as attacker, attacker.sandbox() as sandbox:
        target = {"command": "sleep 1000", "output_limit": 16 << 20, "timeout": 20, "ends_turn": False}
        path, count = f"/v1/sandboxes/{sandbox.id}/exec", 2 + memory_part() // (30 << 20)
        requested = {asyncio.create_task(attacker.request("POST", path, target)) for _ in range(count)}
        done, _ = await asyncio.wait(requested, return_when=asyncio.FIRST_COMPLETED)
        status, said = next(iter(done)).result()
        for task in requested:
            task.cancel()
        await asyncio.gather(*requested, return_exceptions=True)
    return "" if status == 429 else f"{count} commands may keep 32 MiB each: {status} {said}"


@act("fill the host's disk with files that are being written")
async def _uploads(scene: ApiScene) -> str:
    async with tenant(scene) as attacker, attacker.sandbox() as sandbox:
        path = f"/v1/sandboxes/{sandbox.id}/files?path=/large"
        return await refused_while_held(attacker, "PUT", path, 250 << 20, MAX_DISK)


@act("take all places of forks")
async def _forks(scene: ApiScene) -> str:
    """A neighbour's one fork is made while most of the attacker's still wait."""
    async with (
        tenant(scene) as attacker,
        tenant(scene) as neighbour,
        attacker.sandbox() as taker,
        neighbour.sandbox() as other,
    ):
        path = f"/v1/sandboxes/{taker.id}/fork"
        requested = asyncio.create_task(attacker.request("POST", path, {"count": FORKS}))
        try:
            while len(await attacker.client.sandboxes()) == 1 and not requested.done():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
            made = await neighbour.request("POST", f"/v1/sandboxes/{other.id}/fork", {"count": 1})
            theirs = len(await attacker.client.sandboxes()) - 1
            await requested
        finally:
            for client, retained in ((attacker.client, taker), (neighbour.client, other)):
                for item in await client.sandboxes():
                    if item.id != retained.id:
                        await (await client.get(item.id)).remove()
    if made[0] != 201 or requested.result()[0] != 201:
        return f"was not tried: {made} {requested.result()}"
    return "" if theirs <= FORKS // 2 else f"one fork waited until {theirs} of {FORKS} forks of another were made"


SHARING = """
import fcntl, os, struct
one = os.open('/shared', os.O_RDWR | os.O_CREAT)
size = os.write(one, os.urandom(16 << 20))
os.fsync(one)
while size < 1 << 40:
    part = min(size, 1 << 30)
    fcntl.ioctl(one, 0x4020940d, struct.pack('=qQQQ', one, 0, part, size))
    size += part
"""


@act("have the host read and send a tebibyte that lies on 16 MiB of disk")
async def _shared(scene: ApiScene) -> str:
    if said := await scene.tried(SHARING):
        return said
    taken = await scene.attacker.checkpoint("shared", wait="durable")
    try:
        async with asyncio.timeout(TIMEOUT):
            (report,) = await scene.host.store.verify(taken)
    except TimeoutError:
        return "a verification does not come to an end"
    if report.damage:
        return f"verify: {report.damage[0][-200:]}"
    sent = 0
    try:
        async for part in scene.host.store.stream(taken):
            sent += len(part)
            if sent > MAX_SENT:
                return f"more than {MAX_SENT >> 20} MiB of it are sent"
    except PagurusError:  # the stream breaks off
        return ""
    return "it was sent"
