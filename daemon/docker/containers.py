"""Calls of the Engine API about containers, and about commands in them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from daemon.docker import bodies, options, shown
from daemon.docker.engine import Engine, PreparedExec
from daemon.docker.follow import attach, run_exec, write_logs
from daemon.docker.paths import ROUTES, Call, json_answer
from daemon.host import compositions
from sandbox.container import rooted, services
from sandbox.container.process import exit_code
from sandbox.errors import CommandNotFound, Conflict, Invalid, NotFound, PagurusError, Unsupported
from sandbox.image.stages import fits, platform_name
from sandbox.image.store import StoredImage
from sandbox.messages import Service, ServiceInfo, StopRequest
from sandbox.messages.services import ServiceState

MAX_CELLS = 10_000  # rows, or columns, of a terminal
DELIVERY_TIMEOUT = 10.0  # seconds, of the outputs of a container that is removed
MAX_WAIT = 600.0  # seconds for a command whose client has lost its connection, and asks how it ended


def all_of(engine: Engine) -> list[ServiceInfo]:
    return [engine.live.composed.info(name) for name in engine.composition.services]


def listed(engine: Engine) -> list[dict[str, Any]]:
    """All, as clients are shown them."""
    born = engine.live.row.created_at
    return [shown.listed(engine.composition, info, time.time(), born) for info in all_of(engine)]


@ROUTES("GET", "/containers/json")
async def _list(engine: Engine, call: Call) -> web.StreamResponse:
    matches = listed(engine)
    if not call.flag("all") and not any(key in call.filters for key in ("status", "id")):
        matches = [one for one in matches if one["State"] in ("running", "restarting")]
    matches = [one for one in matches if _fits(one, call.filters)]
    matches.sort(key=lambda one: -one["Created"])
    limit = int(call.seconds("limit") or 0)
    return json_answer(matches[:limit] if limit > 0 else matches)


def _fits(one: dict[str, Any], filters: dict[str, list[str]]) -> bool:
    """Whether a listed container fits the filters of a request."""
    labels = [f"{key}={value}" for key, value in one["Labels"].items()] + list(one["Labels"])
    tests: dict[str, Callable[[str], bool]] = {
        "name": lambda said: any(said.strip("^/$") in name for name in one["Names"]),
        "id": lambda said: one["Id"].startswith(said),
        "label": lambda said: said in labels,
        "status": lambda said: one["State"] == said,
        "ancestor": lambda said: said in (one["Image"], one["Image"].partition(":")[0], one["ImageID"]),
        "network": lambda said: said in one["NetworkSettings"]["Networks"],
        "volume": lambda said: any(said in (m.get("Name"), m["Destination"]) for m in one["Mounts"]),
    }
    for key, values in filters.items():
        if key == "label":
            if not all(tests["label"](said) for said in values):
                return False
        elif key in tests and not any(tests[key](said) for said in values):
            return False
    return True


@ROUTES("POST", "/containers/create")
async def _create(engine: Engine, call: Call) -> web.StreamResponse:
    body = await call.body(bodies.ContainerBody)
    name = call.query.get("name", "").removeprefix("/") or f"c-{secrets.token_hex(4)}"
    if name in engine.composition.services:
        raise Conflict(f'The container name "/{name}" is already in use', hint="remove it, or choose another one")
    image = await asyncio.to_thread(engine.image, body.image)
    try:
        made = _made(engine, name, body, image, call.query.get("platform", ""))
        await engine.make_directories(bodies.created_sources(body))
        await engine.live.added.add(name, made, image)
    except NotFound as error:  # a client would take it for the image, and pull that
        raise Invalid(error.message, hint=error.hint) from None
    said = options.warnings(body, body.host_config or bodies.HostConfig())
    return json_answer({"Id": made.container, "Warnings": said}, status=201)


def _made(engine: Engine, name: str, body: bodies.ContainerBody, image: StoredImage, platform: str) -> Service:
    """The service that a container is to be. Raises Invalid, NotFound, Unsupported."""
    if platform and not fits(platform):
        raise Unsupported(f"--platform {platform[:40]}: sandboxes here are of {platform_name()}", hint="leave it out")
    body.exposed_ports = {**dict.fromkeys(image.config.exposed_ports), **(body.exposed_ports or {})}
    taken = [port.published for one in engine.composition.services.values() for port in (*one.ports, *one.claimed)]
    requested = engine.connected(bodies.service(body, name, taken))
    compositions.need_values(name, requested)
    for network in requested.networks:
        if network not in (bodies.BRIDGE, bodies.none_of(name), *engine.composition.networks):
            raise NotFound(f"network {network} not found", hint="docker network create")
    made = compositions.completed(name, requested, image)
    return msgspec.structs.replace(made, container=secrets.token_hex(32), created_at=time.time())


@ROUTES("GET", "/containers/{id}/json")
async def _inspect(engine: Engine, call: Call) -> web.StreamResponse:
    name = engine.name(call.id)
    return json_answer(shown.inspected(engine.composition, engine.live.composed.info(name), engine.live.row.created_at))


@ROUTES("POST", "/containers/{id}/start")
async def _start(engine: Engine, call: Call) -> web.StreamResponse:
    name = engine.name(call.id)
    if engine.live.composed.info(name).state is ServiceState.RUNNING:
        return web.Response(status=304)
    await engine.live.added.claim_ports(name)
    try:
        await engine.live.composed.start(name)
    except PagurusError as error:
        said = engine.composition.services[name]
        if said.remove_at_end:
            await engine.live.added.remove(name)
        if isinstance(error, CommandNotFound):  # by these words clients know it
            program = [*(said.entrypoint or []), *(said.command or [])][0]
            raise Invalid(f'exec: "{program}": executable file not found in $PATH', hint="name another one") from None
        raise
    return web.Response(status=204)


@ROUTES("POST", "/containers/{id}/stop")
async def _stop(engine: Engine, call: Call) -> web.StreamResponse:
    name = engine.name(call.id)
    running = engine.live.composed.info(name).state in (ServiceState.RUNNING, ServiceState.RESTARTING)
    with contextlib.suppress(NotFound):  # it is one that is removed when it ends
        await engine.live.composed.stop(name, StopRequest(timeout=call.seconds("t")))
    return web.Response(status=204 if running else 304)


@ROUTES("POST", "/containers/{id}/restart")
async def _restart(engine: Engine, call: Call) -> web.StreamResponse:
    name = engine.name(call.id)
    await engine.live.composed.stop(name, StopRequest(timeout=call.seconds("t")))
    await engine.live.added.claim_ports(name)
    await engine.live.composed.start(name)
    return web.Response(status=204)


@ROUTES("POST", "/containers/{id}/kill")
async def _kill(engine: Engine, call: Call) -> web.StreamResponse:
    name = engine.name(call.id)
    row = engine.live.composed.row(name)
    if row is None or row.exit_status is not None:
        raise Conflict(f"Container {name} is not running", hint="start it")
    number = bodies.signal_number(call.query.get("signal", "") or "KILL")
    await engine.live.programs.signal(row.id, number, group=False)
    return web.Response(status=204)


@ROUTES("POST", "/containers/{id}/rename")
async def _rename(engine: Engine, call: Call) -> web.StreamResponse:
    other = call.query.get("name", "").removeprefix("/")
    await engine.live.added.rename(engine.name(call.id), other)
    return web.Response(status=204)


@ROUTES("POST", "/containers/{id}/wait")
async def _wait(engine: Engine, call: Call) -> web.StreamResponse:
    """The status line comes at once: clients wait for that before they start the container."""
    name, condition = engine.name(call.id), call.query.get("condition", "not-running")
    composed, number = engine.live.composed, engine.composition.services[engine.name(call.id)].container
    first = composed.row(name)
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(call.request)

    def existing() -> bool:
        said = engine.composition.services.get(name)
        return said is not None and said.container == number

    code = 0
    while existing():
        row = composed.row(name)
        if row is not None and row.exit_status is not None:
            code = exit_code(row.exit_status)
            later = condition == "not-running" or first is None or row.id != first.id or first.exit_status is None
            if later and condition != "removed":
                break
        elif row is None and condition == "not-running":
            break
        await composed.changed()
    await response.write(json.dumps({"StatusCode": code}).encode())
    await response.write_eof()
    return response


@ROUTES("DELETE", "/containers/{id}")
async def _remove(engine: Engine, call: Call) -> web.StreamResponse:
    name = engine.name(call.id)
    running = engine.live.composed.info(name).state in (ServiceState.RUNNING, ServiceState.RESTARTING)
    if running and not call.flag("force"):
        raise Conflict(f"cannot remove container {name}: it is running", hint="stop it, or use --force")
    row = engine.live.composed.row(name)
    if row is not None and row.exit_status is not None:  # who reads its logs gets all of them
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DELIVERY_TIMEOUT):
                await engine.live.added.delivered(name, row.id)
    await engine.live.added.remove(name)
    return web.Response(status=204)


@ROUTES("POST", "/containers/prune")
async def _prune(engine: Engine, call: Call) -> web.StreamResponse:
    over = [info.name for info in all_of(engine) if info.state in (ServiceState.EXITED, ServiceState.CREATED)]
    gone = []
    for name in over:
        said = engine.composition.services[name]
        if said.container:
            await engine.live.added.remove(name)
            gone.append(said.container)
    return json_answer({"ContainersDeleted": gone, "SpaceReclaimed": 0})


@ROUTES("POST", "/containers/{id}/resize")
async def _resize(engine: Engine, call: Call) -> web.StreamResponse:
    row = engine.live.composed.row(engine.name(call.id))
    return await _resized(engine, "" if row is None else row.id, call)


@ROUTES("POST", "/exec/{id}/resize")
async def _exec_resize(engine: Engine, call: Call) -> web.StreamResponse:
    return await _resized(engine, engine.prepared(call.id).program, call)


async def _resized(engine: Engine, program: str, call: Call) -> web.StreamResponse:
    rows, columns = (min(int(call.seconds(name) or 0), MAX_CELLS) for name in ("h", "w"))
    if program and rows and columns:
        with contextlib.suppress(PagurusError):  # it has ended
            await (await engine.live.programs.supervisor(program)).resize(rows, columns)
    return web.Response(status=200)


@ROUTES("GET", "/containers/{id}/logs")
async def _logs(engine: Engine, call: Call) -> web.StreamResponse:
    return await write_logs(engine.live, engine.name(call.id), call)


@ROUTES("POST", "/containers/{id}/attach")
async def _attach(engine: Engine, call: Call) -> web.StreamResponse:
    return await attach(engine.live, engine.name(call.id), call)


@ROUTES("GET", "/containers/{id}/top")
async def _top(engine: Engine, call: Call) -> web.StreamResponse:
    """What its own ps says of its processes."""
    name = engine.name(call.id)
    if engine.live.composed.info(name).state is not ServiceState.RUNNING:
        raise Conflict(f"container {name} is not running", hint="start it")
    argv = ["/bin/ps", *(call.query.get("ps_args", "") or "-ef").split()]
    own = await asyncio.to_thread(rooted.inner_pids, engine.live.container.tasks(), name)
    done = await engine.live.container.exec(argv, root=services.root(name))
    if done.exit_code:
        raise Conflict(done.stderr.decode("utf-8", "replace")[:500] or "ps failed", hint="the container needs ps")
    lines = [line.split() for line in done.stdout.decode("utf-8", "replace").splitlines()]
    titles = lines[0] if lines else []
    if "PID" not in titles:
        raise Invalid("ps does not say the PID of each process", hint="such as `docker top NAME -eo pid,args`")
    column = titles.index("PID")
    rows = [[*line[: len(titles) - 1], " ".join(line[len(titles) - 1 :])] for line in lines[1:] if len(line) > column]
    return json_answer({"Titles": titles, "Processes": [row for row in rows if row[column] in own]})


# --------------------------------------------------------------------------- commands in them


@ROUTES("POST", "/containers/{id}/exec")
async def _exec(engine: Engine, call: Call) -> web.StreamResponse:
    name, body = engine.name(call.id), await call.body(bodies.ExecBody)
    if engine.live.composed.info(name).state is not ServiceState.RUNNING:
        raise Conflict(f"container {name} is not running", hint="start it")
    if body.privileged:
        raise Unsupported("a command in a container has no --privileged", hint="leave it out")
    prepared = PreparedExec(name, body)
    engine.remember(prepared)
    return json_answer({"Id": prepared.number}, status=201)


@ROUTES("POST", "/exec/{id}/start")
async def _exec_start(engine: Engine, call: Call) -> web.StreamResponse:
    prepared = engine.prepared(call.id)
    body = await call.body(bodies.ExecStartBody)
    if prepared.program:
        raise Conflict("it has been started already", hint="make another one")
    return await run_exec(engine.live, prepared, call, detach=body.detach)


@ROUTES("GET", "/exec/{id}/json")
async def _exec_inspect(engine: Engine, call: Call) -> web.StreamResponse:
    prepared = engine.prepared(call.id)
    if prepared.attached and prepared.finishing is not None:  # its client was cut off, by a restore, and goes by this
        await asyncio.wait({prepared.finishing}, timeout=MAX_WAIT)
    argv = bodies.words(prepared.body.cmd) or []
    said = engine.composition.services.get(prepared.container)
    return json_answer({
        "ID": prepared.number, "Running": prepared.exit_code is None, "ExitCode": prepared.exit_code, "Pid": 0,
        "ContainerID": "" if said is None else shown.identity(prepared.container, said), "OpenStdin": False,
        "OpenStdout": True, "OpenStderr": True, "CanRemove": False,
        "ProcessConfig": {"entrypoint": argv[0] if argv else "", "arguments": argv[1:], "tty": prepared.body.tty},
    })  # fmt: skip
