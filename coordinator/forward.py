"""Calls that are forwarded to a host: requests, streams and sockets, as they came.

Guarantee: the caller's own token never leaves the coordinator, and a host's token never reaches a caller. A caller who
leaves ends its call on the host as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import aiohttp
import msgspec
from aiohttp import web

from daemon.auth.shares import CallShare
from sandbox import websockets
from sandbox.errors import ConnectionBroken, NoDaemon, NotFound, Protocol
from sandbox.page import KEY_HEADER, PROTOCOL
from sandbox.sdk.transport import MAX_FRAME, MSGPACK, Transport, broken, complete, decoded_error

T = TypeVar("T")
OWN = {  # headers that belong to one connection, or to the caller
    "authorization", "connection", "cookie", "expect", "host", "keep-alive", "proxy-authenticate",
    "proxy-authorization", "server", "date", "te", "trailer", "transfer-encoding", "upgrade", KEY_HEADER.lower(),
}  # fmt: skip
MAX_COMPLETE = 32 << 20  # bytes of an answer that is inspected before it is forwarded
MAX_ANSWER = 128 << 20  # bytes of an answer that is held here: a command may return 16 MiB twice, in base64
CLOSE = 0.1  # seconds that it may take to close what is dropped
POLL_INTERVAL = 0.5  # seconds between two looks whether the caller is still there
MEMORY: contextvars.ContextVar[CallShare | None] = contextvars.ContextVar(
    "memory", default=None
)  # of the call under way


@dataclass(frozen=True)
class HostResponse:
    """A whole answer of a host."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def response(self) -> web.Response:
        retained = {name: value for name, value in self.headers.items() if name.lower() != "content-length"}
        return web.Response(status=self.status, headers=retained, body=self.body)

    def decoded(self, kind: type[T]) -> T:
        """Raises Protocol."""
        try:
            if self.headers.get("Content-Type", "").startswith(MSGPACK):
                return msgspec.msgpack.decode(self.body, type=kind)
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise Protocol(
                f"the host's answer cannot be read: {error}", hint="update hosts and coordinator to the same version"
            ) from error


