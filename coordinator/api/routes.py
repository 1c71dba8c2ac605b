"""The API of a cluster: a daemon's routes, answered by many hosts, and those of the cluster itself.

A route that is not here is refused, not guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from coordinator import e2b, merge
from coordinator.api import overview
from coordinator.api.description import described
from coordinator.api.overview import Overview
from coordinator.callers import Callers
from coordinator.copies import Copies
from coordinator.decide import place
from coordinator.decide.place import PlacementRequest
from coordinator.e2b import E2bCalls
from coordinator.forward import MEMORY, HostResponse, passed_on, relay, while_there
from coordinator.jobs.keeper import Jobs
from coordinator.members import HostMember, Members, answering
from coordinator.moves import Moves
from coordinator.phases import PhaseScheduler
from coordinator.state import HostRow
from coordinator.wire import body, raw, refusal, reply
from daemon.api.login import begun, reported, shown_by
from daemon.auth import access
from daemon.auth.access import CALLER, Caller
from daemon.auth.pace import TokenRateLimits
from daemon.auth.shares import Shares, memory_part
from sandbox.errors import Invalid, NoSpace, PagurusError, Unsupported
from sandbox.messages.cluster import (
    HostChange,
    HostName,
    HostRequest,
    JobRequest,
    MoveRequest,
    PhaseLeave,
    PhaseRequest,
)
from sandbox.messages.tokens import ApiToken, LoginRequest, NewToken, TokenRequest
from sandbox.page import ASSETS, add_page
from sandbox.sdk.transport import MSGPACK, decoded_error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = ("/", "/v1/health", "/v1/openapi.json", "/e2b/openapi.json")
DESCRIPTION_TTL = 60.0  # seconds; anybody may ask for it, and it costs a call to a host


class Routes:
    """Handlers of one coordinator."""

    def __init__(
        self,
        members: Members,
        callers: Callers,
        copies: Copies,
        moves: Moves,
        jobs: Jobs,
        phases: PhaseScheduler,
        *,
        e2b_domain: str = "",
    ) -> None:
        self.members = members
        self.copies = copies
        self.jobs = jobs
        self.phases = phases
        self.callers = callers
        self.moves = moves
        self.calls = E2bCalls(members, callers, copies, moves)
        self.calls.domain = e2b_domain
        self._overview = Overview(members, callers, jobs, phases)
        self._pace = TokenRateLimits()
        self._memory = Shares("in memory", memory_part())
        self._describing = asyncio.Lock()
        self._described: tuple[float, object] | None = None  # until when the description is used again

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.calls.enter, self._admitted])
        app.on_response_prepare.append(_typed)
        add_page(app)
        for method, path, handler in (*self._table(), *self.calls.table()):
            app.router.add_route(method, path, handler)
        return app

    def _table(self) -> Iterable[tuple[str, str, Handler]]:
        calls = self.calls
        yield from (
            ("GET", "/v1/health", self._health),
            ("GET", "/v1/openapi.json", self._description),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/usage", self._joined("sandbox", None)),
            ("GET", "/v1/usage/host", self._added),
            ("GET", "/v1/sandboxes", self._joined("id", "created_at")),
            ("POST", "/v1/sandboxes", calls.create),
            ("*", "/v1/sandboxes/{id}", calls.on_sandbox),
            ("*", "/v1/sandboxes/{id}/{rest:.+}", calls.on_sandbox),
            ("PUT", "/v1/runs/{run}", self._everywhere),
            ("DELETE", "/v1/runs/{run}", self._added),
            ("GET", "/v1/checkpoints", self._joined("id", "created_at")),
            ("POST", "/v1/checkpoints/collect", self._added),
            ("POST", "/v1/checkpoints/verify", self._joined("checkpoint", None)),
            ("GET", "/v1/checkpoints/have", self._one_host),
            ("POST", "/v1/checkpoints/import", self._best),
            ("POST", "/v1/checkpoints/pull", self._best),
            ("*", "/v1/checkpoints/{checkpoint}", calls.on_checkpoint),
            ("*", "/v1/checkpoints/{checkpoint}/{rest:.+}", calls.on_checkpoint),
            ("GET", "/v1/images", self._joined("name", None)),
            ("POST", "/v1/images/pull", self._everywhere),
            ("POST", "/v1/images/pull/stream", self._best),
            ("GET", "/v1/images/{name}", self._image),
            ("DELETE", "/v1/images/{name}", self._image),
            ("PUT", "/v1/images/{name}", self._best),
            ("GET", "/v1/steps", self._joined("key", None)),
            ("POST", "/v1/steps/find", self._joined("key", None)),
            ("PUT", "/v1/steps", self._step),
            ("DELETE", "/v1/steps", self._added),
            ("GET", "/v1/builds", self._joined("id", "started_at")),
            ("POST", "/v1/builds", self._best),
            ("GET", "/v1/statistics", self._added),
            ("GET", "/v1/network", self._added),
            ("GET", "/v1/credentials", self._joined("name", None)),
            ("PUT", "/v1/credentials/{name}", self._everywhere),
            ("DELETE", "/v1/credentials/{name}", self._everywhere),
            ("GET", "/v1/gateway", self._added),
            ("GET", "/v1/gateway/upstreams", self._joined("name", None)),
            ("PUT", "/v1/gateway/upstreams/{name}", self._everywhere),
            ("DELETE", "/v1/gateway/upstreams/{name}", self._everywhere),
        )
        yield from self._overview.table()
        yield from self._own()

    def _own(self) -> Iterable[tuple[str, str, Handler]]:
        """Those that no host answers."""
        yield from (
            ("POST", "/v1/login", self._log_in),
            ("GET", "/v1/login", self._who),
            ("DELETE", "/v1/login", self._log_out),
            ("POST", "/v1/tokens", self._make_token),
            ("GET", "/v1/tokens", self._tokens),
            ("DELETE", "/v1/tokens/{token}", self._revoke_token),
            ("PUT", "/v1/cluster/hosts/{name}", self._add_host),
            ("PATCH", "/v1/cluster/hosts/{name}", self._change_host),
            ("DELETE", "/v1/cluster/hosts/{name}", self._drop_host),
            ("POST", "/v1/cluster/moves", self._move),
            ("POST", "/v1/phases", self._request_phase),
            ("POST", "/v1/phases/leave", self._leave_phases),
            ("POST", "/v1/cluster/jobs", self._submit),
            ("DELETE", "/v1/cluster/jobs/{job}", self._cancel_job),
        )

    @web.middleware
    async def _admitted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who calls is known before anything is done; every error is an answer of the closed table."""
        caller = access.NOBODY
        try:
            CALLER.set(caller)
            if not _open(request):
                caller = self._caller(request)
                if (refused := access.refusal(caller, _scope(caller, request.method, request.path))) is not None:
                    raise refused
                CALLER.set(caller)
                self._pace.need(caller)
            acting = contextlib.nullcontext() if request.method == "GET" else self._pace.acting(caller)
            with acting, self.callers.tokens.watched(caller, request), self._memory.call(caller) as memory:
                MEMORY.set(memory)
                return await handler(request)
        except Exception as error:  # noqa: BLE001 - the boundary: a bug in one route is an answer and a log entry
            answer = refusal(request, error)
            return e2b.refusal(error) if e2b.is_control(request.path) else answer

    def _caller(self, request: web.Request) -> Caller:
        """Who shows a token, or a key of E2B's clients."""
        key = request.headers.get(e2b.KEY_HEADER) if e2b.is_control(request.path) else None
        return (
            self.callers.tokens.identify(key)
            if key is not None
            else shown_by(request, self.callers.tokens, self.callers.logins)
        )

    # ----------------------------------------------------------------- of all hosts

    async def _request_all(self, request: web.Request) -> dict[str, HostResponse]:
        """What each living host answers. Raises the first refusal."""
        data = await raw(request) or None
        headers = {**passed_on(request.headers), "Accept": MSGPACK}
        headers.pop("Content-Length", None)

        async def one(member: HostMember) -> HostResponse:
            async with answering(member) if request.method == "GET" else contextlib.nullcontext():
                token = await self.callers.token(member)
                return await member.upstream.complete(request.method, request.path_qs, headers, data, token)

        living = self.members.living()
        answers = dict(zip([m.name for m in living], await asyncio.gather(*map(one, living)), strict=True))
        for answer in answers.values():
            if answer.status >= 400:
                raise decoded_error(answer.status, answer.body, request.path)
        return answers

    def _joined(self, key: str, order: str | None) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            answers = await self._request_all(request)
            return reply(
                request, merge.joined((item.decoded(list[dict[str, Any]]) for item in answers.values()), key, order)
            )

        return handle

    async def _added(self, request: web.Request) -> web.StreamResponse:
        answers = await self._request_all(request)
        return reply(request, merge.added(item.decoded(dict) for item in answers.values()))

    async def _everywhere(self, request: web.Request) -> web.StreamResponse:
        """On all hosts; the first one's answer."""
        answers = await self._request_all(request)
        result = next(iter(answers.values()), None)
        if result is None:
            raise self._no_host()
        return reply(request, result.decoded(dict), result.status)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        answers = await self._request_all(request)
        texts = {name: answer.body.decode() for name, answer in answers.items()}
        text = merge.exposition(texts, self.copies.counters())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # ----------------------------------------------------------------- of one host

    def _no_host(self) -> PagurusError:
        why = place.refusals(self.members.views(), PlacementRequest())
        return NoSpace(f"no host can take it: {why}", hint="pagurus cluster add, or see `pagurus cluster ls`")

    async def _any(self, request: web.Request) -> web.StreamResponse:
        for member in self.members.living():
            return await self._pass(request, member)
        raise self._no_host()

    async def _description(self, request: web.Request) -> web.StreamResponse:
        async with self._describing:  # callers who come at once cost one call together
            if self._described is None or time.monotonic() >= self._described[0]:
                host: bytes | None = None
                for member in self.members.living()[:1]:
                    host = (await member.upstream.complete("GET", request.path, {}, None, None)).body
                made = described(host, self._table(), lambda method, path: _scope(access.NOBODY, method, path))
                ttl = DESCRIPTION_TTL if host is not None else 0.0
                self._described = time.monotonic() + ttl, made
        return reply(request, self._described[1])

    async def _best(self, request: web.Request) -> web.StreamResponse:
        """Whatever comes in is for the host that has most room."""
        order = place.ranked(self.members.views(), PlacementRequest())
        if not order:
            raise self._no_host()
        return await self._pass(request, self.members.member(order[0]))

    async def _pass(self, request: web.Request, member: HostMember) -> web.StreamResponse:
        data = request.content if request.body_exists else None
        token = await self.callers.token(member)
        headers = passed_on(request.headers)
        if data is None:
            headers.pop("Content-Length", None)
        async with (
            while_there(request),
            member.upstream.answered(request.method, request.path_qs, headers, data, token) as result,
        ):
            return await relay(request, result)

    async def _one_host(self, request: web.Request) -> web.StreamResponse:
        raise Unsupported("each host has content of its own", hint="ask the daemon of one host")

    async def _image(self, request: web.Request) -> web.StreamResponse:
        """An image as a host that has it describes it; removed on all that have it."""
        from sandbox.image.store import filed

        name = filed(request.match_info["name"])
        holders = [m for m in self.members.living() if m.report and name in map(filed, m.report.images)]
        if not holders:
            return await self._any(request)  # which knows other ways to write the name, and says what there is
        if request.method == "DELETE":
            for member in holders[1:]:
                await member.upstream.request_as("DELETE", request.path, dict, token=await self.callers.token(member))
        return await self._pass(request, holders[0])

    async def _step(self, request: web.Request) -> web.StreamResponse:
        """A step is kept where its checkpoint is."""
        from sandbox.messages import KeepStep

        target = await body(request, KeepStep)
        holders = await self.members.holders(target.checkpoint, self.callers.token)
        member = self.members.member(next(iter(holders)))
        token = await self.callers.token(member)
        headers = {key: value for key, value in passed_on(request.headers).items() if key.lower() != "content-length"}
        return (await member.upstream.complete("PUT", request.path_qs, headers, await raw(request), token)).response()

    # ----------------------------------------------------------------- the cluster's own

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return reply(request, {"status": "ok", "pid": os.getpid(), "hosts": len(self.members.living())})

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        target = await body(request, LoginRequest)
        return begun(request, self.callers.tokens, self.callers.logins, target, cluster=True)

    async def _who(self, request: web.Request) -> web.StreamResponse:
        return reply(request, reported(CALLER.get(), cluster=True))

    async def _log_out(self, request: web.Request) -> web.StreamResponse:
        response = reply(request, {})
        self.callers.logins.end(request, response)
        return response

    async def _make_token(self, request: web.Request) -> web.StreamResponse:
        target = await body(request, TokenRequest)
        grant, text = await asyncio.to_thread(self.callers.tokens.create, **msgspec.structs.asdict(target))
        reported = msgspec.convert(grant, ApiToken, from_attributes=True)
        return reply(request, NewToken(token=reported, text=text), 201)

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        grants = self.callers.tokens.list()
        return reply(request, [msgspec.convert(grant, ApiToken, from_attributes=True) for grant in grants])

    async def _revoke_token(self, request: web.Request) -> web.StreamResponse:
        grant = await asyncio.to_thread(self.callers.tokens.revoke, request.match_info["token"])
        await self.callers.revoke(grant.id)
        return reply(request, msgspec.convert(grant, ApiToken, from_attributes=True))

    async def _add_host(self, request: web.Request) -> web.StreamResponse:
        """Have a host in the cluster, under this name."""
        target = await body(request, HostRequest)
        if not target.address.startswith(("http://", "https://", "/")):
            raise Invalid(f"{target.address!r} is no address", hint="give a URL or the path of a daemon's socket")
        try:
            name = msgspec.convert(request.match_info["name"], HostName)
        except msgspec.ValidationError:
            raise Invalid("no host may be called so", hint="lower-case letters, digits, dots, dashes") from None
        row = HostRow(**msgspec.structs.asdict(target))
        member = await self.members.add(name, row)
        return reply(request, member.info(self.members.counts()[member.name]), 201)

    async def _change_host(self, request: web.Request) -> web.StreamResponse:
        """Change labels of a host, or whether it drains: its sandboxes move away and no new ones come."""
        target = await body(request, HostChange)
        member = await self.members.change(request.match_info["name"], draining=target.draining, labels=target.labels)
        return reply(request, member.info(self.members.counts()[member.name]))

    async def _drop_host(self, request: web.Request) -> web.StreamResponse:
        """Forget a host. Its sandboxes keep running there."""
        await self.members.drop(request.match_info["name"])
        return reply(request, {})

    async def _move(self, request: web.Request) -> web.StreamResponse:
        """Move a running sandbox to another host."""
        target = await body(request, MoveRequest)
        id, _ = self.calls.find(target.sandbox)
        return reply(request, await self.moves.move(id, self.members.member(target.host).name))

    # ----------------------------------------------------------------- jobs

    async def _request_phase(self, request: web.Request) -> web.StreamResponse:
        """A turn of a job on shared machines: whether it has them, or until when it waits."""
        query = await body(request, PhaseRequest)
        return reply(request, await self.phases.request(msgspec.structs.replace(query, job=_owned(query.job))))

    async def _leave_phases(self, request: web.Request) -> web.StreamResponse:
        """A job gives its turn up."""
        await self.phases.leave(_owned((await body(request, PhaseLeave)).job))
        return reply(request, {})

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        """Have a run carried out as a job."""
        return reply(request, await self.jobs.submit(await body(request, JobRequest), CALLER.get().owner), 201)

    async def _cancel_job(self, request: web.Request) -> web.StreamResponse:
        """End a job."""
        return reply(request, await self.jobs.cancel(request.match_info["job"]))


def _open(request: web.Request) -> bool:
    """Whether it is answered to everybody: the page's files, which hold nothing of the cluster, and the way in."""
    if request.path == "/v1/login":
        return request.method != "GET"
    if request.method == "PUT" and request.path.startswith(e2b.ARCHIVES):  # a host has signed the address
        return True
    return request.path in OPEN or request.path.startswith(ASSETS)


async def _typed(_: web.Request, response: web.StreamResponse) -> None:
    """A browser that is led to an answer takes it for nothing but what it says that it is."""
    response.headers.setdefault("X-Content-Type-Options", "nosniff")


def _scope(caller: Caller, method: str, path: str) -> access.Scope:
    """What a token needs to be passed on; for most routes each host looks again."""
    if path.startswith("/v1/cluster/"):
        return overview.scope(caller, method, path)
    if path.startswith("/v1/tokens"):
        return "admin"
    if path in ("/metrics", "/v1/network", "/v1/gateway", "/v1/usage/host"):
        return "monitor"
    return "exec" if path.startswith("/v1/phases") else "read"


def _owned(job: str) -> str:
    """A job's name among those of all owners."""
    owner = CALLER.get().owner
    return f"{owner}:{job}" if owner else job
