"""The connection of the SDK to a daemon: one request, one decoded answer or one error.

Guarantee: every failure is an error of :mod:`sandbox.errors`; no class is looked up by a name that the other side
supplied. A call whose connection broke is sent again where that cannot carry it out twice: reads, and calls that carry
a key by which the daemon knows them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from sandbox import paths, structs
from sandbox.errors import (
    Closed,
    ConnectionBroken,
    ErrorBody,
    Invalid,
    NoDaemon,
    PagurusError,
    Protocol,
    Timeout,
    from_body,
)

if TYPE_CHECKING:
    import aiohttp  # elsewhere loaded where a connection is opened: it takes longer than a small question

T = TypeVar("T")
MSGPACK = "application/msgpack"
MAX_FRAME = 64 << 20  # bytes of one value of a stream
MAX_REFUSAL = 1 << 20  # bytes of an answer that says why not
PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)  # seconds between two attempts; the last one from then on


_HANDSHAKES = 3  # attempts at a connection whose refusal is over when its reason is requested
_NO_UPGRADE = "No WebSocket UPGRADE"  # of aiohttp: what was refused would be accepted now
REACHED = 1.0  # seconds; an attempt that took longer had found a daemon


class Transport:
    """A daemon, reached by its socket or by a URL. Opens on first use.

    `ca` (with https): a file with the authority's certificate, or ``"sha256:..."``, the fingerprint of the daemon's
    own, or a context with a certificate of ours; None: the authorities of this system. `timeout`: seconds for which a
    call is sent again when the connection breaks, as it does while a daemon is replaced.
    """

    def __init__(
        self,
        address: str | Path | None = None,
        *,
        token: str | None = None,
        ca: str | Path | ssl.SSLContext | None = None,
        connections: int = 256,
        timeout: float = 20.0,
    ):
        text = str(address) if address is not None else str(paths.api_socket())
        self._url = text.rstrip("/") if text.startswith(("http://", "https://")) else None
        self._socket = None if self._url else text
        if self._socket is not None and re.search(r"^\w+://|^[\w.-]+:\d+$", text):
            raise Invalid(f"{text!r} is no address of a daemon", hint="give a socket's path, http://... or https://...")
        self._base = self._url or "http://daemon"
        if self._url is not None and token is not None and not _private(self._url):
            raise Invalid(f"a token would travel in the clear to {self._url}", hint="use https://")
        self._trust = _trust(ca)
        self._timeout = timeout
        self._met = False  # it answered once: when it does not any more, it is being replaced
        self._headers = {"Accept": MSGPACK, **({"Authorization": f"Bearer {token}"} if token else {})}
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        structs.learn()  # a program may have clients in several threads

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._url or self._socket}>"

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
        self,
        method: str,
        path: str,
        answer: type[T],
        body: object = None,
        *,
        timeout: float | None = None,
        keyed: bool | str = False,
    ) -> T:
        """One request; the decoded answer, or the error that the daemon raised.

        `keyed`: the route knows a call again by its key (this one, or one of ours), so it may be sent again.
        """
        data = None if body is None else msgspec.msgpack.encode(body)
        key = keyed if isinstance(keyed, str) else fresh_key()
        headers = {"Idempotency-Key": key} if keyed else {}
        raw = await self._until_answered(
            bool(keyed) or method == "GET", method, path, data=data, kind=MSGPACK, timeout=timeout, headers=headers
        )
        try:
            return msgspec.msgpack.decode(raw, type=answer)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Protocol(
                f"{method} {path}: the daemon's answer cannot be read: {error}",
                hint="use a client of the version of the daemon",
            ) from error

    async def frames(self, method: str, path: str, kind: type[T], body: object = None) -> AsyncGenerator[T, None]:
        """One request whose answer is a stream of values, each behind its length."""
        data = None if body is None else msgspec.msgpack.encode(body)
        async with self.request(method, path, data, MSGPACK) as response:
            try:
                while size := int.from_bytes(await response.content.readexactly(4), "big"):
                    if size > MAX_FRAME:
                        raise Protocol(
                            f"{method} {path}: a part of {size} bytes", hint="use a client of the version of the daemon"
                        )
                    yield msgspec.msgpack.decode(await response.content.readexactly(size), type=kind)
            except EOFError as error:  # asyncio.IncompleteReadError
                raise Protocol(f"{method} {path}: the stream broke off", hint="is the daemon alive?") from error

    async def _until_answered(self, repeatable: bool, method: str, path: str, **request: Any) -> bytes:
        """The bytes of the answer; sent again within the time-out, where that does no harm."""
        broken, attempt = 0.0, 0  # seconds without a daemon, as far as they follow one another
        while True:
            began = time.monotonic()
            try:
                answer = await self.raw(method, path, **request)
                self._met = True
                return answer
            except (NoDaemon, ConnectionBroken):
                if not (repeatable and self._met) or broken > self._timeout or self._closed:
                    raise
            took = time.monotonic() - began
            if took > REACHED:
                broken, attempt = 0.0, 0
            pause = PAUSES[min(attempt, len(PAUSES) - 1)]
            await asyncio.sleep(pause)
            broken, attempt = broken + took + pause, attempt + 1

    async def raw(
        self,
        method: str,
        path: str,
        data: bytes | AsyncIterator[bytes | memoryview] | None,
        kind: str,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """One request with a body of bytes, or of an iterator of them; the bytes of the answer."""
        async with self.request(method, path, data, kind, timeout, headers) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        data: bytes | AsyncIterator[bytes | memoryview] | None,
        kind: str,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=30)
        headers = {**(headers or {}), **({"Content-Type": kind} if data is not None else {})}
        try:
            async with self._open().request(
                method, self._where() + path, data=data, headers=headers, timeout=limit
            ) as response:
                if response.status >= 400:
                    raise decoded_error(response.status, await complete(response, MAX_REFUSAL), f"{method} {path}")
                yield response
        except TimeoutError as error:
            raise Timeout(
                f"{method} {path} took longer than {timeout} s", hint="raise `timeout`, or look at the load of the host"
            ) from error
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ServerFingerprintMismatch) as error:
            raise PagurusError(
                f"{self._url} is not the daemon that it should be: {error}",
                hint="give its certificate or fingerprint as `ca`",
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise self._unreached(error.os_error) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise broken(method, path, error) from None

    def _where(self) -> str:
        return self._base

    def _unreached(self, error: OSError) -> NoDaemon:
        place = self._url or self._socket
        if error.errno in (errno.EACCES, errno.EPERM):
            return NoDaemon(
                f"{place} belongs to another user's daemon, as a rule root's",
                hint="use sudo, or ask for a token and PAGURUS_HOST",
            )
        why = "nothing is there" if error.errno == errno.ENOENT else error.strerror or str(error)
        return NoDaemon(f"no daemon answers at {place}: {why}", hint="start one with `sudo pagurus daemon`")

    @contextlib.asynccontextmanager
    async def socket(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A connection that carries messages both ways, or the error with which the daemon refused it."""
        import aiohttp

        for _ in range(_HANDSHAKES):
            try:
                made = await self._open().ws_connect(
                    self._base + path, heartbeat=30.0, max_msg_size=MAX_FRAME, compress=0
                )
                break
            except aiohttp.WSServerHandshakeError:
                try:
                    await self.raw("GET", path, None, MSGPACK)  # the same call without the upgrade says why
                except PagurusError as error:
                    if _NO_UPGRADE not in error.message:
                        raise
                    # The reason is gone: a server listens by now.
            except (aiohttp.ClientError, ConnectionError) as error:
                raise broken("GET", path, error) from None
        else:
            raise ConnectionBroken(f"GET {path}: the connection was refused", hint="is the daemon alive?") from None
        try:
            yield made
        finally:
            await made.close()

    def raw_session(self) -> tuple[aiohttp.ClientSession, str]:
        """The session, and the address before the daemon's paths: to pass requests of others on as they are."""
        return self._open(), self._base

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._closed:
            raise Closed("the client is closed", hint="use it inside its `with` block")
        if self._session is None:
            connector = (
                aiohttp.UnixConnector(self._socket, limit=self._connections)
                if self._socket
                else aiohttp.TCPConnector(limit=self._connections, ssl=self._trust)
            )
            reported = aiohttp.TraceConfig()
            reported.on_request_redirect.append(_stay)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                auto_decompress=False,
                trace_configs=[reported],
                cookie_jar=aiohttp.DummyCookieJar(),  # what one caller of `pagurus view` is given, no other shows
            )
        return self._session