class HostConnection(Transport):
    """The connection to one host."""

    def __init__(self, address: str, *, token: str | None = None, ca: str | None = None) -> None:
        super().__init__(address, token=token, ca=ca, connections=4096, timeout=0.0)
        self._under_way: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def breakable(self, method: str, path: str) -> AsyncIterator[None]:
        """What waits within, for whatever it does, is broken off by `drop`. Raises ConnectionBroken then."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._under_way.add(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise ConnectionBroken(
                    f"{method} {path}: the host is lost",
                    hint="send the call again; `pagurus cluster where` says where the sandbox is",
                ) from None
            raise
        finally:
            self._under_way.discard(scope)

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, *request: Any, **named: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self.breakable(method, path), super().request(method, path, *request, **named) as response:
            yield response

    async def request_as(
        self, method: str, path: str, kind: type[T], body: bytes | None = None, *, token: str | None
    ) -> T:
        """One question of the caller's, whose answer is for us. Raises what the host refused with."""
        answer = await self.complete(method, path, {"Accept": MSGPACK, "Content-Type": MSGPACK}, body, token)
        if answer.status >= 400:
            raise decoded_error(answer.status, answer.body, f"{method} {path}")
        return answer.decoded(kind)

    async def complete(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, token: str | None
    ) -> HostResponse:
        """The whole answer, whatever its status."""
        async with self.answered(method, path, headers, body, token) as result:
            return HostResponse(result.status, passed_on(result.headers), await gathered(result))

    async def raw(self, method: str, path: str, *request: Any, **named: Any) -> bytes:
        async with self.request(method, path, *request, **named) as response:
            return await gathered(response)

    @contextlib.asynccontextmanager
    async def answered(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        data: object,
        token: str | None,
        *,
        of_port: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The beginning of an answer. Raises NoDaemon or ConnectionBroken where there is none, Protocol where a daemon
        sends the call elsewhere. `of_port`: what a server in a sandbox answers, which may send its caller elsewhere."""
        sent = {**headers, **({"Authorization": f"Bearer {token}"} if token else {})}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=5)
        try:
            async with (
                self.breakable(method, path),
                self._open().request(
                    method,
                    self._at(path),
                    data=data,
                    headers=sent,
                    timeout=limit,
                    allow_redirects=not of_port,
                    skip_auto_headers=("User-Agent",),
                ) as result,
            ):
                yield result
        except aiohttp.ClientConnectorError as error:
            raise NoDaemon(
                f"the host does not answer: {error.os_error.strerror or error}",
                hint="`pagurus cluster ls` says since when; see its daemon",
            ) from None
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise broken(method, path, error) from None

    def _at(self, path: str) -> str:
        """Where a path is on the host. Dots in what a caller wrote would lead to what it was not let through for."""
        if {".", ".."} & set(unquote(path.partition("?")[0]).split("/")):
            raise NotFound("no such route", hint="write the path without dots")
        return self._base + path

    async def drop(self) -> None:
        """Break what is under way: a host that is gone sends nothing, and calls would wait for minutes, or for ever.

        Closing a session is not enough: a reader of an answer waits on, as does a sender whose data is not read.
        """
        scopes, self._under_way = self._under_way, set()
        for scope in scopes:
            scope.reschedule(asyncio.get_running_loop().time())
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(TimeoutError):  # it would wait until all that was sent has arrived
                async with asyncio.timeout(CLOSE):
                    await session.close()

    async def joined(
        self, path: str, token: str | None, *, headers: Mapping[str, str] | None = None, protocols: Sequence[str] = ()
    ) -> aiohttp.ClientWebSocketResponse | None:
        """A socket to the host; None: it refused, and says why to a request without the upgrade."""
        sent = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        try:
            return await self._open().ws_connect(
                self._at(path), headers=sent, max_msg_size=MAX_FRAME, compress=0, protocols=protocols
            )
        except aiohttp.WSServerHandshakeError:
            return None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise broken("GET", path, error) from None


async def gathered(result: aiohttp.ClientResponse, limit: int | None = None) -> bytes:
    """All of an answer, which its caller holds as long as the call lasts. Raises Protocol where there is more."""
    data = await complete(result, limit or MAX_ANSWER)
    if (memory := MEMORY.get()) is not None:
        memory.count(len(data))
    return data


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that are forwarded to the other side."""
    return {name: value for name, value in headers.items() if name.lower() not in OWN}


async def relay(request: web.Request, result: aiohttp.ClientResponse) -> web.StreamResponse:
    """An answer to the caller as it comes. Breaks off where the host does: half an answer never looks whole."""
    response = web.StreamResponse(status=result.status, headers=passed_on(result.headers))
    await response.prepare(request)
    try:
        async for part in result.content.iter_any():
            await response.write(part)
    except (aiohttp.ClientError, ConnectionError):
        abort(request)
        return response
    await response.write_eof()
    return response


def abort(request: web.Request) -> None:
    """Break the caller's connection, as a daemon's does that dies: the SDK sends again what may be sent again."""
    if request.transport is not None:
        request.transport.abort()


@contextlib.asynccontextmanager
async def while_there(request: web.Request) -> AsyncIterator[None]:
    """What is done within is cancelled when the caller leaves."""
    task = asyncio.current_task()
    assert task is not None
    watching = asyncio.create_task(_leave(request, task))
    try:
        yield
    finally:
        watching.cancel()


async def _leave(request: web.Request, task: asyncio.Task[Any]) -> None:
    while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(POLL_INTERVAL)
    task.cancel()


async def bridge(
    request: web.Request, there: aiohttp.ClientWebSocketResponse, upstream: HostConnection
) -> web.WebSocketResponse:
    """Messages both ways, until one side ends or the host is lost."""
    chosen = [there.protocol] if there.protocol else [PROTOCOL]
    here = web.WebSocketResponse(max_msg_size=MAX_FRAME, compress=False, protocols=chosen)
    await here.prepare(request)
    try:
        with contextlib.suppress(ConnectionBroken):
            async with upstream.breakable("GET", request.path):
                await websockets.bridge(here, there)
    finally:
        await there.close()
        await here.close(code=there.close_code or aiohttp.WSCloseCode.OK)
    return here
