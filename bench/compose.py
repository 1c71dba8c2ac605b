"""What a composition of three services costs: to bring up, to checkpoint, to fork.

An HTTP server in front, a worker that asks a key-value server over one connection without end, and that server, which
holds `--megabytes` of memory: each a Python program in an image of its own. Their images, and that of the composition,
are on the host already.

`up_ms`: create and up, until all three answer. `checkpoint_ms`, `frozen_ms`: a checkpoint of all three in the midst of
their traffic; `alone_checkpoint_ms`, `alone_frozen_ms`: of a sandbox with the largest service alone, which writes as
much, in turns with it; `checkpoint_ratio`: how the medians compare. `fork4_ms`: four forks at once, running. `refused`:
checkpoints that failed.

`--seconds N`: instead, pgbench with eight clients through pgbouncer to postgres for so long, with a checkpoint every
second and, with `--kill-every S`, a kill and a restore that is compared every S seconds. Their image is built first,
of packages from Debian's mirror.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.harness import aftermath, command, own_daemon, transactions
from sandbox import Client, Sandbox
from sandbox.errors import Conflict, PagurusError
from sandbox.messages import Composition, CreateRequest, ForkEntry, ForkRequest, Limits, SandboxInfo, Service, UpRequest
from sandbox.messages.services import PublishedPort, ServiceInfo

STORE = r"""
import itertools, socket, sys, threading, time
held = bytearray(int(sys.argv[1]) << 20)
for at in range(0, len(held), 4096): held[at] = 1
values = {}
server = socket.create_server(("", 7000), backlog=50)
def serve(c):
    for line in c.makefile("rb"):
        key = line.split()[0]; values[key] = values.get(key, 0) + 1
        held[values[key] * 4096 % len(held)] = 2
        c.sendall(b"%d\n" % values[key])
def write():
    for n in itertools.count(): held[n * 4096 % len(held)] = 3; time.sleep(0.002)
if sys.argv[2:]: threading.Thread(target=write, daemon=True).start()
while True: threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
WORKER = r"""
import socket, time
while True:
    try: c = socket.create_connection(("store", 7000)); break
    except OSError: time.sleep(0.005)
lines, n = c.makefile("rb"), 0
while True:
    c.sendall(b"work\n"); got = int(lines.readline()); assert got == n + 1, (got, n)
    n = got; time.sleep(0.002)
"""
WEB = r"""
import http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("", 80), H).serve_forever()
"""
MEMORY = Limits(memory="2GiB", processes=200)


def _program(source: str, *words: str, ports: Sequence[PublishedPort] = ()) -> Service:
    return Service(image=own_daemon.IMAGE, command=["python3", "-c", source, *words], ports=list(ports))


def composition(megabytes: int) -> Composition:
    store = _program(STORE, str(megabytes), ports=[PublishedPort(target=7000, published=7000)])
    services = {"web": _program(WEB), "worker": _program(WORKER), "store": store}
    return Composition(services=services, main="web")


async def _bring_up(host: Client, services: Composition) -> tuple[Sandbox, float]:
    began = time.monotonic()
    request = CreateRequest(image="", composition=services, limits=MEMORY)
    info = await host.call("POST", "/v1/sandboxes", SandboxInfo, request, keyed=True)
    path = f"/v1/sandboxes/{info.id}/services/up"
    await host.call("POST", path, list[ServiceInfo], UpRequest(), keyed=True)
    sandbox = await host.get(info.id)
    await asyncio.gather(*(_answers(sandbox, port) for port in (80, 7000)))
    return sandbox, 1000 * (time.monotonic() - began)


async def _answers(sandbox: Sandbox, port: int) -> None:
    while True:
        try:
            (await sandbox.ports.connect(port))[1].close()
            return
        except Conflict:
            await asyncio.sleep(0.002)


async def _checkpoint(sandbox: Sandbox) -> tuple[float, float]:
    """Milliseconds until a checkpoint is captured, and for which the sandbox stood still."""
    began = time.monotonic()
    taken = await sandbox.checkpoint()
    return 1000 * (time.monotonic() - began), taken.frozen_ms or 0.0


async def measure(host: Client, options: argparse.Namespace) -> dict[str, Any]:
    whole = composition(options.megabytes)
    alone = Composition(services={"store": _program(STORE, str(options.megabytes), "writes")}, main="store")
    first, _ = await _bring_up(host, whole)  # makes the image
    await first.remove()
    ups: list[float] = []
    forks: list[float] = []
    taken: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    refused = 0
    for _ in range(options.rounds):
        sandbox, milliseconds = await _bring_up(host, whole)
        ups.append(milliseconds)
        request = CreateRequest(image="", composition=alone, limits=MEMORY)
        info = await host.call("POST", "/v1/sandboxes", SandboxInfo, request, keyed=True)
        await host.call("POST", f"/v1/sandboxes/{info.id}/services/up", list[ServiceInfo], UpRequest(), keyed=True)
        other = await host.get(info.id)
        await asyncio.sleep(0.5)
        for _ in range(options.checkpoints):
            for one, times in ((sandbox, taken), (other, others)):
                try:
                    times.append(await _checkpoint(one))
                except PagurusError:
                    refused += 1
                await asyncio.sleep(0.05)
        began = time.monotonic()
        path = f"/v1/sandboxes/{sandbox.id}/fork"
        entries = await host.call("POST", path, list[ForkEntry], ForkRequest(count=4), keyed=True)
        forks.append(1000 * (time.monotonic() - began))
        for entry in entries:
            assert entry.sandbox is not None, entry.error
            await (await host.get(entry.sandbox.id)).remove()
        await sandbox.remove()
        await other.remove()
    medians = [
        [round(statistics.median(column), 1) for column in zip(*times, strict=True)] for times in (taken, others)
    ]
    return {
        "rounds": options.rounds,
        "megabytes": options.megabytes,
        "up_ms": round(statistics.median(ups)),
        "checkpoint_ms": medians[0][0],
        "frozen_ms": medians[0][1],
        "alone_checkpoint_ms": medians[1][0],
        "alone_frozen_ms": medians[1][1],
        "checkpoint_ratio": round(medians[0][0] / medians[1][0], 2),
        "fork4_ms": round(statistics.median(forks)),
        "refused": refused,
    }


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoints", type=int, default=5, help="of each sandbox in a round")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--kill-every", type=float, default=0.0)
    options = parser.parse_args(argv)
    daemon = own_daemon.BenchHost(aftermath.directory("pagurus-compose-"), own_daemon.image("debian"))
    try:
        daemon.start()

        async def run() -> dict[str, Any]:
            async with daemon.client() as host:
                if options.seconds:
                    await transactions.build_image(host)
                    return await transactions.measure(host, options.seconds, options.kill_every)
                return await measure(host, options)

        command.show(asyncio.run(run()), options)
    finally:
        daemon.clean()
    return 0