async def _stay(_: object, __: object, reported: aiohttp.TraceRequestRedirectParams) -> None:
    """No daemon sends a call elsewhere; one that lies would have us ask what only we can reach."""
    reported.response.close()
    raise Protocol(
        f"{reported.method} {reported.url.path}: the answer sends the call elsewhere", hint="is it a daemon?"
    )


async def complete(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """All of an answer. Raises Protocol where it is longer."""
    result = bytearray()
    async for part in response.content.iter_any():
        result += part
        if len(result) > limit:
            raise Protocol(
                f"{response.method} {response.url.path}: an answer of more than {limit} bytes",
                hint="read it in parts, or as a stream",
            )
    return bytes(result)


def _private(url: str) -> bool:
    """Whether no one else can read what goes to `url`."""
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def _trust(ca: str | Path | ssl.SSLContext | None) -> ssl.SSLContext | aiohttp.Fingerprint | bool:
    if ca is None:
        return True
    if isinstance(ca, ssl.SSLContext):
        return ca
    if (pinned := re.fullmatch(r"sha256:([0-9a-fA-F:]+)", str(ca))) is not None:
        digest = bytes.fromhex(pinned[1].replace(":", ""))
        if len(digest) != 32:
            raise Invalid(f"{ca} is no SHA-256 fingerprint", hint="the daemon prints it when it starts")
        from aiohttp import Fingerprint

        return Fingerprint(digest)
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise Invalid(
            f"cannot read the certificate {ca}: {error}", hint="name a PEM file, or sha256:FINGERPRINT"
        ) from None


def broken(method: str, path: str, error: Exception) -> ConnectionBroken:
    return ConnectionBroken(f"{method} {path}: {error or type(error).__name__}", hint="is the daemon alive?")


class Facet:
    """One area of a sandbox, whose path is `path`, or of a host."""

    area = ""  # what follows the path of the sandbox
    _client: Transport

    def __init__(self, client: Transport, path: str = "") -> None:
        self._client = client
        self._path = f"{path}{self.area}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._path.split('/')[3] if self._path else repr(self._client)}>"


def fresh_key() -> str:
    """A key by which a daemon knows a call again."""
    return os.urandom(16).hex()


def encoded(**query: str) -> str:
    return urlencode(query)


def part(name: str) -> str:
    """A name or label as one part of a path."""
    return quote(name, safe="")


def decoded_error(status: int, raw: bytes, where: str) -> PagurusError:
    try:
        return from_body(msgspec.msgpack.decode(raw, type=ErrorBody))
    except (msgspec.DecodeError, msgspec.ValidationError):
        return PagurusError(f"{where}: status {status}", hint="see the daemon's log")
