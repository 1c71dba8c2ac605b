"""The sockets on which the host listens inside of sandboxes, for one purpose.

Guarantee: a restore that makes a new network namespace has a listener in it before a program runs there; who connects
while no daemon runs waits for the next one, and no program of the sandbox can take the port.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from daemon.gateway import listener
from sandbox.errors import SandboxDead

if TYPE_CHECKING:
    from sandbox.container.container import Container

Serve = Callable[[str, web.BaseRequest], Awaitable[web.StreamResponse]]


class InsideListeners:
    """Those of all sandboxes. `name`: by which shims keep them. `serve` gets the sandbox with each request."""

    def __init__(self, name: str, serve: Serve, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._name = name
        self._serve = serve
        self._spawn = spawn
        self._closed = False
        # sandbox -> number of its namespace, listener
        self._listeners: dict[str, tuple[int, listener.GatewayListener]] = {}

    async def attach(self, sandbox: str, port: int, container: Container) -> None:
        """Listen in a sandbox. Idempotent. Raises Conflict where something of its own has the port."""
        inode = (await asyncio.to_thread(container.netns.stat)).st_ino
        if (existing := self._listeners.get(sandbox)) is None or existing[0] != inode:
            retained = await container.outside.retained(self._name)
            sock = await asyncio.to_thread(listener.socket_inside, container.netns, port, retained)
            self._moved(sandbox, inode, sock, container)
        loop = asyncio.get_running_loop()
        container.followers[self._name] = functools.partial(self._follow, loop, sandbox, port, container)

    def _follow(
        self, loop: asyncio.AbstractEventLoop, sandbox: str, port: int, container: Container, netns: Path
    ) -> None:
        sock = listener.socket_inside(netns, port)
        loop.call_soon_threadsafe(self._moved, sandbox, netns.stat().st_ino, sock, container)

    def _moved(self, sandbox: str, inode: int, sock: socket.socket, container: Container) -> None:
        """From now on `sandbox` is served on this socket, in the namespace with this number."""
        if (existing := self._listeners.pop(sandbox, None)) is not None:
            self._spawn(existing[1].close(), f"end of the listener of {sandbox}")
        if self._closed:
            sock.close()
            return

        async def serve(request: web.BaseRequest) -> web.StreamResponse:
            return await self._serve(sandbox, request)

        self._listeners[sandbox] = (inode, listener.GatewayListener(sock, serve))
        self._spawn(self._keep(container, os.dup(sock.fileno())), f"socket of {sandbox}")

    async def _keep(self, container: Container, fd: int) -> None:
        try:
            await container.outside.keep(self._name, [fd])
        except SandboxDead:  # and its shim: there is nothing to keep it for
            return
        finally:
            os.close(fd)

    async def detach(self, sandbox: str) -> None:
        """Listen there no more. Idempotent."""
        if (existing := self._listeners.pop(sandbox, None)) is not None:
            await existing[1].close()

    async def close(self) -> None:
        """Cut all off; the shims keep the sockets. Idempotent."""
        self._closed = True
        listeners = [listening for _, listening in self._listeners.values()]
        self._listeners.clear()
        await asyncio.gather(*(item.close() for item in listeners))
