"""Compositions of small programs in Debian's image, and calls of the API that name a service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from sandbox import Client
from sandbox.messages import (
    Composition,
    CreateRequest,
    ExecRequest,
    ExecResult,
    ForkEntry,
    ForkRequest,
    Limits,
    RestoreRequest,
    RestoreResult,
    SandboxInfo,
    Service,
    ServiceInfo,
    StopRequest,
    UpRequest,
)
from sandbox.messages.services import Probe
from tests.support.daemon_host import IMAGE

#: A server on port 80 that says its name, and whom it sees asking.
SERVER = r"""
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = f"{sys.argv[1]} {self.client_address[0].removeprefix('::ffff:')}".encode()
        self.send_response(200); self.send_header("Content-Length", str(len(said))); self.end_headers()
        self.wfile.write(said)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("", 80), H).serve_forever()
"""
GET = "python3 -c 'import urllib.request as u, sys; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' http://%s"


def shell(line: str) -> list[str]:
    return ["/bin/sh", "-c", line]


WELL = Probe(test=shell(GET % "localhost"), interval=0.2, retries=50)


def server(name: str, **more: object) -> Service:
    return Service(image=IMAGE, command=["python3", "-c", SERVER, name], **more)  # type: ignore[arg-type]


class ComposedSandbox:
    """A sandbox of services."""

    def __init__(self, host: Client, sandbox: str) -> None:
        self.host, self.id = host, sandbox
        self.path = f"/v1/sandboxes/{sandbox}"

    async def up(self, *services: str, **more: object) -> dict[str, ServiceInfo]:
        request = UpRequest(services=list(services), **more)  # type: ignore[arg-type]
        infos = await self.host.call("POST", f"{self.path}/services/up", list[ServiceInfo], request, keyed=True)
        return {info.name: info for info in infos}

    async def services(self) -> dict[str, ServiceInfo]:
        infos = await self.host.call("GET", f"{self.path}/services", list[ServiceInfo])
        return {info.name: info for info in infos}

    async def act(self, service: str, act: str) -> ServiceInfo:
        path = f"{self.path}/services/{service}/{act}"
        return await self.host.call("POST", path, ServiceInfo, StopRequest(), keyed=True)

    async def run(self, command: str, service: str | None = None) -> ExecResult:
        return await self.host.call(
            "POST", f"{self.path}/exec", ExecResult, ExecRequest(command=command, service=service), keyed=True
        )

    async def says(self, command: str, service: str | None = None) -> str:
        result = await self.run(command, service)
        return (result.stdout + result.stderr).decode().strip()

    async def restore(self) -> RestoreResult:
        """Kill it and bring it back, compared."""
        await self.host.call("POST", f"{self.path}/kill", dict)
        request = RestoreRequest(verify=True)
        return await self.host.call("POST", f"{self.path}/restore", RestoreResult, request, keyed=True)

    async def fork(self, count: int) -> list[ComposedSandbox]:
        request = ForkRequest(count=count, verify=True)
        entries = await self.host.call("POST", f"{self.path}/fork", list[ForkEntry], request, keyed=True)
        assert [entry.error for entry in entries] == [None] * count
        return [ComposedSandbox(self.host, entry.sandbox.id) for entry in entries if entry.sandbox is not None]

    async def remove(self) -> None:
        await self.host.call("DELETE", self.path, dict)


@contextlib.asynccontextmanager
async def composed(
    host: Client, composition: Composition, *, docker: bool = False, **limits: object
) -> AsyncIterator[ComposedSandbox]:
    own = Limits(**limits)  # type: ignore[arg-type]
    request = CreateRequest(image="", composition=composition, limits=own, docker=docker)
    info = await host.call("POST", "/v1/sandboxes", SandboxInfo, request, keyed=True)
    sandbox = ComposedSandbox(host, info.id)
    try:
        yield sandbox
    finally:
        await sandbox.remove()
