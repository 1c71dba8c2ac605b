"""One call of a caller: which host it is for, and what a host's death means for it.

Guarantee: a call with a key goes where it went before, also across a restart of the coordinator, so the host knows it
again. A call that may be sent again waits for its host; of another one the connection breaks, as a daemon's does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from coordinator.callers import Callers
from coordinator.copies import Copies
from coordinator.decide import place
from coordinator.decide.place import HostView, PlacementRequest
from coordinator.forward import MAX_COMPLETE, HostResponse, abort, bridge, passed_on, relay, while_there
from coordinator.members import HostMember, Members
from coordinator.moves import Moves
from coordinator.wire import body as decoded
from coordinator.wire import raw, reply
from daemon.api.idempotency import identity
from daemon.auth import visibility
from daemon.auth.access import CALLER
from daemon.auth.quota import excess, usage
from sandbox.container.cgroup import parse_bytes
from sandbox.errors import (
    Conflict,
    ConnectionBroken,
    ErrorBody,
    ImageNotFound,
    NoDaemon,
    NoSpace,
    NotFound,
    Protocol,
    TooMany,
)
from sandbox.image.store import filed
from sandbox.messages import CreateRequest, ForkEntry, ForkRequest, Limits, SandboxInfo
from sandbox.messages.cluster import HostedSandbox
from sandbox.sdk.transport import MSGPACK, part

TIMEOUT = 60.0  # seconds for which a call that may be sent again waits for its host
POLL_INTERVAL = 0.2  # seconds between two tries to reach a host
SILENT_POLL_INTERVAL = 0.05  # seconds between two looks whether a silent one is back, or the sandbox elsewhere
TRIES = 3  # hosts that a new sandbox is offered to
KEY = "Idempotency-Key"
LEASE_OVER = 503  # an answer of a host whose lease is over: nothing was carried out
FULL = (429, 507)  # answers of a host that has no room: another may


class StreamMarker(msgspec.Struct):
    """What is looked for in an answer that is streamed."""

    checkpoint: str | None = None
    turn: int | None = None  # of a command
    id: str | None = None


class Calls:
    """See the module."""

    def __init__(self, members: Members, callers: Callers, copies: Copies, moves: Moves) -> None:
        self.members = members
        self.callers = callers
        self.copies = copies
        self.moves = moves
        self._making: dict[int, HostedSandbox] = {}

    # ----------------------------------------------------------------- on a sandbox

    def find(self, sandbox: str) -> tuple[str, HostMember]:
        """Its id and its host, by its id, name or beginning, as the caller sees it. Raises NotFound."""
        result = visibility.find(self.members.places, sandbox)  # type: ignore[type-var]
        if result is None:
            raise NotFound(f"no such sandbox: {sandbox}", hint="list those there are with `pagurus ls`")
        return result.row.id, self.members.member(result.host)

    async def on_sandbox(self, request: web.Request) -> web.StreamResponse:
        """A call on one sandbox, to the host where it is."""
        id, member = self.find(request.match_info["id"])
        await self.moves.free(id)
        member = self.find(id)[1]
        rest = _rest(request)
        path = f"/v1/sandboxes/{id}" + (f"/{rest}" if rest else "") + _query(request)
        removed = request.method == "DELETE" and not rest
        if KEY in request.headers and self.members.places[id].row.replicated_answers and rest != "fork" and not removed:
            return await self._held(request, id, path)
        with self.moves.calling(id):
            return await self._on_sandbox(request, id, member, rest, path)

    async def _on_sandbox(
        self, request: web.Request, id: str, member: HostMember, rest: str | None, path: str
    ) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            if (there := await member.upstream.joined(path, await self.callers.token(member))) is not None:
                return await bridge(request, there, member.upstream)
            return (await self._complete(member, "GET", path, passed_on(request.headers), None)).response()
        if request.method == "DELETE" and not rest:
            answer = await self._repeated(request, lambda: self.find(id)[1], path)
            if answer.status < 300:
                await self.members.removed(id)
            return answer.response()
        if rest == "fork":
            return await self._fork_sandbox(request, id, path)
        return await self._through(request, lambda: self.find(id)[1], path)

    async def _held(self, request: web.Request, id: str, path: str) -> web.StreamResponse:
        """An answer that goes out when another host has the state that it reports, and is retained for repeated
        calls."""
        call = self._call(request) or ""
        while True:
            await self.moves.free(id)
            with self.moves.calling(id):
                if (retained := await self.members.state.answer(call)) is not None:
                    return msgspec.msgpack.decode(retained, type=HostResponse).response()
                answer = await self._repeated(request, lambda: self.find(id)[1], path)
            host = self.find(id)[1].name
            self._remember(self.find(id)[1], answer)
            reported = self._reported(answer)
            if answer.status >= 300 or reported.checkpoint is None:
                return answer.response()
            if await self.copies.wait(id, reported.checkpoint, host, reported.turn):
                break  # else the host was lost before the state was copied: it has not taken place
        await self.members.state.put_answer(call, id, msgspec.msgpack.encode(answer))
        return answer.response()

    async def _through(self, request: web.Request, holder: Callable[[], HostMember], path: str) -> web.StreamResponse:
        """Whole where it may be sent again, else as it comes."""
        if KEY in request.headers:
            answer = await self._repeated(request, holder, path)
            self._remember(holder(), answer)
            return answer.response()
        member = holder()
        data = request.content if request.body_exists else None
        headers = passed_on(request.headers)
        if data is None:
            headers.pop("Content-Length", None)
        token = await self.callers.token(member)
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                async with (
                    while_there(request),
                    member.upstream.answered(request.method, path, headers, data, token) as result,
                ):
                    return await relay(request, result)
            except (NoDaemon, ConnectionBroken):
                if request.method != "GET" or time.monotonic() > deadline:
                    abort(request)
                    raise
            await asyncio.sleep(POLL_INTERVAL)
            member = holder()

    async def _repeated(self, request: web.Request, holder: Callable[[], HostMember], path: str) -> HostResponse:
        """The whole answer, of the host that holds it by then. Sent again while the host is away, if it has a key."""
        data = await raw(request) or None
        deadline = time.monotonic() + TIMEOUT
        while True:
            member = holder()
            if KEY in request.headers and not member.alive() and time.monotonic() < deadline:
                async with while_there(request):
                    await asyncio.sleep(SILENT_POLL_INTERVAL)  # a host that is gone may not even refuse
                continue
            try:
                async with while_there(request):
                    answer = await self._complete(member, request.method, path, passed_on(request.headers), data)
                if answer.status != LEASE_OVER or KEY not in request.headers or time.monotonic() > deadline:
                    return answer
            except (NoDaemon, ConnectionBroken):
                if KEY not in request.headers or time.monotonic() > deadline:
                    abort(request)
                    raise
            await asyncio.sleep(POLL_INTERVAL)

    async def _complete(
        self, member: HostMember, method: str, path: str, headers: Mapping[str, str], data: bytes | None
    ) -> HostResponse:
        sent = {name: value for name, value in headers.items() if name.lower() != "content-length"}
        return await member.upstream.complete(method, path, sent, data, await self.callers.token(member))

    def _remember(self, member: HostMember, answer: HostResponse) -> None:
        """Where the checkpoint is that an answer names."""
        reported = self._reported(answer)
        for name in (reported.checkpoint, reported.id):
            if name is not None and name.startswith("c-"):
                self.members.remember(name, member.name)

    @staticmethod
    def _reported(answer: HostResponse) -> StreamMarker:
        if answer.status < 300 and len(answer.body) < MAX_COMPLETE:
            with contextlib.suppress(Protocol):  # an answer of another form names none
                return answer.decoded(StreamMarker)
        return StreamMarker()

    # ----------------------------------------------------------------- new ones

    async def create(self, request: web.Request) -> web.StreamResponse:
        """A new sandbox, on the host that suits it best."""
        target = await decoded(request, CreateRequest)
        names = frozenset(filter(None, map(filed, (target.image, f"{target.image}:latest"))))
        memory = 0 if target.limits.memory is None else parse_bytes(target.limits.memory) / 8
        hosts = self.members.views()
        requested = PlacementRequest(images=names, labels=target.labels, memory=memory)
        call, replicated = self._call(request), target.replicated_answers
        if (
            existing := self.members.state.calls.get(call or "")
        ) in self.members.hosts:  # admitted then, and perhaps made
            return (await self._offered(request, [existing], call, hosts, requested, replicated)).response()
        with self._admitted(target.name, [target.limits]):
            order = place.ranked(hosts, requested)
            if not order:
                raise self._nowhere(target.image, names, requested)
            answer = await self._offered(request, order[:TRIES], call, hosts, requested, replicated)
        return answer.response()

    async def _offered(
        self,
        request: web.Request,
        order: list[str],
        call: str | None,
        hosts: Sequence[HostView],
        requested: PlacementRequest,
        replicated: bool,
    ) -> HostResponse:
        """The answer of the first of these hosts that has room."""
        for number, name in enumerate(order):
            member = self.members.member(name)
            if call is not None:
                await self.members.state.put_call(call, name)
            with self.members.coming(member):
                answer = await self._repeated(request, partial(_same, member), request.path)
            if answer.status in FULL and number + 1 < len(order):
                continue
            if answer.status < 300:
                self._hosted(member, answer.decoded(SandboxInfo), replicated=replicated)
                await self.members.state.decided("place", {"hosts": hosts, "target": requested}, name)
            return answer
        raise AssertionError("there is at least one")

    def _nowhere(self, image: str, names: frozenset[str], requested: PlacementRequest) -> Exception:
        hosts = self.members.views()
        existing = sorted({name for host in hosts for name in host.images})
        if names.isdisjoint(existing):
            reported = ", ".join(existing) or "none"
            return ImageNotFound(f"no image {image!r}; there are: {reported}", hint="pagurus image import")
        return NoSpace(f"no host can take it: {place.refusals(hosts, requested)}", hint="see `pagurus cluster ls`")

    @contextlib.contextmanager
    def _admitted(self, name: str | None, limits: list[Limits]) -> Any:
        """Within the quota of the caller and under a name that is free, over all hosts. Made within."""
        caller, owner = CALLER.get(), visibility.caller_owner()
        mine = [item.row for item in self.members.places.values() if item.row.owner == owner]
        mine += [item for item in self._making.values() if item.owner == owner]
        if name and any(item.name == name for item in mine):
            raise Conflict(f"there is a sandbox named {name} already", hint="choose another name")
        if why := excess(caller.quota, usage([*limits, *(item.limits for item in mine)])):
            raise TooMany(f"the quota of this token would be exceeded: {why}", hint="remove some, or ask for less")
        made = {id(item): HostedSandbox(id="", owner=owner, name=name, limits=item) for item in limits}
        self._making |= made
        try:
            yield
        finally:
            for key in made:
                del self._making[key]

    def _hosted(self, member: HostMember, info: SandboxInfo, *, replicated: bool = False) -> None:
        owner = visibility.caller_owner()
        row = HostedSandbox(id=info.id, owner=owner, name=info.name, image=info.image, limits=info.limits)
        row.created_at, row.turn, row.head = info.created_at, info.turn, info.head or ""
        row.replicated_answers = replicated
        self.members.made(member.name, row)

    def _made(self, member: HostMember, answer: HostResponse) -> list[ForkEntry]:
        if answer.status >= 300:
            return []
        entries = answer.decoded(list[ForkEntry])
        for entry in entries:
            if entry.sandbox is not None:
                self._hosted(member, entry.sandbox)
        return entries

    def _call(self, request: web.Request) -> str | None:
        """What a repetition of this call is known by."""
        key = request.headers.get(KEY)
        if key is None:
            return None
        token = CALLER.get().token
        return f"{token} {identity(token, request.method, request.path, key)}"

    # ----------------------------------------------------------------- forks

    async def _forks(self, request: web.Request, sandbox: str) -> tuple[ForkRequest, Any]:
        """The request, and within what it is made: the quota, unless this call was admitted before."""
        target = await decoded(request, ForkRequest)
        target.need_count()
        if self._call(request) in self.members.state.calls:
            return target, contextlib.nullcontext()
        existing = self.members.places.get(sandbox)  # of one that is gone, its host counts what forks may use
        limits = Limits(cpus=0.01, memory=1, disk=1) if existing is None else existing.row.limits
        return target, self._admitted(None, [limits] * target.count)

    async def _fork_sandbox(self, request: web.Request, id: str, path: str) -> web.StreamResponse:
        """New sandboxes that continue from a sandbox as it is now, on its host."""
        target, admitted = await self._forks(request, id)
        with admitted:
            if (call := self._call(request)) is not None:
                await self.members.state.put_call(call, self.find(id)[1].name)
            with self.members.coming(self.find(id)[1], target.count):
                answer = await self._repeated(request, lambda: self.find(id)[1], path)
            self._made(self.find(id)[1], answer)
        return answer.response()

    # ----------------------------------------------------------------- on a checkpoint

    async def on_checkpoint(self, request: web.Request) -> web.StreamResponse:
        """A call on one checkpoint, to a host that holds it."""
        result = await self.members.holders(request.match_info["checkpoint"], self.callers.token)
        info = next(iter(result.values()))
        rest = _rest(request)
        if rest == "fork":
            target, admitted = await self._forks(request, info.sandbox)
            with admitted:
                return await self._fork(request, target, info.id, frozenset(result))
        path = f"/v1/checkpoints/{part(info.id)}" + (f"/{rest}" if rest else "") + _query(request)
        order = place.ranked(self.members.views(), PlacementRequest(holders=frozenset(result))) or sorted(result)
        if request.method == "DELETE" or rest == "label":
            held = [self.members.member(name) for name in sorted(result)]
            answers = [await self._repeated(request, partial(_same, member), path) for member in held]
            return max(answers, key=lambda answer: answer.status).response()
        return await self._through(request, lambda: self.members.member(order[0]), path)

    async def _fork(
        self, request: web.Request, target: ForkRequest, checkpoint: str, holders: frozenset[str]
    ) -> web.StreamResponse:
        """New sandboxes on the hosts that hold the checkpoint, spread by how busy these are."""
        call, state = self._call(request), self.members.state
        requested = PlacementRequest(holders=holders, labels=target.labels or {})
        hosts = self.members.views()
        if (existing := state.calls.get(call or "")) is not None:
            shares = msgspec.json.decode(existing, type=dict[str, int])
        else:
            shares = place.spread(hosts, requested, target.count)
            if not shares:
                why = place.refusals([host for host in hosts if host.name in holders], requested)
                raise NoSpace(f"no host can take it: {why}", hint="see `pagurus cluster ls`")
            if call is not None:
                await state.put_call(call, msgspec.json.encode(shares).decode())
        path = f"/v1/checkpoints/{part(checkpoint)}/fork"
        parts = await asyncio.gather(*(self._share(request, n, c, path, target) for n, c in shares.items()))
        if existing is None and any(answer.status < 300 for _, answer in parts):
            await state.decided("fork", {"hosts": hosts, "target": requested, "count": target.count}, shares)
        if len(parts) == 1:
            return parts[0][1].response()
        if all(answer.status >= 400 for _, answer in parts):
            return parts[0][1].response()
        return reply(request, [entry for entries, _ in parts for entry in entries], 201)

    async def _share(
        self, request: web.Request, host: str, count: int, path: str, target: ForkRequest
    ) -> tuple[list[ForkEntry], HostResponse]:
        member = self.members.member(host)
        headers = {**passed_on(request.headers), "Content-Type": MSGPACK}
        data = msgspec.msgpack.encode(msgspec.structs.replace(target, count=count))
        with self.members.coming(member, count):
            answer = await self._complete(member, "POST", path, headers, data)
        if answer.status < 300:
            return self._made(member, answer), answer
        return [ForkEntry(error=answer.decoded(ErrorBody)) for _ in range(count)], answer


def _rest(request: web.Request) -> str | None:
    """The end of the path. Decoded once more on the way, it could be another one at the host."""
    rest = request.match_info.get("rest")
    if rest is not None and not set("%?#").isdisjoint(rest):
        raise NotFound("no such route", hint="write the path as the description of the API has it")
    return rest


def _query(request: web.Request) -> str:
    return f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else ""


def _same(member: HostMember) -> HostMember:
    return member
