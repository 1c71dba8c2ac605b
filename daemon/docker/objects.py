"""Calls of the Engine API about the engine itself, images, networks and volumes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import secrets

from aiohttp import web

from daemon.docker import bodies, build, options, shown
from daemon.docker.containers import all_of, listed
from daemon.docker.engine import Engine, tagged
from daemon.docker.paths import ROUTES, Call, json_answer
from daemon.docker.refused import NO_BUILDKIT
from sandbox.container import services
from sandbox.container.cgroup import parse_bytes
from sandbox.errors import Conflict, NotFound, Unsupported
from sandbox.messages.services import ServiceNetwork, ServiceState
from sandbox.tree import files

API, OLDEST = "1.43", "1.24"
ANONYMOUS = "com.docker.volume.anonymous"  # the label of a volume without a name of its own


@ROUTES("GET", "/_ping")
@ROUTES("HEAD", "/_ping")
async def _ping(engine: Engine, call: Call) -> web.StreamResponse:
    headers = {"Api-Version": API, "Ostype": "linux", "Builder-Version": "1", "Docker-Experimental": "false"}
    return web.Response(text="" if call.request.method == "HEAD" else "OK", headers=headers)


@ROUTES("GET", "/version")
async def _version(engine: Engine, call: Call) -> web.StreamResponse:
    return json_answer({
        "Platform": {"Name": "Pagurus"}, "Version": "24.0.0", "ApiVersion": API, "MinAPIVersion": OLDEST,
        "Os": "linux", "Arch": "amd64", "KernelVersion": platform.release(), "GoVersion": "",
        "GitCommit": "", "BuildTime": "",
    })  # fmt: skip


@ROUTES("GET", "/info")
async def _info(engine: Engine, call: Call) -> web.StreamResponse:
    states = [info.state for info in all_of(engine)]
    running = sum(state is ServiceState.RUNNING for state in states)
    limits, images = engine.live.row.limits, await asyncio.to_thread(engine.images)
    return json_answer({
        "ID": engine.live.row.id, "Name": engine.live.row.hostname, "Containers": len(states),
        "ContainersRunning": running, "ContainersPaused": 0, "ContainersStopped": len(states) - running,
        "Images": len(images), "Driver": "overlay2", "OSType": "linux", "Architecture": "x86_64",
        "OperatingSystem": "Pagurus sandbox", "ServerVersion": "24.0.0", "KernelVersion": platform.release(),
        "NCPU": math.ceil(limits.cpus or os.cpu_count() or 1), "MemTotal": parse_bytes(limits.memory or 0),
        "Plugins": {"Volume": ["local"], "Network": ["bridge"], "Authorization": None, "Log": ["json-file"]},
        "Swarm": {"LocalNodeState": "inactive"}, "SecurityOptions": [], "Labels": [], "IndexServerAddress": "",
    })  # fmt: skip


# --------------------------------------------------------------------------- images


@ROUTES("GET", "/images/json")
async def _images(engine: Engine, call: Call) -> web.StreamResponse:
    matches = [shown.image(info) for info in await asyncio.to_thread(engine.images)]
    requested = call.filters.get("reference", [])
    if requested:
        matches = [one for one in matches if {*one["RepoTags"], one["RepoTags"][0].rpartition(":")[0]} & set(requested)]
    return json_answer(matches)


@ROUTES("GET", "/images/{name}/json")
async def _image(engine: Engine, call: Call) -> web.StreamResponse:
    return json_answer(shown.image_inspected(await asyncio.to_thread(engine.image_info, call.id)))


@ROUTES("GET", "/images/{name}/history")
async def _history(engine: Engine, call: Call) -> web.StreamResponse:
    return json_answer(shown.history(await asyncio.to_thread(engine.image_info, call.id)))


@ROUTES("DELETE", "/images/{name}")
async def _image_remove(engine: Engine, call: Call) -> web.StreamResponse:
    tag = tagged(call.id)
    if tag not in engine.composition.images:
        await asyncio.to_thread(engine.image_info, call.id)
        raise Conflict(f"{call.id[:200]} belongs to the host", hint="leave it; what was built here can be removed")
    await engine.live.added.change_images(remove=tag)
    await engine.builds.sweep()
    return json_answer([{"Untagged": tag}])


@ROUTES("POST", "/build")
async def _build(engine: Engine, call: Call) -> web.StreamResponse:
    return await build.answer(engine, call)


@ROUTES("POST", "/images/{name}/tag")
async def _tag(engine: Engine, call: Call) -> web.StreamResponse:
    info = await asyncio.to_thread(engine.image_info, call.id)
    name = engine.composition.images.get(info.name, info.name)
    other = f"{call.query.get('repo', '')}:{call.query.get('tag', '') or 'latest'}"
    await engine.live.added.change_images(add={tagged(other): name})
    return web.Response(status=201)


@ROUTES("POST", "/images/create")
async def _pull(engine: Engine, call: Call) -> web.StreamResponse:
    """Nothing is fetched: an image is on this host, or it is not."""
    name, tag = call.query.get("fromImage", ""), call.query.get("tag", "")
    if not name:
        raise Unsupported("nothing is imported into a sandbox", hint="docker build, FROM an image of this host")
    if name.removeprefix("docker.io/").startswith("moby/buildkit"):  # buildx wants to start it
        raise Unsupported(NO_BUILDKIT[0], hint=NO_BUILDKIT[1])
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
    names, requested = engine.networks(), call.filters.get("name", [])
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
    if body.driver not in ("", "default", "bridge", "overlay"):
        raise Unsupported(f"the driver {body.driver[:40]} is not supported", hint="leave out --driver")
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
    endpoint = body.endpoint_config or bodies.EndpointBody()
    if endpoint.address is not None and endpoint.address.address:
        raise options.refuse_address(network, endpoint.address.address)
    aliases = endpoint.aliases or []
    await engine.change_network(engine.name(body.container), network, aliases=aliases)
    return web.Response(status=200)


@ROUTES("POST", "/networks/{id}/disconnect")
async def _disconnect(engine: Engine, call: Call) -> web.StreamResponse:
    network, body = engine.network(call.id), await call.body(bodies.ConnectBody)
    await engine.change_network(engine.name(body.container), network, aliases=None)
    return web.Response(status=200)


def _unused_volumes(engine: Engine) -> list[str]:
    used = {volume.name for one in engine.composition.services.values() for volume in one.volumes}
    return [name for name in _volume_names(engine) if name not in used]


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
    name, labels = body.name, body.labels or {}
    if not name:
        name, labels = secrets.token_hex(16), {ANONYMOUS: "", **labels}
    await engine.live.added.make_volume(name, labels)
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


# --------------------------------------------------------------------------- what is left over


@ROUTES("POST", "/networks/prune")
async def _networks_prune(engine: Engine, call: Call) -> web.StreamResponse:
    used = {network for one in engine.composition.services.values() for network in one.networks}
    unused = [
        name for name in engine.networks() if name not in (*used, bodies.BRIDGE) and _labelled(engine, name, call)
    ]
    for name in unused:
        await engine.live.added.change_networks(remove=name)
    return json_answer({"NetworksDeleted": unused})


def _labelled(engine: Engine, network: str, call: Call) -> bool:
    """Whether a network has the labels that a request names."""
    labels = engine.composition.networks[network].labels
    existing = {*labels, *(f"{key}={value}" for key, value in labels.items())}
    return existing.issuperset(call.filters.get("label", []))


@ROUTES("POST", "/volumes/prune")
async def _volumes_prune(engine: Engine, call: Call) -> web.StreamResponse:
    """Those that have no name of their own; with ``all=true``, all that no container has."""
    labels, every = engine.composition.volume_labels, call.filters.get("all", [""])[0] in ("1", "true")
    names = await asyncio.to_thread(_unused_volumes, engine)
    unused = [name for name in names if every or ANONYMOUS in labels.get(name, {})]
    for name in unused:
        await engine.live.added.remove_volume(name)
    return json_answer({"VolumesDeleted": unused, "SpaceReclaimed": 0})


@ROUTES("POST", "/images/prune")
async def _images_prune(engine: Engine, call: Call) -> web.StreamResponse:
    """There are none without a name: a build that gives none gets one."""
    return json_answer({"ImagesDeleted": [], "SpaceReclaimed": 0})


@ROUTES("POST", "/build/prune")
async def _build_prune(engine: Engine, call: Call) -> web.StreamResponse:
    """The host keeps the steps of builds, for all sandboxes."""
    return json_answer({"CachesDeleted": [], "SpaceReclaimed": 0})


@ROUTES("GET", "/system/df")
async def _usage(engine: Engine, call: Call) -> web.StreamResponse:
    """Images are counted; what containers and volumes take is not: -1."""
    images = [shown.image(info) for info in await asyncio.to_thread(engine.images)]
    names = await asyncio.to_thread(_volume_names, engine)
    unused = await asyncio.to_thread(_unused_volumes, engine)
    volumes = [
        {**shown.volume(engine.composition, name), "UsageData": {"Size": -1, "RefCount": int(name not in unused)}}
        for name in names
    ]
    return json_answer({
        "LayersSize": sum(one["Size"] for one in images), "Images": images, "Containers": listed(engine),
        "Volumes": volumes, "BuildCache": [],
    })  # fmt: skip
