"""What the host of rank 0 sends the other hosts of a trainer, and they it: by HTTP, no directory is shared.

Guarantee: every host gets the plan, the batches and the save to continue from by name and digest, and refuses content
that does not match; only the save that ranks write now can be written to, under the names that ranks use.

::

    PUT  /signs/HOST           Signs: of its ranks; answered by a HostAnswer: at once where it has news, else in a while
    GET  /log|model|save/NAME  content
    GET  /save/NAME/AT/BYTES   a part of it, with its hash
    PUT  /save/NAME            a rank's shard of the save under way
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web
from blake3 import blake3

from sandbox.errors import Invalid, NotFound, PagurusError, Unauthorized
from trainer.distributed.head import BLOCK, DIGEST, LogEntry, digest_of
from trainer.distributed.save_parts import PART
from trainer.distributed.watch import Beat
from trainer.distributed.worker import Said, WorkPlan

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SHARD = re.compile(r"(__(\d+)_\d+\.distcp|random-(\d+)\.msgpack)")  # what a rank writes of a save
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|__\d+_\d+\.distcp|\.metadata")
HOST = re.compile(r"[A-Za-z0-9.-]{1,64}")
STATUS: dict[type[PagurusError], int] = {Invalid: 400, Unauthorized: 401, NotFound: 404}
MAX_SIGNS = 1 << 22  # bytes of one; shards of saves are streamed
HOLD = 0.5  # seconds for which signs wait for news
LISTING_INTERVAL = 0.05  # seconds between two looks at the log
HOST_SILENT = 5.0  # seconds without a word after which a host is lost


class Order(msgspec.Struct, kw_only=True, frozen=True):
    """head -> host: take part as node `node` of `nodes`; below 0: wait."""

    start: int  # number of the start; each one ends the ranks of the one before
    plan: WorkPlan
    node: int = -1
    nodes: int = 1
    ranks: int = 1  # on each
    address: str = ""  # rendezvous
    port: int = 0
    model: list[LogEntry] = []
    save: str = ""  # name of the save to continue from
    save_files: list[LogEntry] = []


class Signs(msgspec.Struct, kw_only=True, frozen=True):
    """host -> head."""

    start: int
    ordered: int = -1  # start of the newest order that it has
    log: str = ""  # mark of the listing of the log that it has
    beats: list[Beat] = []
    said: list[Said] = []
    ended: str = ""  # how its ranks ended, where they have
    weights: str = ""  # address of the server of what its ranks publish


class HostAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """head -> host: what changed since its last signs."""

    order: Order | None = None
    log: list[LogEntry] | None = None  # batches and their parts
    mark: str = ""  # of this listing


@dataclass
class TrainerHost:
    """A host that has sent signs."""

    name: str
    last_seen: float  # by the clock of this process
    signs: Signs


@dataclass
class HeadState:
    """What the server gives out; the fleet replaces the order."""

    order: Order
    members: list[str] = field(default_factory=list)  # of this start, from node 1 on
    hosts: dict[str, TrainerHost] = field(default_factory=dict)

    def order_of(self, host: str) -> Order:
        node = self.members.index(host) + 1 if host in self.members else -1
        return msgspec.structs.replace(self.order, node=node)

    def living(self) -> list[TrainerHost]:
        now = time.monotonic()
        return [host for host in self.hosts.values() if now - host.last_seen <= HOST_SILENT]


class HostServer:
    """``with HostServer(directory, address, token) as server: server.state.order = Order(...)``, from one thread."""

    def __init__(
        self,
        plan: WorkPlan,
        address: str,
        *,
        token: str,
        port: int = 0,
        start: int = 0,
        tls: ssl.SSLContext | None = None,
    ):
        """`start`: number of the first order, by which hosts wait."""
        self.plan, self.address, self.token, self.tls = plan, address, token, tls
        self.state = HeadState(Order(start=start, plan=plan))
        self.port = port
        self._digests: dict[tuple[str, int, int], str] = {}  # by name, inode and time of change
        self._newest: tuple[str, list[LogEntry]] = ("", [])
        self._listed_at = -LISTING_INTERVAL
        self._listed = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="trainer hosts", daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> HostServer:
        try:
            self._listening = socket.create_server((self.address, self.port))
        except OSError as error:
            raise Invalid(
                f"{self.address}:{self.port} cannot be listened on: {error.strerror}",
                hint="set hosts.address and hosts.port to what this machine has free",
            ) from None
        self.port = self._listening.getsockname()[1]
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        application = web.Application(middlewares=[self._gate], client_max_size=MAX_SIGNS)
        routes = [
            web.put("/signs/{host}", self._signs),
            web.get("/{area:log|model|save}/{name}", self._content),
            web.get("/save/{name}/{at:[0-9]{1,18}}/{length:[0-9]{1,9}}", self._part),
            web.put("/save/{name}", self._shard),
        ]
        application.add_routes(routes)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.SockSite(runner, self._listening, ssl_context=self.tls).start()
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise Unauthorized("the trainer's host wants its token", hint="set PAGURUS_TRAINER_TOKEN")
            return await handler(request)
        except PagurusError as error:
            status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 503)
            return web.Response(status=status, text=error.message)

    async def _signs(self, request: web.Request) -> web.Response:
        name = _matching(HOST, request.match_info["host"])
        try:
            signs = msgspec.msgpack.decode(await request.read(), type=Signs)
        except msgspec.MsgspecError as error:
            raise Invalid(f"that is no sign: {error}", hint="run the same version on all hosts") from None
        self.state.hosts[name] = TrainerHost(name, time.monotonic(), signs)
        for _ in range(round(HOLD / LISTING_INTERVAL)):
            if (answer := await self._news(name, signs)) != HostAnswer():
                break
            await asyncio.sleep(LISTING_INTERVAL)
        return _packed(answer)

    async def _news(self, host: str, signs: Signs) -> HostAnswer:
        """A listing is not older than the order that it comes with."""
        order = self.state.order_of(host)
        ordered = order.start != signs.ordered
        mark, listed = await self._listing(fresh=ordered)
        unchanged = mark == signs.log
        return HostAnswer(
            order=order if ordered else None, log=None if unchanged else listed, mark="" if unchanged else mark
        )

    async def _listing(self, *, fresh: bool) -> tuple[str, list[LogEntry]]:
        """Of the log; not `fresh`: one of `LISTING_INTERVAL` ago will do."""
        async with self._listed:
            if fresh or time.monotonic() - self._listed_at >= LISTING_INTERVAL:
                self._listed_at = time.monotonic()
                entries = await asyncio.to_thread(self._entries)
                self._newest = blake3(msgspec.msgpack.encode(entries)).hexdigest(), entries
        return self._newest

    def _entries(self) -> list[LogEntry]:
        """Batches are listed first, and come last: a host that has a batch has all that came before it."""
        directory = Path(self.plan.directory, "log")
        batches, others = (sorted(directory.glob(pattern)) for pattern in ("batch-*.zst", "part-*.zst"))
        probe = directory / "probe.zst"
        result, digests = [], {}
        for path in (*others, *([probe] if probe.exists() else []), *batches):
            try:
                state = path.stat()
                key = path.name, state.st_ino, state.st_mtime_ns
                digests[key] = self._digests.get(key) or digest_of(path)
            except FileNotFoundError:  # forgotten since
                continue
            result.append(LogEntry(path.name, digests[key]))
        self._digests = digests
        return result

    async def _content(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._file(request.match_info["area"], request.match_info["name"]))

    def _file(self, area: str, name: str) -> Path:
        _matching(NAME, name)
        saves = self.plan.resume / (self.state.order.save or "none")
        areas = {"log": Path(self.plan.directory, "log"), "model": Path(self.plan.model), "save": saves}
        path = areas[area] / name
        if not path.is_file():
            raise NotFound(f"there is no {name}", hint="ask for what an order or the log names")
        return path

    async def _part(self, request: web.Request) -> web.Response:
        path = self._file("save", request.match_info["name"])
        at, length = int(request.match_info["at"]), int(request.match_info["length"])
        if length > PART:
            raise Invalid(f"{length} bytes are more than {PART} of one request", hint="ask for less at once")

        def read() -> tuple[bytes, str]:
            with path.open("rb") as file:
                file.seek(at)
                content = file.read(length)
            return content, blake3(content).hexdigest()

        content, digest = await asyncio.to_thread(read)
        return web.Response(body=content, headers={DIGEST: digest})

    async def _shard(self, request: web.Request) -> web.Response:
        name = _matching(SHARD, request.match_info["name"])
        path = self.plan.resume / ".new" / name
        if not path.parent.is_dir():
            raise NotFound("no save is being written", hint="rank 0 begins one")
        with path.open("wb") as file:
            async for block in request.content.iter_chunked(BLOCK):
                file.write(block)
        return web.Response()


def _matching(pattern: re.Pattern[str], name: str) -> str:
    if not pattern.fullmatch(name):
        raise Invalid(f"{name[:80]!r} is no name here", hint="run the same version on all hosts")
    return name


def _packed(value: object) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(value), content_type="application/msgpack")
