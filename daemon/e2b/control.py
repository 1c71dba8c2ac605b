"""E2B's control plane: sandboxes are made, found, paused, resumed, forked and ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from urllib.parse import unquote, unquote_plus

from aiohttp import web

from daemon.auth.access import CALLER
from daemon.catalogue import put_sandbox
from daemon.e2b import bodies, template_routes
from daemon.e2b.bodies import ConnectBody, CreateBody, ForkBody, NetworkBody, PauseBody, SnapshotBody, TimeoutBody
from daemon.e2b.keys import Keys
from daemon.e2b.prepare import made, retain
from daemon.e2b.route import ALIASES, RouteTable, json_answer
from daemon.e2b.templates import TEMPLATES
from daemon.host.expiry_watch import move_end
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.container import usage
from sandbox.errors import Conflict, ImageNotFound, Invalid, NotFound, Unsupported, from_body
from sandbox.image.store import StoredImage
from sandbox.messages import (
    AtEnd,
    ForkEntry,
    ForkRequest,
    RestoreRequest,
    SandboxState,
)

KEYS: web.AppKey[Keys] = web.AppKey("e2b keys", Keys)
DOMAIN: web.AppKey[str] = web.AppKey("e2b domain", str)
TIMEOUT = 300  # seconds that a sandbox has where its creator says nothing
FORK_TIMEOUT = 15
MAX_PAGE = 100
AT = RouteTable()
ROUTES = AT.routes


def _done() -> web.Response:
    return web.Response(status=204)


def _sandbox(request: web.Request, live: LiveSandbox) -> dict[str, object]:
    keys, caller = request.app[KEYS], CALLER.get()
    token, traffic = keys.token(live.row.id, caller), keys.traffic_token(live.row.id, caller)
    domain = request.app[DOMAIN] or request.host
    return bodies.sandbox(live.row, token=token, traffic=traffic, domain=domain)


# --------------------------------------------------------------------------- made and found


@AT("POST", "/sandboxes", "/v2/sandboxes", scope="exec", keyed="redo")
async def _create(request: web.Request, host: Host, body: CreateBody) -> web.Response:
    """Make a sandbox from a template: an image, a checkpoint, or what a template's command has started."""
    bodies.refuse(body)
    bodies.network(body.network, body.allow_internet_access)  # refused before anything is made
    with contextlib.suppress(NotFound):
        origin = host.checkpoint(body.templateID.removesuffix(":default"))
        return json_answer(_sandbox(request, await _continued(host, origin.id, body)), 201)
    name, image = await asyncio.to_thread(_image, host, request.app[ALIASES], body.templateID)
    if (started := await request.app[TEMPLATES].started(name, image)) is not None:
        return json_answer(_sandbox(request, await _continued(host, started, body)), 201)
    live = await made(
        host,
        name,
        image,
        labels=bodies.labels(body),
        env=body.envVars,
        network=bodies.network(body.network, body.allow_internet_access),
        lifetime=_lifetime(body),
        at_end=_at_end(body),
    )
    return json_answer(_sandbox(request, live), 201)


async def _continued(host: Host, checkpoint: str, body: CreateBody) -> LiveSandbox:
    """A sandbox that continues from a checkpoint."""
    [entry] = await host.fork(checkpoint, ForkRequest(count=1, labels=bodies.labels(body)))
    live = _forked(host, entry)
    live.row.env = {**live.row.env, **body.envVars}
    live.row.at_end = _at_end(body)
    await move_end(host, live, _lifetime(body))
    if body.network is not None or body.allow_internet_access is not None:
        await host.set_network(live.row.id, bodies.network(body.network, body.allow_internet_access))
    return live


def _lifetime(body: CreateBody) -> float:
    return float(TIMEOUT if body.timeout is None else body.timeout)


def _at_end(body: CreateBody) -> AtEnd:
    return AtEnd.STOP if body.pauses else AtEnd.REMOVE


def _image(host: Host, aliases: dict[str, str], template: str) -> tuple[str, StoredImage]:
    """The image that a template's name means, and its own name. Blocks."""
    plain = template.removesuffix(":default")
    for name in (template, plain, aliases.get(plain, "")):
        if name:
            with contextlib.suppress(ImageNotFound, Invalid):
                return name, host.images.resolve(name)
    existing = ", ".join(sorted(aliases))
    raise NotFound(
        f"template '{plain[:100]}' not found: no image, checkpoint or alias ({existing}) is named so",
        hint="see `pagurus image ls`",
    )


def _forked(host: Host, entry: ForkEntry) -> LiveSandbox:
    if entry.sandbox is None:
        assert entry.error is not None
        raise from_body(entry.error)
    return host.live(entry.sandbox.id)


