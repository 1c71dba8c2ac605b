"""The API of E2B's clients, answered by a cluster: the host with room makes a sandbox, and its host answers for it.

Guarantee: an API key stays here, as a token does; each host gets its own for the caller. The tokens of single sandboxes
are their host's: they pass through, and their host judges them.

::

    key ▸ caller ▸ quota ▸ host ▸ with the host's own key                      sandboxes, snapshots, templates
    address of a sandbox ▸ its host ▸ as it came                               commands, files, ports
    address of an archive ▸ the host that builds ▸ as it came                  files of a template
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from coordinator.calls import FULL, TRIES, Calls
from coordinator.decide import place
from coordinator.decide.place import PlacementRequest
from coordinator.forward import HostResponse, abort, bridge, while_there
from coordinator.members import HostMember
from coordinator.wire import body, raw
from daemon.auth.access import e2b_spelling
from daemon.auth.visibility import caller_owner, dashed, find
from daemon.e2b.dispatch import ENVD, addressed
from daemon.e2b.keys import sandbox_of
from daemon.e2b.wire import gone, number_error
from sandbox.errors import NotFound, PagurusError, Protocol
from sandbox.image.store import filed
from sandbox.messages import Limits
from sandbox.messages.cluster import HostedSandbox

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

AREAS = ("sandboxes", "v2", "v3", "templates", "snapshots", "e2b")  # beginnings of paths of the control plane
ALIASES = {"base": "debian", "code-interpreter-v1": "code-interpreter"}  # names that clients use unasked
ENVD_PATHS = ("/process.Process/", "/filesystem.Filesystem/", "/files", "/health")
MAX_PAGE = 100
MAX_BUILDERS = 10_000  # templates whose builders are known
ARCHIVES = "/templates/archives/"
KEY_HEADER = "X-API-KEY"
_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip
_SOCKET = {"sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"}


class CreateBody(msgspec.Struct, kw_only=True):
    """What decides where a sandbox goes; the host reads the rest."""

    templateID: str
    metadata: dict[str, str] | None = None


class ForkBody(msgspec.Struct, kw_only=True):
    count: int = 1


class MadeSandbox(msgspec.Struct, kw_only=True):
    sandboxID: str


class TemplateBody(msgspec.Struct, kw_only=True):
    name: str | None = None
    alias: str | None = None


class MadeTemplate(msgspec.Struct, kw_only=True):
    names: list[str]


class ArchiveInfo(msgspec.Struct, kw_only=True):
    present: bool
    url: str


class MadeFork(msgspec.Struct, kw_only=True):
    sandbox: MadeSandbox | None = None


def is_control(path: str) -> bool:
    """Whether a path is of E2B's control plane.

    >>> is_control("/v2/sandboxes"), is_control("/v1/sandboxes")
    (True, False)
    """
    return path.split("/", 2)[1] in AREAS


class E2bCalls(Calls):
    """See the module."""

    domain = ""  # of sandboxes' host names; "": what the caller's request names

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._builders: dict[tuple[str, str], str] = {}  # owner and name of a template: the host that builds it

    def table(self) -> Iterable[tuple[str, str, Handler]]:
        """Routes of the control plane."""
        for version in ("", "/v2"):
            yield "POST", f"{version}/sandboxes", self._create
            yield "GET", f"{version}/sandboxes", self._listed("sandboxID", "startedAt")
            yield "*", f"{version}/sandboxes/{{id}}", self._of_sandbox
            yield "*", f"{version}/sandboxes/{{id}}/{{rest:.+}}", self._of_sandbox
        yield "GET", "/snapshots", self._listed("snapshotID", "")
        yield "POST", "/snapshots/{snapshot}/fork", self._fork_snapshot
        for version in ("", "/v2"):
            yield "GET", f"{version}/templates", self._listed("templateID", "")
        for version in ("/v2", "/v3"):
            yield "POST", f"{version}/templates", self._build
        yield "POST", "/v2/templates/{template}/builds/{build}", self._of_build
        yield "GET", "/templates/{template}/builds/{build}/status", self._of_build
        yield "GET", "/templates/{template}/files/{hash}", self._upload
        yield "PUT", f"{ARCHIVES}{{rest:.+}}", self._archive
        yield "*", "/{rest:(templates|e2b|v2|v3|snapshots)/.*}", self._whoever

    # ----------------------------------------------------------------- of one sandbox, as it came

    @web.middleware
    async def enter(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Stands before the router, as a daemon's does: what is addressed to a sandbox goes to its host."""
        try:
            target = addressed(request.headers, request.host)
        except ValueError as error:
            return number_error(400, str(error))
        envd = request.path.startswith(ENVD_PATHS)
        if target is None and request.path.startswith(ENVD_PATHS[:3]):
            if (sandbox := sandbox_of(request.headers.get("X-Access-Token", ""))) is not None:
                target = sandbox, ENVD
            elif "signature" in request.query:
                return await self._signed(request)
        # Old clients address calls of the control plane, too.
        if target is None or (target[1] == ENVD and not envd):
            return await handler(request)
        try:
            return await self._addressed(request, dashed(target[0]))
        except PagurusError as error:
            abort(request)
            return number_error(502, error.message)

    async def _addressed(self, request: web.Request, id: str) -> web.StreamResponse:
        if id not in self.members.places:
            return gone(id)
        await self.moves.free(id)
        if (there := self.members.places.get(id)) is None:
            return gone(id)
        member = self.members.member(there.host)
        with self.moves.calling(id):
            if request.headers.get("Upgrade", "").lower() == "websocket":
                names = [item.strip() for item in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
                joined = await member.upstream.joined(
                    request.raw_path, None, headers=_headers(request, _SOCKET), protocols=[*filter(None, names)]
                )
                if joined is not None:
                    return await bridge(request, joined, member.upstream)
            return await self._passed(request, member)

    async def _passed(
        self, request: web.Request, member: HostMember, without: Iterable[str] = ()
    ) -> web.StreamResponse:
        """As it came, but for the headers `without`."""
        data = request.content if request.body_exists else None
        async with (
            while_there(request),
            member.upstream.answered(
                request.method, request.raw_path, _headers(request, without), data, None, of_port=True
            ) as result,
        ):
            response = web.StreamResponse(status=result.status, reason=result.reason)
            for name, value in result.headers.items():
                if name.lower() not in _HOP:
                    response.headers.add(name, value)
            await response.prepare(request)
            try:
                async for part in result.content.iter_any():
                    await response.write(part)
            except (aiohttp.ClientError, ConnectionError):
                abort(request)
                return response
            await response.write_eof()
            return response

    async def _signed(self, request: web.Request) -> web.StreamResponse:
        """A signed address that names no sandbox: the host that signed it knows it."""
        data, answer = await raw(request) or None, None
        for member in self.members.living():
            with contextlib.suppress(PagurusError):
                answer = await member.upstream.complete(request.method, request.raw_path, _headers(request), data, None)
                if answer.status not in (401, 403, 502):
                    break
        return number_error(401, "the signature is wrong, or has expired") if answer is None else _response(answer)

    # ----------------------------------------------------------------- by key

    async def _answer_of(self, request: web.Request, member: HostMember, path: str | None = None) -> HostResponse:
        """The answer of a host to the call under way, as its caller."""
        token = await self.callers.token(member)
        headers = _headers(request, {"content-length", "authorization", KEY_HEADER.lower()})
        if token is not None:
            headers[KEY_HEADER] = e2b_spelling(token)
        if self.domain:
            headers["Host"] = self.domain
        data = await raw(request) or None
        async with while_there(request):
            return await member.upstream.complete(request.method, path or request.raw_path, headers, data, token)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        """A new sandbox, on the host that suits it best."""
        target = await body(request, CreateBody)
        requested = await self._placement(target)
        call, hosts = self._call(request), self.members.views()
        order = place.ranked(hosts, requested) or sorted(requested.holders)
        if (existing := self.members.state.calls.get(call or "")) in self.members.hosts:
            order = [existing]
        if not order:
            raise self._nowhere(target.templateID, requested.images, requested)
        answer: HostResponse | None = None
        with self._admitted(None, [Limits()]):
            for name in order[:TRIES]:
                member = self.members.member(name)
                if call is not None:
                    await self.members.state.put_call(call, name)
                with self.members.coming(member):
                    answer = await self._answer_of(request, member)
                if answer.status < 300:
                    self._register(member, [_decoded(answer, MadeSandbox)])
                    await self.members.state.decided("place", {"hosts": hosts, "target": requested}, name)
                if answer.status not in FULL:
                    break
        assert answer is not None
        return _response(answer)

    async def _placement(self, target: CreateBody) -> PlacementRequest:
        """Which hosts can make it: those with the image, or those that hold the snapshot."""
        template = target.templateID.removesuffix(":default")
        labels = target.metadata or {}
        images = {name for host in self.members.views() for name in host.images}
        for name in (target.templateID, template, ALIASES.get(template, "")):
            names = _files(name)
            if not names.isdisjoint(images):
                return PlacementRequest(images=names, labels=labels)
        if (builder := self._builders.get((caller_owner(), _plain(template)))) in self.members.hosts:
            return PlacementRequest(holders=frozenset({str(builder)}), labels=labels)  # not reported yet
        with contextlib.suppress(NotFound):
            holders = await self.members.holders(template, self.callers.token)
            return PlacementRequest(holders=frozenset(holders), labels=labels)
        return PlacementRequest(labels=labels)  # by a name that a host knows, or not: it says so

    def _register(self, member: HostMember, made: list[MadeSandbox]) -> None:
        """Where they are, until the host reports them."""
        for item in made:
            row = HostedSandbox(id=dashed(item.sandboxID), owner=caller_owner(), created_at=time.time())
            self.members.made(member.name, row)

    async def _of_sandbox(self, request: web.Request) -> web.StreamResponse:
        """A call on one sandbox, to the host where it is."""
        existing = find(self.members.places, request.match_info["id"])  # type: ignore[type-var]
        if existing is None:
            raise NotFound(
                f"no such sandbox: {request.match_info['id'][:100]}", hint="`pagurus ls` lists those there are"
            )
        id, rest = existing.row.id, request.match_info.get("rest", "")
        await self.moves.free(id)
        member = self.find(id)[1]
        with self.moves.calling(id):
            if rest == "fork":
                return await self._forked(request, member, id)
            answer = await self._answer_of(request, member)
        if request.method == "DELETE" and not rest and answer.status < 300:
            await self.members.removed(id)
        return _response(answer)

    async def _fork_snapshot(self, request: web.Request) -> web.StreamResponse:
        snapshot = request.match_info["snapshot"].removesuffix(":default")
        holders = await self.members.holders(snapshot, self.callers.token)
        order = place.ranked(self.members.views(), PlacementRequest(holders=frozenset(holders))) or sorted(holders)
        return await self._forked(request, self.members.member(order[0]), holders[order[0]].sandbox)

    async def _forked(self, request: web.Request, member: HostMember, sandbox: str) -> web.StreamResponse:
        target = await body(request, ForkBody)
        existing = self.members.places.get(sandbox)
        limits = Limits(cpus=0.01, memory=1, disk=1) if existing is None else existing.row.limits
        with self._admitted(None, [limits] * max(1, min(target.count, MAX_PAGE))):
            with self.members.coming(member, max(1, target.count)):
                answer = await self._answer_of(request, member)
            if answer.status < 300:
                made = [item.sandbox for item in _decoded(answer, list[MadeFork]) if item.sandbox is not None]
                self._register(member, made)
        return _response(answer)

    # ----------------------------------------------------------------- of all hosts

    def _listed(self, key: str, order: str) -> Handler:
        """What all hosts list, page by page; sorted by the field `order`, the newest first, unless it is empty."""

        async def handle(request: web.Request) -> web.StreamResponse:
            query = request.query
            items = await self._gathered(request, key)
            if order:
                items.sort(key=lambda item: (item[order], item[key]), reverse=query.get("order") != "asc")
            limit = int(text) if (text := query.get("limit", "")).isascii() and text.isdigit() else MAX_PAGE
            limit = max(1, min(limit, MAX_PAGE))
            if (after := query.get("nextToken")) is not None:
                names = [item[key] for item in items]
                items = items[names.index(after) + 1 :] if after in names else []
            more = {"x-next-token": str(items[limit - 1][key])} if len(items) > limit else {}
            return web.Response(body=msgspec.json.encode(items[:limit]), content_type="application/json", headers=more)

        return handle

    async def _gathered(self, request: web.Request, key: str) -> list[dict[str, Any]]:
        """All pages of all hosts, each item once. Raises the first refusal."""

        async def one(member: HostMember) -> list[dict[str, Any]]:
            result: list[dict[str, Any]] = []
            query = {name: value for name, value in request.query.items() if name not in ("limit", "nextToken")}
            while True:
                answer = await self._answer_of(request, member, str(request.rel_url.with_query(query)))
                if answer.status >= 400:
                    raise _Answered(answer)
                page = _decoded(answer, list[dict[str, Any]])
                result += page
                after = {name.lower(): value for name, value in answer.headers.items()}.get("x-next-token")
                if after is None or not page:
                    return result
                query["nextToken"] = after

        lists = await asyncio.gather(*map(one, self.members.living()))
        return list({item[key]: item for items in lists for item in items}.values())

    async def _whoever(self, request: web.Request) -> web.StreamResponse:
        """The answer of the host that knows it: others say 404."""
        living = self.members.living()
        if not living:
            raise self._nowhere("", frozenset(), PlacementRequest())
        answers = [await self._answer_of(request, member) for member in living]
        return _response(min(answers, key=lambda answer: (answer.status >= 400, answer.status == 404)))

    # ----------------------------------------------------------------- templates

    async def _build(self, request: web.Request) -> web.StreamResponse:
        """A build of a template, on the host that has it by now, or on the best one, if possible with a base image."""
        target = await body(request, TemplateBody)
        name = target.name or target.alias or ""
        requests = [PlacementRequest(images=images) for images in (_files(name), _files(ALIASES["base"]), frozenset())]
        orders = (place.ranked(self.members.views(), requested) for requested in requests)
        if not (order := next(filter(None, orders), [])):
            raise self._nowhere(name, frozenset(), PlacementRequest())
        answer = await self._answer_of(request, self.members.member(order[0]))
        if answer.status < 300:
            for made in _decoded(answer, MadeTemplate).names:
                self._builders[caller_owner(), _plain(made)] = order[0]
            for old in [*self._builders][:-MAX_BUILDERS]:
                del self._builders[old]
        return _response(answer)

    def _builder(self, request: web.Request) -> HostMember:
        """The host that builds a template. Raises NotFound."""
        template = request.match_info["template"]
        name = self._builders.get((caller_owner(), _plain(template)))
        if name is None or name not in self.members.hosts:
            raise NotFound(
                f"no host builds {template[:100]!r}",
                hint="build it again: its host or the coordinator is new",
            )
        return self.members.member(name)

    async def _of_build(self, request: web.Request) -> web.StreamResponse:
        return _response(await self._answer_of(request, self._builder(request)))

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        """Whether an archive is there, and an address of ours for it."""
        member = self._builder(request)
        answer = await self._answer_of(request, member)
        if answer.status >= 300:
            return _response(answer)
        reported = _decoded(answer, ArchiveInfo)
        url = URL(reported.url).with_query(host=member.name)
        reported.url = f"{request.scheme}://{request.host}{url.raw_path_qs}"
        return web.Response(body=msgspec.json.encode(reported), status=answer.status, content_type="application/json")

    async def _archive(self, request: web.Request) -> web.StreamResponse:
        """An archive, to the host that signed its address and judges the signature."""
        if (name := request.query.get("host", "")) not in self.members.hosts:
            raise NotFound("no such address", hint="ask for it again")
        return await self._passed(request, self.members.member(name), {"authorization", KEY_HEADER.lower()})


class _Answered(PagurusError):
    """A host's own refusal, to be passed on."""

    def __init__(self, answer: HostResponse) -> None:
        super().__init__("a host refused")
        self.answer = answer


def refusal(error: Exception) -> web.Response:
    """An error in E2B's form."""
    if isinstance(error, _Answered):
        return _response(error.answer)
    if isinstance(error, web.HTTPException):
        return number_error(error.status, error.reason)
    if isinstance(error, PagurusError):
        return number_error(error.status, str(error))
    return number_error(500, "a bug in the coordinator: see its log")


def _plain(template: str) -> str:
    """Its name without a tag: all of its tags are on one host."""
    return template.partition(":")[0]


def _files(name: str) -> frozenset[str]:
    """The names of files that an image of this name may have; none for no name."""
    return frozenset(filter(None, map(filed, (name, f"{name}:latest")))) if name else frozenset()


def _headers(request: web.Request, without: Iterable[str] = ()) -> CIMultiDict[str]:
    """Those that pass. The name of the host does: sandboxes' names of hosts are below it."""
    named = {item.strip().lower() for item in request.headers.get("Connection", "").split(",")}
    dropped = {*_HOP, *named, *without, "expect"}
    return CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() not in dropped)


def _response(answer: HostResponse) -> web.Response:
    dropped = {*_HOP, "content-length", "date", "server"}
    headers = {name: value for name, value in answer.headers.items() if name.lower() not in dropped}
    return web.Response(status=answer.status, headers=headers, body=answer.body)


def _decoded(answer: HostResponse, kind: Any) -> Any:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Protocol(
            f"the host's answer cannot be read: {error}", hint="update hosts and coordinator to the same version"
        ) from error
