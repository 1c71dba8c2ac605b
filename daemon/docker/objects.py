"""Calls of the Engine API about the engine itself, images, networks and volumes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import msgspec
from aiohttp import web

from daemon.docker import bodies, build, shown
from daemon.docker.containers import all_of
from daemon.docker.engine import Engine, tagged
from daemon.docker.paths import ROUTES, Call, json_answer
from sandbox.container import services
from sandbox.errors import Conflict, NotFound
from sandbox.image.store import BUILT
from sandbox.messages import ImageInfo
from sandbox.messages.services import ServiceNetwork, ServiceState
from sandbox.tree import files

API, OLDEST = "1.43", "1.24"


@ROUTES("GET", "/_ping")
@ROUTES("HEAD", "/_ping")
async def _ping(engine: Engine, call: Call) -> web.StreamResponse:
    headers = {"Api-Version": API, "Ostype": "linux", "Builder-Version": "1", "Docker-Experimental": "false"}
    return web.Response(text="" if call.request.method == "HEAD" else "OK", headers=headers)


@ROUTES("GET", "/version")
async def _version(engine: Engine, call: Call) -> web.StreamResponse:
    return json_answer({
        "Platform": {"Name": "Pagurus"}, "Version": "24.0.0", "ApiVersion": API, "MinAPIVersion": OLDEST,
        "Os": "linux", "Arch": "amd64", "KernelVersion": "", "GoVersion": "", "GitCommit": "", "BuildTime": "",
    })  # fmt: skip


@ROUTES("GET", "/info")
async def _info(engine: Engine, call: Call) -> web.StreamResponse:
    states = [info.state for info in all_of(engine)]
    running = sum(state is ServiceState.RUNNING for state in states)
    return json_answer({
        "ID": engine.live.row.id, "Name": engine.live.row.hostname, "Containers": len(states),
        "ContainersRunning": running, "ContainersPaused": 0, "ContainersStopped": len(states) - running,
        "Images": len(engine.host.images.list()), "Driver": "overlay2", "OSType": "linux", "Architecture": "x86_64",
        "OperatingSystem": "Pagurus sandbox", "ServerVersion": "24.0.0", "NCPU": 1, "MemTotal": 0,
        "Plugins": {"Volume": ["local"], "Network": ["bridge"], "Authorization": None, "Log": ["json-file"]},
        "Swarm": {"LocalNodeState": "inactive"}, "SecurityOptions": [], "Labels": [], "IndexServerAddress": "",
    })  # fmt: skip


# --------------------------------------------------------------------------- images


def _listed(engine: Engine) -> list[ImageInfo]:
    """Those of the host, and those that were built here by the names that they have here. Blocks."""
    images, built = engine.host.images, engine.composition.images
    result = [images.info(name) for name in images.list() if not name.startswith(BUILT)]
    for tag, name in built.items():
        with contextlib.suppress(NotFound):
            result.append(msgspec.structs.replace(images.info(name), name=tag))
    return result


@ROUTES("GET", "/images/json")
async def _images(engine: Engine, call: Call) -> web.StreamResponse:
    matches = [shown.image(info) for info in await asyncio.to_thread(_listed, engine)]
    requested = call.filters.get("reference", [])
    if requested:
        matches = [one for one in matches if {*one["RepoTags"], one["RepoTags"][0].rpartition(":")[0]} & set(requested)]
    return json_answer(matches)


@ROUTES("GET", "/images/{name}/json")
async def _image(engine: Engine, call: Call) -> web.StreamResponse:
    return json_answer(shown.image_inspected(await asyncio.to_thread(_lookup, engine, call.id)))


def _lookup(engine: Engine, said: str) -> ImageInfo:
    """An image by its name or the beginning of its id. Raises NotFound. Blocks."""
    digest = said.removeprefix("sha256:")
    with contextlib.suppress(NotFound):
        digest = engine.image(said).digest
    for info in _listed(engine):
        if info.digest.startswith(digest) and len(digest) >= 3:
            return info
    raise NotFound(f"No such image: {said[:200]}", hint="docker images lists those of this host")


@ROUTES("DELETE", "/images/{name}")
async def _image_remove(engine: Engine, call: Call) -> web.StreamResponse:
    tag = tagged(call.id)
    if tag not in engine.composition.images:
        await asyncio.to_thread(_lookup, engine, call.id)
        raise Conflict(f"{call.id[:200]} belongs to the host", hint="leave it; what was built here can be removed")
    await engine.live.added.change_images(remove=tag)
    await engine.builds.sweep()
    return json_answer([{"Untagged": tag}])


@ROUTES("POST", "/build")
async def _build(engine: Engine, call: Call) -> web.StreamResponse:
    return await build.answer(engine, call)


@ROUTES("POST", "/images/{name}/tag")
async def _tag(engine: Engine, call: Call) -> web.StreamResponse:
    info = await asyncio.to_thread(_lookup, engine, call.id)
    name = engine.composition.images.get(info.name, info.name)
    other = f"{call.query.get('repo', '')}:{call.query.get('tag', '') or 'latest'}"
    await engine.live.added.change_images(add={tagged(other): name})
    return web.Response(status=201)


@ROUTES("POST", "/images/create")
async def _pull(engine: Engine, call: Call) -> web.StreamResponse:
    """Nothing is fetched: an image is on this host, or it is not."""
    name, tag = call.query.get("fromImage", ""), call.query.get("tag", "")
    reference = name if not tag else f"{name}@{tag}" if ":" in tag else f"{name}:{tag}"
    try:
        await asyncio.to_thread(engine.image, reference)
    except NotFound:
        raise NotFound(
            f"pull access denied for {name}, repository does not exist on this host, whose images sandboxes use",
            hint="the host's operator gets it with `pagurus image pull`",
        ) from None
    return json_answer({"status": f"{reference}: on this host"})


# --------------------------------------------------------------------------- networks and volumes


@ROUTES("GET", "/networks")
async def _networks(engine: Engine, call: Call) -> web.StreamResponse:
    names = dict.fromkeys([bodies.BRIDGE, *engine.composition.networks])
    requested = call.filters.get("name", [])
    return json_answer(
        [
            shown.network(engine.composition, name)
            for name in names
            if not requested or any(said in name for said in requested)
        ]
    )


@ROUTES("GET", "/networks/{id}")
async def _network(engine: Engine, call: Call) -> web.StreamResponse:
    return json_answer(shown.network(engine.composition, engine.network(call.id)))


@ROUTES("POST", "/networks/create")
async def _network_create(engine: Engine, call: Call) -> web.StreamResponse:
    body = await call.body(bodies.NetworkBody)
    if body.name in (bodies.BRIDGE, *engine.composition.networks):
        raise Conflict(f"network with name {body.name} already exists", hint="use it")
    await engine.live.added.change_networks(
        add={body.name: ServiceNetwork(internal=body.internal, labels=body.labels or {})}
    )
    return json_answer({"Id": shown.network_id(body.name), "Warning": ""}, status=201)


@ROUTES("DELETE", "/networks/{id}")
async def _network_remove(engine: Engine, call: Call) -> web.StreamResponse:
    name = engine.network(call.id)
    if any(name in one.networks for one in engine.composition.services.values()) or name == bodies.BRIDGE:
        raise Conflict(f"network {name} has active endpoints", hint="remove its containers first")
    await engine.live.added.change_networks(remove=name)
    return web.Response(status=204)


@ROUTES("POST", "/networks/{id}/connect")
async def _connect(engine: Engine, call: Call) -> web.StreamResponse:
    network, body = engine.network(call.id), await call.body(bodies.ConnectBody)
    aliases = (body.endpoint_config or bodies.EndpointBody()).aliases or []
    await engine.change_network(engine.name(body.container), network, aliases=aliases)
    return web.Response(status=200)


@ROUTES("POST", "/networks/{id}/disconnect")
async def _disconnect(engine: Engine, call: Call) -> web.StreamResponse:
    network, body = engine.network(call.id), await call.body(bodies.ConnectBody)
    await engine.change_network(engine.name(body.container), network, aliases=None)
    return web.Response(status=200)


def _volume_names(engine: Engine) -> list[str]:
    with contextlib.suppress(NotFound):
        return [
            entry.name
            for entry in files.entries(engine.live.container.inside, engine.live.row.uid_base, services.VOLUMES)
            if entry.kind == "directory"
        ]
    return []


@ROUTES("GET", "/volumes")
async def _volumes(engine: Engine, call: Call) -> web.StreamResponse:
    names = await asyncio.to_thread(_volume_names, engine)
    requested = call.filters.get("name", [])
    matches = [
        shown.volume(engine.composition, name)
        for name in names
        if not requested or any(said in name for said in requested)
    ]
    return json_answer({"Volumes": matches, "Warnings": None})


@ROUTES("GET", "/volumes/{id}")
async def _volume(engine: Engine, call: Call) -> web.StreamResponse:
    if call.id not in await asyncio.to_thread(_volume_names, engine):
        raise NotFound(f"get {call.id[:80]}: no such volume", hint="docker volume ls lists them")
    return json_answer(shown.volume(engine.composition, call.id))


@ROUTES("POST", "/volumes/create")
async def _volume_create(engine: Engine, call: Call) -> web.StreamResponse:
    body = await call.body(bodies.VolumeBody)
    name = body.name or secrets.token_hex(16)
    await engine.live.added.make_volume(name, body.labels or {})
    return json_answer(shown.volume(engine.composition, name), status=201)


@ROUTES("DELETE", "/volumes/{id}")
async def _volume_remove(engine: Engine, call: Call) -> web.StreamResponse:
    if call.id not in await asyncio.to_thread(_volume_names, engine):
        raise NotFound(f"get {call.id[:80]}: no such volume", hint="docker volume ls lists them")
    users = [name for name, one in engine.composition.services.items() if any(v.name == call.id for v in one.volumes)]
    if users:
        raise Conflict(f"remove {call.id}: volume is in use by {', '.join(users)}", hint="remove these first")
    await engine.live.added.remove_volume(call.id)
    return web.Response(status=204)