@AT("GET", "/sandboxes", "/v2/sandboxes")
async def _list(request: web.Request, host: Host) -> web.Response:
    """The sandboxes of the caller, the newest first, page by page."""
    query = request.query
    target = _metadata(query.get("metadata", ""))
    states = {item for value in query.getall("state", []) for item in value.split(",") if item}
    rows = [host.live(info.id).row for info in host.sandboxes()]
    rows = [row for row in rows if not target.items() - bodies.metadata(row).items()]
    rows = [row for row in rows if not states or bodies.state(row) in states]
    rows.sort(key=lambda row: (row.created_at, row.id), reverse=query.get("order") != "asc")
    limit, after = _limit(query.get("limit")), query.get("nextToken")
    if after:
        ids = [row.id for row in rows]
        rows = rows[ids.index(after) + 1 :] if after in ids else []
    more = {"x-next-token": rows[limit - 1].id} if len(rows) > limit else {}
    return json_answer([bodies.listed(row) for row in rows[:limit]], 200, **more)


def _limit(text: str | None) -> int:
    if text is None:
        return MAX_PAGE
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6] or 0) <= MAX_PAGE):
        raise Invalid(f"limit lies between 1 and {MAX_PAGE}")
    return int(text)


def _metadata(text: str) -> dict[str, str]:
    """Pairs that are quoted once more than a form is.

    >>> _metadata("a=b%2520c&d=e")
    {'a': 'b c', 'd': 'e'}
    """
    pairs = (item.partition("=") for item in text.split("&") if item)
    return {unquote(unquote_plus(name)): unquote(unquote_plus(value)) for name, _, value in pairs}


@AT("GET", "/sandboxes/{id}")
async def _info(request: web.Request, live: LiveSandbox) -> web.Response:
    """One sandbox."""
    return json_answer({**bodies.listed(live.row), **_sandbox(request, live)})


@AT("DELETE", "/sandboxes/{id}", scope="exec")
async def _kill(host: Host, live: LiveSandbox) -> web.Response:
    """Remove a sandbox."""
    await host.remove(live.row.id)
    return _done()


# --------------------------------------------------------------------------- its time


@AT("POST", "/sandboxes/{id}/timeout", scope="exec")
async def _timeout(host: Host, live: LiveSandbox, body: TimeoutBody) -> web.Response:
    """Its end is so many seconds from now."""
    await move_end(host, live, float(body.timeout))
    return _done()


@AT("POST", "/sandboxes/{id}/refreshes", scope="exec")
async def _refresh(host: Host, live: LiveSandbox, body: bodies.RefreshBody) -> web.Response:
    """Its end is at least so many seconds from now."""
    await _at_minimum(host, live, float(body.duration))
    return _done()


async def _at_minimum(host: Host, live: LiveSandbox, seconds: float) -> None:
    row = live.row
    if row.lifetime is not None and time.time() + seconds > row.created_at + row.lifetime:
        await move_end(host, live, seconds)


@AT("POST", "/sandboxes/{id}/pause", scope="exec")
async def _pause(host: Host, live: LiveSandbox, body: PauseBody) -> web.Response:
    """A last checkpoint, then its processes are killed; connecting to it brings them back."""
    if live.row.state is SandboxState.DEAD:
        raise Conflict("it is paused already", sandbox=live.row.id, hint="connect to it first")
    if body.memory is False:
        raise Unsupported("a pause without memory", hint="pause it with its processes")
    inflight = await live.checkpoint("paused")
    await inflight.finalized(durable=True)
    if (trouble := inflight.trouble(durable=True)) is not None:
        raise trouble
    await move_end(host, live, None)  # its time is stopped
    await host.kill(live.row.id)
    return _done()


@AT("POST", "/sandboxes/{id}/connect", "/v2/sandboxes/{id}/connect", "/sandboxes/{id}/resume", scope="exec")
async def _connect(request: web.Request, host: Host, live: LiveSandbox, body: ConnectBody) -> web.Response:
    """Use a sandbox that exists; one that is paused or dead is restored from its last checkpoint."""
    seconds, dead = float(TIMEOUT if body.timeout is None else body.timeout), live.row.state is SandboxState.DEAD
    if dead and body.memory is False:
        raise Unsupported("a resume without memory", hint="resume it with its processes")
    if dead:
        await host.restore(live.row.id, RestoreRequest())
        await move_end(host, live, seconds)
    else:
        live.need_alive()
        await _at_minimum(host, live, seconds)
    return json_answer(_sandbox(request, live), 201 if dead or request.path.endswith("/resume") else 200)


# --------------------------------------------------------------------------- states


@AT("POST", "/sandboxes/{id}/fork", scope="exec", keyed="redo")
async def _fork(request: web.Request, host: Host, live: LiveSandbox, body: ForkBody) -> web.Response:
    """Sandboxes that continue from this one, paused or not."""
    return await _children(request, host, live.row.head if live.row.state is SandboxState.DEAD else live, body)


@AT("POST", "/snapshots/{snapshot}/fork", scope="exec", keyed="redo")
async def _fork_snapshot(request: web.Request, host: Host, snapshot: str, body: ForkBody) -> web.Response:
    """Sandboxes that continue from a snapshot."""
    return await _children(request, host, host.checkpoint(snapshot.removesuffix(":default")).id, body)


