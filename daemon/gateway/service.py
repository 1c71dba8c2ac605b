"""The gateway of a host: its sandboxes' listeners, tokens and conversations.

Guarantee: a request is of the sandbox whose socket accepted it, or whose token it shows; nothing that it says otherwise
counts. A token is shown once, stored as a hash, and ends with its sandbox. No request is served before the daemon has
recovered all that a former one left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from daemon import metrics
from daemon.auth import tls
from daemon.catalogue import CheckpointRow, SandboxRow
from daemon.gateway import listener, replay, wire
from daemon.gateway.answer import is_open
from daemon.gateway.commands import Commands
from daemon.gateway.conversation import GatewayContext, LiveConversation, head_now
from daemon.gateway.journal import ConversationJournal, JournalCursor
from daemon.gateway.upstream import GatewayConfig, Upstreams, checked
from sandbox.errors import Closed, Conflict, NotFound, PagurusError, TooMany, Unauthorized
from sandbox.messages import (
    ExecRequest,
    ExecResult,
    Gateway,
    GatewayStatistics,
    SandboxState,
    TokenInfo,
    Upstream,
)
from sandbox.messages.cluster import ConversationExport

if TYPE_CHECKING:
    from daemon.host.host import Host
    from sandbox.container.container import Container

log = logging.getLogger("pagurus.gateway")

DUMMY_KEY = "held-by-the-host"  # what an agent inside shows; clients insist on some key
TOKEN = "pgw"
MAX_OUTSIDE = 4096  # connections of all agents outside together
LARGE = 256 << 10  # bytes of a body that is not read on the event loop
HERE = "here"  # the tree of a sandbox that comes from another host: whichever it gets
STALLED = 10.0  # seconds after which one who shows a wrong token is answered


def environment(settings: Gateway) -> dict[str, str]:
    """Variables by which clients of both families find the gateway inside a sandbox."""
    if settings.agent != "inside":
        return {}
    address = f"http://127.0.0.1:{settings.port}"
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": DUMMY_KEY,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": DUMMY_KEY,
        "GOOGLE_GEMINI_BASE_URL": address,
        "GEMINI_API_KEY": DUMMY_KEY,
    }


class GatewayService:
    """The gateway of `host`. An attachment of each sandbox that was created with a gateway."""

    def __init__(self, host: Host, journal: Path, config: GatewayConfig | None = None) -> None:
        self.host = host
        self.config = config or GatewayConfig()
        self.journal = ConversationJournal(journal)
        self.handler = GatewayContext(self.journal, Upstreams(self.config.upstreams, {}), host)
        self.ready = asyncio.Event()  # set when everything was recovered
        self.lines: dict[str, LiveConversation] = {}
        self._commands: dict[str, Commands] = {}
        self._places: dict[str, JournalCursor] = {}
        self._inside = listener.InsideListeners(listener.RETAINED, self.serve, host.services.spawn)
        self._outside: listener.GatewayListener | None = None
        self._wrong = listener.ConnectionRateLimit()
        self._closed = False

    # ----------------------------------------------------------------- the life of it

    async def open(self, rows: Sequence[SandboxRow]) -> None:
        """Read what a former daemon journalled; forget sandboxes that are no more."""
        self.handler.upstreams.added.update(await self.journal.upstreams())
        self._places, steps = await self.journal.load()
        for sandbox, main, step in steps:
            self.handler.ledger.add(sandbox, step, main=main)
        living = {row.id for row in rows}
        for sandbox in [name for name in self._places if name not in living]:
            await self._forget(sandbox)
        if (address := self.config.address()) is not None:
            config, speaks = self.config, None
            if config.tls_cert is not None and config.tls_key is not None:
                speaks = await asyncio.to_thread(tls.context, Path(config.tls_cert), Path(config.tls_key))
            sock = listener.socket_outside(*address)
            self._outside = listener.GatewayListener(
                sock, self.serve_outside, limit=MAX_OUTSIDE, paced=False, tls=speaks
            )
            log.info("agents outside are served on %s:%d", *address)

    async def close(self) -> None:
        """Cut all off. They ask again when the next daemon serves. Idempotent."""
        if self._closed:
            return
        self._closed = True
        outside = [] if self._outside is None else [self._outside]
        await asyncio.gather(self._inside.close(), *(item.close() for item in outside))
        await asyncio.gather(*(line.close() for line in self.lines.values()))
        await self.handler.upstreams.close()
        await self.journal.close()

    async def attach(self, row: SandboxRow, container: Container) -> None:
        """Give a sandbox its listener, before its processes run."""
        settings = row.gateway
        if settings is None:
            return
        if row.state is SandboxState.CREATING:
            self.handler.upstreams.get(settings.upstream)
        row.env = {**environment(settings), **row.env}
        row.durable_answers = row.durable_answers or settings.hold == "durable"
        if settings.agent == "outside":
            return
        await self._inside.attach(row.id, settings.port, container)

    async def detach(self, row: SandboxRow, container: Container) -> None:
        """Take the listener away; of a sandbox that is removed, everything."""
        await self._inside.detach(row.id)
        if row.state is SandboxState.REMOVED:
            for sandbox in {
                row.id,
                *(name for name in (*self.lines, *self._places) if name not in self.host.live_sandboxes),
            } - self.host.arrivals.coming():
                if (line := self.lines.pop(sandbox, None)) is not None:
                    await line.close()
                self._commands.pop(sandbox, None)
                await self._forget(sandbox)

    async def _forget(self, sandbox: str) -> None:
        """Drop the record of a sandbox, but for what forks of it are based on."""
        ledger = self.handler.ledger
        self._places.pop(sandbox, None)
        retained: set[int] = set()
        for place in (*self._places.values(), *(line.place for line in self.lines.values())):
            retained |= {step.id for step in replay.path_to(ledger.steps, place.head)}
            retained |= set(place.script)
        living = {*self._places, *self.lines}
        gone = {number for number, owner in ledger.owner.items() if owner not in living and number not in retained}
        ledger.drop(gone)
        ledger.sides.pop(sandbox, None)
        await self.journal.forget(sandbox, gone)

    # ----------------------------------------------------------------- lines

    async def line(self, sandbox: str) -> LiveConversation:
        """The conversation of a sandbox that has a gateway."""
        live = self.host.live_sandboxes.get(sandbox)
        if live is None or live.row.state is SandboxState.REMOVED:
            raise Closed("the sandbox has been removed", hint="create a sandbox, and give the agent its address")
        if live.row.gateway is None:
            raise Conflict("the sandbox has no gateway", hint="create it with gateway=Gateway(...)", sandbox=sandbox)
        if (existing := self.lines.get(sandbox)) is not None:
            return existing
        size = await self.journal.size(sandbox)
        if (existing := self.lines.get(sandbox)) is not None:  # made since
            return existing
        place = self._places.pop(sandbox, None)
        if place is None:
            head = head_now(self.handler, live.row.head, [])
            place = JournalCursor(tree=live.row.tree or "", head=head)
            place.cursor = len(replay.path_to(self.handler.ledger.steps, head)) - 1
        if place.tree == HERE:
            place.tree = live.row.tree or ""
        line = LiveConversation(sandbox, live.row.gateway, place, self.handler)
        line.bytes = size
        self.lines[sandbox] = line
        self._commands[sandbox] = Commands(line)
        return line

    async def conversation(self, checkpoint: CheckpointRow) -> ConversationExport:
        """What another host must know to continue from a checkpoint."""
        live = self.host.live_sandboxes.get(checkpoint.sandbox)
        if live is None or live.row.gateway is None:
            return ConversationExport()
        line = await self.line(live.row.id)
        path = replay.path_to(self.handler.ledger.steps, head_now(self.handler, checkpoint.id, line.path))
        reported = ConversationExport(gateway=live.row.gateway)
        await self.journal.reported(live.row.id, [step.id for step in path], reported)
        return reported

    async def arriving(self, row: SandboxRow, conversation: ConversationExport) -> None:
        """Before a sandbox of another host runs here: what was said there. Again, it is taken afresh."""
        await self._forget(row.id)
        row.gateway = conversation.gateway
        if row.gateway is None:
            return
        try:
            self.handler.upstreams.get(row.gateway.upstream)
        except NotFound as error:  # better alive without a model than not at all
            log.warning("comes without its gateway: %s", error, extra={"sandbox": row.id})
            row.gateway = None
            return
        self._places[row.id], path = await self.journal.taken(row.id, HERE, conversation)
        for step in path:
            self.handler.ledger.add(row.id, step, main=True)

    def arrived(self, row: SandboxRow) -> None:
        """It runs here: from now on another tree means that it was restored."""
        if (place := self._places.get(row.id)) is not None:
            place.tree = row.tree or HERE

    async def exec(self, sandbox: str, request: ExecRequest, call: str = "") -> ExecResult:
        """The next command of an agent outside."""
        await self.line(sandbox)
        return await self._commands[sandbox].run(request, call)

    async def replay(self, sandbox: str, checkpoint: str) -> int:
        """Answer the sandbox's coming requests from the record up to `checkpoint`; returns how many there are.

        For a sandbox that stands before them (just created, or restored) and whose agent starts over.
        """
        line = await self.line(sandbox)
        row = self.host.checkpoint(checkpoint)
        head = head_now(self.handler, row.id, line.path)
        path = replay.path_to(self.handler.ledger.steps, head)
        async with line.deciding:
            await line.follow()
            behind = {step.id for step in line.path}
            script = [step.id for step in path if step.id not in behind]
            if not script:
                raise Conflict(
                    f"the record has nothing between here and {checkpoint}",
                    sandbox=sandbox,
                    hint="replay from a checkpoint that an earlier request of this conversation made",
                )
            line.place.script = script
            await self.journal.put_place(sandbox, line.place)
        return len(script)

    # ----------------------------------------------------------------- requests

    async def serve(self, sandbox: str, request: web.BaseRequest) -> web.StreamResponse:
        """A request of the agent of `sandbox`."""
        await self.ready.wait()
        kind = "none"
        try:
            line = await self.line(sandbox)
            with line.share.request():
                await line.share.pace.take()
                route = wire.find(request.method, request.path, request.headers)
                async with line.share.body(request) as raw:
                    requested = await self._understand(route, raw, request, line.settings)
                    kind = requested.kind
                    if requested.main and line.settings.agent == "outside":
                        await self._commands[sandbox].finalize()
                    response = await line.serve(requested, request)
                    metrics.gateway_requests.labels(kind, _result(response)).inc()
                    return response
        except PagurusError as error:
            self.handler.counts.refused += 1
            open_ = is_open(request)
            metrics.gateway_requests.labels(kind, "refused" if open_ else "gone").inc()
            if not open_:
                return web.Response(status=499)
            if isinstance(error, TooMany):  # a client that floods the gateway waits for its refusal
                await asyncio.sleep(0.2)
            log.info("refused: %s", error, extra={"sandbox": sandbox})
            return listener.refusal(request, error)

    async def _understand(
        self, route: wire.ModelRoute, raw: bytes, request: web.BaseRequest, settings: Gateway
    ) -> wire.AgentRequest:
        understand = functools.partial(
            wire.understand,
            route,
            raw,
            query=request.query_string,
            model=settings.model,
            side=settings.side,
            recognize_side=settings.recognize_side,
            headers=request.headers,
        )
        return await asyncio.to_thread(understand) if len(raw) > LARGE else understand()

    async def serve_outside(self, request: web.BaseRequest) -> web.StreamResponse:
        """A request of an agent outside: its token names the sandbox."""
        try:
            sandbox = await self.sandbox_of(request)
        except PagurusError as error:
            self.handler.counts.refused += 1
            metrics.tokens_rejected.inc()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALLED):
                    await self._wrong.take()  # guessing is slow
            return listener.refusal(request, error)
        return await self.serve(sandbox, request)

    async def sandbox_of(self, request: web.BaseRequest) -> str:
        """The sandbox whose token the request shows."""
        shown = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        kind, _, rest = shown.partition(".")
        sandbox, _, secret = rest.partition(".")
        if kind != TOKEN or not sandbox or not secret or len(shown) > 200:
            raise Unauthorized(
                "no token of a sandbox is shown", hint="send the one of sandbox.gateway.token() as the API key"
            )
        if sandbox not in self.host.live_sandboxes or not await self.journal.knows_token(sandbox, secret):
            raise Unauthorized("the token is of no sandbox", hint="ask for a new one with sandbox.gateway.token()")
        return sandbox

    # ----------------------------------------------------------------- for the API

    async def token(self, sandbox: str) -> TokenInfo:
        """A new token for the agent of a sandbox; the one before ends."""
        await self.line(sandbox)
        secret = secrets.token_urlsafe(32)
        await self.journal.put_token(sandbox, secret)
        return TokenInfo(sandbox=sandbox, token=f"{TOKEN}.{sandbox}.{secret}", base_url=self.config.base_url())

    async def put_upstream(self, name: str, upstream: Upstream) -> None:
        if name in self.config.upstreams:
            raise Conflict(f"upstream {name} is fixed by the configuration file", hint="change it there")
        await self.journal.put_upstream(name, checked(name, upstream))
        self.handler.upstreams.added[name] = upstream

    async def drop_upstream(self, name: str) -> None:
        if name in self.config.upstreams:
            raise Conflict(f"upstream {name} is fixed by the configuration file", hint="change it there")
        if name not in self.handler.upstreams.added:
            raise NotFound(f"no such upstream: {name}", hint="`pagurus gateway ls` lists those there are")
        users = [
            live.row.id
            for live in self.host.live_sandboxes.values()
            if live.row.gateway is not None and live.row.gateway.upstream == name
        ]
        if users:
            raise Conflict(f"upstream {name} is used by {len(users)} sandboxes", hint=f"remove them first: {users[0]}")
        await self.journal.put_upstream(name, None)
        del self.handler.upstreams.added[name]

    def statistics(self) -> GatewayStatistics:
        self.handler.counts.journal_bytes = sum(line.bytes for line in self.lines.values())
        return self.handler.counts


def _result(response: web.StreamResponse) -> str:
    """What became of a request, for the metrics."""
    if response.status == 499:
        return "gone"
    if response.status >= 300:
        return "upstream_error"
    return "recorded" if response.headers.get("x-pagurus-answer") == "record" else "answered"
