"""The connection of the SDK to a daemon: one request, one decoded answer or one error.

Owns: the HTTP session, the wire formats, the translation of failures. Does not own: what the routes
mean. Guarantee: every failure is an error of :mod:`sandbox.errors`; no class is looked up by a name
that the other side supplied.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from sandbox import paths
from sandbox.errors import Closed, ErrorBody, PagurusError, Protocol, Timeout, from_body

T = TypeVar("T")
MSGPACK = "application/msgpack"
FRAME_MOST = 64 << 20  # bytes of one value of a stream


class Transport:
    """A daemon, reached by its socket or by a URL. Opens on first use."""

    def __init__(self, address: str | Path | None = None, *, token: str | None = None, connections: int = 256):
        text = str(address) if address is not None else str(paths.api_socket())
        self._url = text.rstrip("/") if text.startswith(("http://", "https://")) else None
        self._socket = None if self._url else text
        self._base = self._url or "http://daemon"
        self._headers = {"Accept": MSGPACK, **({"Authorization": f"Bearer {token}"} if token else {})}
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Sandboxes live on. Idempotent."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ----------------------------------------------------------------- requests

    async def call(
        self, method: str, path: str, answer: type[T], body: Any = None, *, timeout: float | None = None
    ) -> T:
        """One request; the decoded answer, or the error that the daemon raised."""
        data = None if body is None else msgspec.msgpack.encode(body)
        raw = await self.raw(method, path, data, MSGPACK, timeout)
        try:
            return msgspec.msgpack.decode(raw, type=answer)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Protocol(f"{method} {path}: the daemon's answer cannot be read: {error}") from error

    async def frames(self, method: str, path: str, kind: type[T], body: Any = None) -> AsyncIterator[T]:
        """One request whose answer is a stream of values, each behind its length."""
        data = None if body is None else msgspec.msgpack.encode(body)
        async with self.request(method, path, data, MSGPACK) as response:
            try:
                while size := int.from_bytes(await response.content.readexactly(4), "big"):
                    if size > FRAME_MOST:
                        raise Protocol(f"{method} {path}: a part of {size} bytes")
                    yield msgspec.msgpack.decode(await response.content.readexactly(size), type=kind)
            except EOFError as error:  # asyncio.IncompleteReadError
                raise Protocol(f"{method} {path}: the stream broke off", remedy="is the daemon alive?") from error

    async def raw(self, method: str, path: str, data: Any, kind: str, timeout: float | None = None) -> bytes:
        """One request with a body of bytes, or of an iterator of them; the bytes of the answer."""
        async with self.request(method, path, data, kind, timeout) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, data: Any, kind: str, timeout: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=30)
        headers = {"Content-Type": kind} if data is not None else {}
        try:
            async with self._open().request(
                method, self._base + path, data=data, headers=headers, timeout=limit
            ) as response:
                if response.status >= 400:
                    raise decoded_error(response.status, await response.read(), f"{method} {path}")
                yield response
        except TimeoutError as error:
            raise Timeout(f"{method} {path} took longer than {timeout} s") from error
        except aiohttp.ClientConnectorError as error:
            raise PagurusError(
                f"no daemon at {self._url or self._socket}: {error.os_error.strerror or error}",
                remedy="start one with `pagurus daemon`",
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Protocol(
                f"{method} {path}: {error or type(error).__name__}", remedy="is the daemon alive?"
            ) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Closed("the client is closed")
        if self._session is None:
            connector = (
                aiohttp.UnixConnector(self._socket, limit=self._connections)
                if self._socket
                else aiohttp.TCPConnector(limit=self._connections)
            )
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, auto_decompress=False)
        return self._session


def encoded(**query: str) -> str:
    return urlencode(query)


def decoded_error(status: int, raw: bytes, where: str) -> PagurusError:
    try:
        return from_body(msgspec.msgpack.decode(raw, type=ErrorBody))
    except (msgspec.DecodeError, msgspec.ValidationError):
        return PagurusError(f"{where}: status {status}", remedy="see the daemon's log")