async def _children(request: web.Request, host: Host, origin: LiveSandbox | str, body: ForkBody) -> web.Response:
    target = ForkRequest(count=body.count)
    if isinstance(origin, str):
        entries = await host.fork(origin, target)
    else:
        entries = await host.fork_sandbox(origin.row.id, target)
    answers: list[dict[str, object]] = []
    for entry in entries:
        if entry.sandbox is None:
            assert entry.error is not None
            error = from_body(entry.error)
            answers.append({"error": {"code": error.status, "message": str(error)}})
            continue
        child = host.live(entry.sandbox.id)
        await move_end(host, child, float(FORK_TIMEOUT if body.timeout is None else body.timeout))
        answers.append({"sandbox": _sandbox(request, child)})
    return json_answer(answers, 201)


@AT("POST", "/sandboxes/{id}/snapshots", scope="exec")
async def _snapshot(host: Host, live: LiveSandbox, body: SnapshotBody) -> web.Response:
    """A checkpoint that outlives its sandbox, and is a template for others."""
    if body.memory is False:
        raise Unsupported("a snapshot without memory", hint="take one with the processes")
    if live.row.state is SandboxState.DEAD:
        row = host.checkpoint(live.row.head)
    else:
        inflight = await live.checkpoint(body.name or "snapshot")
        await inflight.finalized(durable=True)
        if (trouble := inflight.trouble(durable=True)) is not None:
            raise trouble
        row = inflight.row
    await retain(host, live, row)
    return json_answer(bodies.snapshot(row), 201)


@AT("GET", "/snapshots")
async def _snapshots(request: web.Request, host: Host) -> web.Response:
    """The snapshots of the caller, the newest first."""
    query, limit = request.query, _limit(request.query.get("limit"))
    sandbox = query.get("sandboxID")
    rows = [row for row in bodies.snapshots(host.services.checkpoints.values())]
    rows = [row for row in rows if not sandbox or bodies.spelled(row.sandbox) == bodies.spelled(sandbox)]
    rows = [row for row in rows if query.get("name", row.label) == row.label]
    rows.sort(key=lambda row: row.number, reverse=True)
    if after := query.get("nextToken"):
        ids = [row.id for row in rows]
        rows = rows[ids.index(after) + 1 :] if after in ids else []
    more = {"x-next-token": rows[limit - 1].id} if len(rows) > limit else {}
    return json_answer([bodies.snapshot(row) for row in rows[:limit]], 200, **more)


@AT("DELETE", "/templates/{snapshot}", scope="exec")
async def _delete_snapshot(request: web.Request, host: Host, snapshot: str) -> web.Response:
    """Remove a snapshot, or a template with its tags."""
    name = unquote(snapshot).removesuffix(":default")
    try:
        row = host.checkpoint(name)
    except NotFound:
        await template_routes.remove(request, host, name)
        return _done()
    if row.template is None:
        raise NotFound(f"no such snapshot: {snapshot[:100]}", hint="`pagurus tree` lists the checkpoints of a sandbox")
    row.template = None
    await host.collector.label(row, None)  # from now on it is a checkpoint like others
    with contextlib.suppress(Conflict):  # a sandbox is based on it
        await host.collector.remove(row)
    return _done()


# --------------------------------------------------------------------------- what it may and uses


@AT("PUT", "/sandboxes/{id}/network", scope="exec")
async def _set_network(host: Host, live: LiveSandbox, body: NetworkBody) -> web.Response:
    """What it may reach, in place of what it was."""
    await host.set_network(live.row.id, bodies.network(body, body.allow_internet_access))
    if (public := body.allowPublicTraffic) is not None:
        live.row.labels = bodies.with_public(live.row.labels, public)
        await host.services.catalogue.write([put_sandbox(live.row)])
    return _done()


@AT("GET", "/sandboxes/{id}/metrics")
async def _metrics(live: LiveSandbox) -> web.Response:
    """What it uses now."""
    if live.row.state is SandboxState.DEAD:
        return json_answer([])
    return json_answer([await _measured(live)])


async def _measured(live: LiveSandbox) -> dict[str, object]:
    live.need_alive()
    before = await asyncio.to_thread(usage.read, live.container)
    began = time.monotonic()
    await asyncio.sleep(bodies.SAMPLE)
    after = await asyncio.to_thread(usage.read, live.container)
    used = (after.cpu_seconds - before.cpu_seconds) / (time.monotonic() - began)
    return bodies.metrics(live.row, after, used)


@AT("GET", "/v2/sandboxes/{id}/logs", "/sandboxes/{id}/logs")
async def _logs(live: LiveSandbox) -> web.Response:
    """None are kept: see what its processes print by connecting to them."""
    return json_answer({"logs": [], "logEntries": []})


@AT("*", "/{area:templates|v2/templates|v3/templates|volumes|secrets|events|nodes|admin}{rest:.*}")
async def _not_served(area: str) -> web.Response:
    """What is not served here, by name."""
    raise Unsupported(f"/{area} is not served here", hint=_INSTEAD.get(area, "see docs/integrations.md"))


_INSTEAD = {
    "volumes": "files stay in checkpoints: take a snapshot, or fork; `pagurus run --mount` mounts directories",
    "secrets": "give envs at the creation; keys of models stay outside by the gateway",
}
