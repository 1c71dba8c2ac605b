"""A client for programs that ask the daemon of this host once or twice and end.

Guarantee: the same answers and the same errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

from sandbox.errors import Closed, Timeout
from sandbox.sdk.client import Client
from sandbox.sdk.transport import broken, decoded_error

_RETAINED = "/?&=%:@!$'()*+,;~"  # of a path that is quoted already; all else, line ends among it, is quoted here


class BriefClient(Client):
    """As :class:`Client`; what fits into one answer is requested directly."""

    async def raw(
        self,
        method: str,
        path: str,
        data: bytes | AsyncIterator[bytes | memoryview] | None,
        kind: str,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        if self._socket is None or not (data is None or isinstance(data, bytes)):
            return await super().raw(method, path, data, kind, timeout, headers)
        if self._closed:
            raise Closed("the client is closed", hint="use it inside its `with` block")
        body = data or b""
        about = {"Content-Type": kind, "Content-Length": str(len(body))} if data is not None else {}
        reported = {"Host": "daemon", **self._headers, **(headers or {}), **about}
        lines = [
            f"{method} {quote(path, safe=_RETAINED)} HTTP/1.0",
            *(f"{name}: {value}" for name, value in reported.items()),
            "",
            "",
        ]
        try:
            async with asyncio.timeout(timeout):
                status, content = await self._exchange("\r\n".join(lines).encode("ascii") + body)
        except TimeoutError as error:
            raise Timeout(
                f"{method} {path} took longer than {timeout} s", hint="raise `timeout`, or look at the load of the host"
            ) from error
        except (ConnectionResetError, BrokenPipeError, EOFError) as error:
            raise broken(method, path, error) from None
        except OSError as error:
            raise self._unreached(error) from None
        if status >= 400:
            raise decoded_error(status, content, f"{method} {path}")
        return content

    async def _exchange(self, question: bytes) -> tuple[int, bytes]:
        """Status and content of the answer; the daemon closes the connection behind it."""
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=1 << 20)
        try:
            writer.write(question)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            size = fields.get("content-length")
            content = await (reader.read() if size is None else reader.readexactly(int(size)))
            return int(head[0].split()[1]), content
        finally:
            writer.close()
