"""The sockets inside of sandboxes at which hosts with a credential are reached.

Guarantee (I6): each socket is in the network namespace of one sandbox, on its loopback, so a client accepted there is
of that sandbox. A shim keeps them over the death of the daemon: who connects then waits for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from daemon.catalogue import SandboxRow, put_sandbox
from daemon.credentials.authority import Authority
from daemon.credentials.passing import Passage
from daemon.credentials.store import CredentialStore, unknown
from daemon.gateway.listener import GatewayListener, socket_inside
from daemon.network.networks import Networks
from daemon.network.resolver import UpstreamResolver
from sandbox.container.trust import ENVIRONMENT, TOUCHED, trust
from sandbox.errors import PagurusError, SandboxDead
from sandbox.messages import Network

if TYPE_CHECKING:
    from daemon.turns.turns import LiveSandbox
    from sandbox.container.container import Container

log = logging.getLogger("pagurus.credentials")

ADDRESS = IPv4Address("127.0.0.54")  # inside of a sandbox


class Listening:
    """The sockets of one sandbox."""

    def __init__(self, passage: Passage) -> None:
        self.passage = passage
        self.inode = 0  # of the network namespace in which they are
        self.listeners: dict[int, GatewayListener] = {}  # by port

    def serve(self, port: int, sock: socket.socket) -> None:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self.passage.serve(request, port)

        self.listeners[port] = GatewayListener(sock, handle, tls=self.passage.context)

    def taken(self) -> list[GatewayListener]:
        listeners, self.listeners = list(self.listeners.values()), {}
        return listeners


class Credentials:
    """Those of a host, and what leads to them. An attachment of each sandbox whose policy names some."""

    def __init__(self, state: Path, networks: Networks) -> None:
        self.store = CredentialStore(state / "credentials.json")
        self.authority = Authority(state / "authority")
        self._sandboxes: dict[str, Listening] = {}
        self._upstream: UpstreamResolver | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        networks.redirect = self.redirect

    def _resolver(self) -> UpstreamResolver:
        if self._upstream is None:
            self._upstream = UpstreamResolver()
        return self._upstream

    def redirect(self, sandbox: str, name: str) -> IPv4Address | None:
        """Where a name leads inside of a sandbox instead of where it points to."""
        listening = self._sandboxes.get(sandbox)
        return ADDRESS if listening is not None and listening.passage.find(name) is not None else None

    def need(self, network: Network, owner: str) -> None:
        """Raises NotFound for a policy that names what is not there."""
        for name in network.credentials:
            if self.store.get(owner, name) is None:
                raise unknown(name)

    async def changed(self, live: LiveSandbox) -> None:
        """The policy of a living sandbox was changed: what runs in it trusts the host from now on."""
        row, container = live.row, live.container_or_none
        if container is None:
            return
        await self.attach(row, container)
        if row.id not in self._sandboxes:
            return
        async with live.altering("network", *TOUCHED):
            await asyncio.to_thread(trust, container, container.authority)
        await live.services.catalogue.write([put_sandbox(row)])

    # ----------------------------------------------------------------- an attachment

    async def open(self, rows: Sequence[SandboxRow]) -> None:
        """Nothing is left of a former daemon but what shims keep."""

    async def close(self) -> None:
        """Cut all off; shims keep the sockets."""
        self._closed = True
        for sandbox in list(self._sandboxes):
            await self._end(sandbox)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def attach(self, row: SandboxRow, container: Container) -> None:
        """See :class:`daemon.host.attachments.Attachment`."""
        if not row.network.credentials or row.network.mode == "none":
            if row.id in self._sandboxes:
                await self._take_away(row.id, container)
            return
        row.env = {**ENVIRONMENT, **row.env}
        container.authority = await asyncio.to_thread(lambda: self.authority.pem)
        listening = self._sandboxes.get(row.id)
        if listening is None:
            passage = Passage(row, self.store, self.authority, self._resolver)
            listening = self._sandboxes[row.id] = Listening(passage)
        inode = (await asyncio.to_thread(container.netns.stat)).st_ino
        missing = listening.passage.ports() - (set(listening.listeners) if listening.inode == inode else set())
        made: dict[int, socket.socket] = {}
        for port in sorted(missing):
            retained = await container.outside.retained(_shelf(port))
            made[port] = await asyncio.to_thread(socket_inside, container.netns, port, retained, address=str(ADDRESS))
        self._moved(row.id, inode, made, container)
        loop = asyncio.get_running_loop()
        container.followers["credentials"] = functools.partial(self._follow, loop, row.id, container)

    async def detach(self, row: SandboxRow, container: Container) -> None:
        """See :class:`daemon.host.attachments.Attachment`."""
        await self._end(row.id)

    def _follow(self, loop: asyncio.AbstractEventLoop, sandbox: str, container: Container, netns: Path) -> None:
        """From a thread: the sandbox's processes will run in this namespace."""
        if (listening := self._sandboxes.get(sandbox)) is not None:
            ports = listening.passage.ports()
            made = {port: socket_inside(netns, port, address=str(ADDRESS)) for port in ports}
            loop.call_soon_threadsafe(self._moved, sandbox, netns.stat().st_ino, made, container)

    def _moved(self, sandbox: str, inode: int, made: dict[int, socket.socket], container: Container) -> None:
        """From now on `sandbox` is served on these sockets, in the namespace with this inode."""
        listening = self._sandboxes.get(sandbox)
        if self._closed or listening is None:
            for sock in made.values():
                sock.close()
            return
        if listening.inode != inode:
            for former in listening.taken():
                self._spawn(former.close())
        listening.inode = inode
        for port, sock in made.items():
            self._spawn(self._keep(container, port, os.dup(sock.fileno())))
            listening.serve(port, sock)

    async def _keep(self, container: Container, port: int, fd: int) -> None:
        try:
            with contextlib.suppress(SandboxDead):  # and its shim: there is nothing to keep it for
                await container.outside.keep(_shelf(port), [fd])
        finally:
            os.close(fd)

    async def _take_away(self, sandbox: str, container: Container) -> None:
        """Its policy names no credential any more."""
        ports = list(self._sandboxes[sandbox].listeners)
        container.followers.pop("credentials", None)
        container.authority = b""
        await self._end(sandbox)
        for port in ports:
            with contextlib.suppress(PagurusError):
                await container.outside.keep(_shelf(port), ())

    async def _end(self, sandbox: str) -> None:
        if (listening := self._sandboxes.pop(sandbox, None)) is not None:
            await asyncio.gather(*(item.close() for item in listening.taken()))
            await listening.passage.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="a socket of a credential")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _shelf(port: int) -> str:
    """The name by which a shim keeps a socket."""
    return f"cred-{port}"
