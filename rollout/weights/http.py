"""`Connections`: what a reader of weights asks of one HTTP server, received straight into memory.

Guarantee: a body is copied once, from the socket to where it stays, and hashed while it is in the processor's cache;
receiving and hashing hold no lock of the interpreter. Who is cancelled leaves no thread that still reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from blake3 import blake3

from sandbox.errors import EngineFailed, Invalid, NotFound, PagurusError, Unauthorized

T = TypeVar("T")
TIMEOUT = 20.0  # seconds without a byte
MAX_CONNECTIONS = 8  # connections
BLOCK = 1 << 20  # bytes that are received, then hashed
REFUSALS: dict[int, type[PagurusError]] = {400: Invalid, 401: Unauthorized, 403: Unauthorized, 404: NotFound}
BROKEN = (OSError, http.client.HTTPException)  # what a connection may end with
CHECK_LINK = "check the address and the link to the publisher or relay; a pull continues where it ended"


class BandwidthLimit:
    """At most so many bytes a second, over all connections that share it. A burst of a quarter of a second passes."""

    def __init__(self, bytes_s: float | None):
        self.bytes_s = bytes_s
        self._free = 0.0
        self._lock = threading.Lock()

    def spend(self, count: int) -> None:
        """Blocks the calling thread for as long as these bytes are ahead of the rate."""
        if self.bytes_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - 0.25) + count / self.bytes_s
            wait = self._free - now
        if wait > 0:
            time.sleep(wait)


@dataclass
class ResumableBody:
    """What has come of an answer so far; more can be added by the next connection. `limit`: bytes it may have."""

    limit: int
    content: bytearray = field(default_factory=bytearray)
    got: int = 0
    received: int = 0  # what was thrown away as well
    hasher: blake3 = field(default_factory=blake3)

    def clear(self) -> None:
        self.content, self.got, self.hasher = bytearray(), 0, blake3()

    @property
    def complete(self) -> bool:
        return bool(self.content) and self.got == len(self.content)

    def take(self, response: http.client.HTTPResponse, rate: BandwidthLimit) -> None:
        """Append what a response brings. Raises EngineFailed for one that does not fit."""
        length = int(response.headers.get("Content-Length", -1))
        if length < 0 or (0 if response.status != 206 else self.got) + length > self.limit:
            self.clear()
            raise EngineFailed(
                f"an answer of {length} bytes came where at most {self.limit} were expected", hint=CHECK_LINK
            )
        if response.status != 206 or self.got + length != len(self.content):
            self.clear()
            if response.status == 206:
                raise EngineFailed("an answer does not continue at the requested offset", hint=CHECK_LINK)
            self.content = bytearray(length)
        view = memoryview(self.content)
        while self.got < len(self.content):
            count = response.readinto(view[self.got : self.got + BLOCK])
            if not count:
                raise EngineFailed("the connection ended in the middle of an answer", hint=CHECK_LINK)
            self.hasher.update(view[self.got : self.got + count])
            self.got += count
            self.received += count
            rate.spend(count)


class Connections:
    """``await connections.get("/chunks/...", body)``; ``await connections.put(path, content)``."""

    def __init__(self, url: str, *, token: str | None, tls: ssl.SSLContext | None, rate: float | None):
        """Raises Invalid for what is no URL."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Invalid(f"{url!r} is no address of a relay", hint="name one such as http://relay:8100")
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.rate = BandwidthLimit(rate)
        self._idle: list[http.client.HTTPConnection] = []
        self._threads: ThreadPoolExecutor | None = None

    async def get(self, path: str, body: ResumableBody, *, fresh: bool = False) -> None:
        """Bring what is missing in `body`. `fresh`: the other side looks at its copy first."""
        headers = dict(self._headers)
        if body.got:
            headers["Range"] = f"bytes={body.got}-"
        if fresh:
            headers["Cache-Control"] = "no-cache"
        await self._exchange(lambda line: self._request(line, "GET", path, headers, None, body))

    async def put(self, path: str, content: bytes) -> None:
        await self._exchange(
            lambda line: self._request(line, "PUT", path, self._headers, content, ResumableBody(1 << 16))
        )

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, act: Callable[[http.client.HTTPConnection], None]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, "weights by http")
        line = self._line()
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, act, line)
        except asyncio.CancelledError:
            _cut(line)  # the thread that reads from it ends at once
            raise
        except BROKEN as error:
            line.close()
            raise EngineFailed(f"the connection broke: {type(error).__name__}: {error}", hint=CHECK_LINK) from error
        except BaseException:
            line.close()
            raise
        self._idle.append(line)

    def _request(
        self,
        line: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        content: bytes | None,
        body: ResumableBody,
    ) -> None:
        """In a thread."""
        line.request(method, self._prefix + path, body=content, headers=dict(headers))
        response = line.getresponse()
        if response.status == 416:  # what is there is shorter than what came from there before
            body.clear()
        if response.status >= 400:
            text = response.read(500).decode("utf-8", "replace")
            kind = REFUSALS.get(response.status, EngineFailed)
            raise kind(f"{self.url}{path} answered {response.status}: {text}")
        body.take(response, self.rate)
        response.read()  # its end, so that the connection can be used again

    def _line(self) -> http.client.HTTPConnection:
        while self._idle:
            line = self._idle.pop()
            if line.sock is not None and not select.select([line.sock], [], [], 0)[0]:
                return line
            line.close()  # the server has ended it
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)


def _cut(line: http.client.HTTPConnection) -> None:
    if line.sock is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(line.sock, socket.SHUT_RDWR)
