"""Acts of a tenant against what other owners have: their sandboxes by every route, their names, what they store.

Each act of a route asks for the neighbour's sandbox and for one that never was: a tenant must get the same answer, and
the neighbour's own token another one, so that the request was right.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sandbox import Client, PagurusError, Sandbox
from sandbox.messages import CheckpointInfo
from sandbox.messages.images import ImageInfo
from tests.hostile.api import LIMITS, ApiScene, act
from tests.hostile.tenants import Tenant, tenant

NEVER = {"sandbox": "s-0123456789", "checkpoint": "c-0123456789"}  # what never was
MEMORY = 8 << 20  # bytes of a guessed content


@dataclass(frozen=True)
class RouteOf:
    """A request for something of a sandbox. `{sandbox}` and `{checkpoint}` in its path stand for theirs."""

    method: str
    path: str
    body: Any = None
    upgrade: bool = False  # to a WebSocket
    headers: dict[str, str] = field(default_factory=dict)


_SANDBOX, _CHECKPOINT = "/v1/sandboxes/{sandbox}", "/v1/checkpoints/{checkpoint}"
_COMMAND = {"command": "id", "ends_turn": False}
_BY_ROUTE = {
    "see a neighbour's sandbox by its id": RouteOf("GET", _SANDBOX),
    "list a neighbour's checkpoints": RouteOf("GET", f"{_SANDBOX}/checkpoints"),
    "see a neighbour's checkpoint by its id": RouteOf("GET", _CHECKPOINT),
    "see a neighbour's turns": RouteOf("GET", f"{_SANDBOX}/turns"),
    "see what a neighbour's sandbox uses": RouteOf("GET", f"{_SANDBOX}/metrics"),
    "see what a neighbour changed": RouteOf("GET", f"{_SANDBOX}/diff?since={{checkpoint}}"),
    "see a neighbour's programs": RouteOf("GET", f"{_SANDBOX}/processes"),
    "see a neighbour's ports": RouteOf("GET", f"{_SANDBOX}/ports"),
    "see a neighbour's network": RouteOf("GET", f"{_SANDBOX}/network"),
    "read a neighbour's file": RouteOf("GET", f"{_SANDBOX}/files?path=/etc/passwd"),
    "look at a neighbour's file": RouteOf("GET", f"{_SANDBOX}/files/status?path=/etc/passwd"),
    "list a neighbour's directory": RouteOf("GET", f"{_SANDBOX}/entries?path=/etc"),
    "download a neighbour's tree": RouteOf("GET", f"{_SANDBOX}/tree?path=/etc"),
    "make a directory in a neighbour's sandbox": RouteOf("PUT", f"{_SANDBOX}/entries?path=/made"),
    "move a neighbour's file": RouteOf("POST", f"{_SANDBOX}/files/move", {"source": "/etc/issue", "target": "/moved"}),
    "remove a neighbour's file": RouteOf("DELETE", f"{_SANDBOX}/files?path=/etc/hostname"),
    "run a command in a neighbour's sandbox": RouteOf("POST", f"{_SANDBOX}/exec", _COMMAND),
    "stream a command of a neighbour's sandbox": RouteOf("POST", f"{_SANDBOX}/stream", _COMMAND),
    "start a program in a neighbour's sandbox": RouteOf("POST", f"{_SANDBOX}/processes", {"command": "sleep 1"}),
    "open a session in a neighbour's sandbox": RouteOf("POST", f"{_SANDBOX}/sessions", {}),
    "checkpoint a neighbour's sandbox": RouteOf("POST", f"{_SANDBOX}/checkpoints", {}),
    "restore a neighbour's sandbox": RouteOf("POST", f"{_SANDBOX}/restore", {}),
    "fork a neighbour's sandbox": RouteOf("POST", f"{_SANDBOX}/fork", {"count": 1}),
    "fork a neighbour's checkpoint": RouteOf("POST", f"{_CHECKPOINT}/fork", {"count": 1}),
    "label a neighbour's sandbox": RouteOf("PATCH", f"{_SANDBOX}/labels", {"labels": {"mine": "yes"}}),
    "label a neighbour's checkpoint": RouteOf("PUT", f"{_CHECKPOINT}/label", {"label": "mine"}),
    "remove a neighbour's checkpoint": RouteOf("DELETE", _CHECKPOINT),
    "open a neighbour's network": RouteOf("PUT", f"{_SANDBOX}/network", {"mode": "open"}),
    "take a token of a neighbour's gateway": RouteOf("POST", f"{_SANDBOX}/gateway/token", {}),
    "read what a neighbour asks its model": RouteOf("GET", f"{_SANDBOX}/gateway/exchanges"),
    "have a neighbour's record answered again": RouteOf(
        "POST", f"{_SANDBOX}/gateway/replay", {"checkpoint": "{checkpoint}"}
    ),
    "attach to a neighbour's terminal": RouteOf("GET", f"{_SANDBOX}/terminals/1/attach", upgrade=True),
    "connect to a neighbour's port by WebSocket": RouteOf("GET", f"{_SANDBOX}/ports/80/connect", upgrade=True),
    "kill a neighbour's processes": RouteOf("POST", f"{_SANDBOX}/kill", {}),
    "remove a neighbour's sandbox": RouteOf("DELETE", _SANDBOX),
}


async def _request(who: Tenant, route: RouteOf, names: dict[str, str]) -> tuple[int, str]:
    """(status, what was answered without the names that were asked for)"""
    path = route.path.format(**names)
    if route.upgrade:
        try:
            async with who.session.ws_connect(path, headers=who.headers):
                return 101, ""
        except aiohttp.WSServerHandshakeError as error:
            return error.status, ""
    body = route.body
    if isinstance(body, dict):
        body = {key: value.format(**names) if isinstance(value, str) else value for key, value in body.items()}
    async with who.session.request(route.method, path, json=body, headers=who.headers) as answer:
        said = (await answer.read()).decode("utf-8", "replace")
    for name in names.values():
        said = said.replace(name, "it")
    return answer.status, said


async def _remove_all(client: Client) -> None:
    """The sandboxes of a tenant, and what its own requests made of them."""
    for item in await client.sandboxes():
        await (await client.get(item.id)).remove()


async def _by_route(scene: ApiScene, route: RouteOf) -> str:
    async with tenant(scene) as attacker, tenant(scene) as neighbour, contextlib.AsyncExitStack() as undo:
        victim = await neighbour.client.create(scene.attacker.info.image, limits=LIMITS)
        undo.push_async_callback(_remove_all, neighbour.client)
        taken = await victim.checkpoint()
        theirs = {"sandbox": victim.id, "checkpoint": taken.id}
        got, never = await _request(attacker, route, theirs), await _request(attacker, route, NEVER)
        if got != never:
            return f"{got[0]} {got[1][:150]}, where {never[0]} {never[1][:150]} is said of what never was"
        if got[0] != 404:
            return f"was not tried: {got}"
        own = await _request(neighbour, route, theirs)
    return "was not tried: the owner gets the same" if own == got and own[1] else ""


for _name, _route in _BY_ROUTE.items():

    @act(_name)
    async def _reached(scene: ApiScene, route: RouteOf = _route) -> str:
        return await _by_route(scene, route)


# ------------------------------------------------------------------ names and labels


async def _finds(client: Client, word: str) -> str:
    """The id of the sandbox that this word finds, "" for none."""
    try:
        return (await client.get(word)).id
    except PagurusError:
        return ""


@act("give a sandbox the name of an id")
async def _like_an_id(scene: ApiScene) -> str:
    async with tenant(scene) as attacker:
        for name in ("s-5a11", "s-", "c-0", scene.neighbour.id):
            try:
                async with attacker.sandbox(name=name):
                    return f"a sandbox is named {name}"
            except PagurusError as error:
                if "looks like an id" not in str(error):
                    return f"was not tried: {error}"
    return ""


@act("have an administrator's word find a tenant's sandbox by name")
async def _by_name(scene: ApiScene) -> str:
    async with tenant(scene) as attacker, attacker.sandbox(name="build-box") as mine:
        if await _finds(attacker.client, "build-box") != mine.id:
            return "was not tried: its owner does not find it"
        return "the administrator's word found it" if await _finds(scene.host, "build-box") else ""


@act("have an administrator's word find a tenant's sandbox by the beginning of its id")
async def _by_prefix(scene: ApiScene) -> str:
    async with tenant(scene) as attacker, attacker.sandbox() as mine:
        if await _finds(attacker.client, mine.id[:-2]) != mine.id:
            return "was not tried: its owner does not find it"
        if await _finds(scene.host, mine.id) != mine.id:
            return "the administrator does not find it by its id"
        return "the administrator's word found it" if await _finds(scene.host, mine.id[:-2]) else ""


@act("block an administrator's name by one of a tenant's")
async def _blocked_name(scene: ApiScene) -> str:
    image = scene.attacker.info.image
    async with tenant(scene) as attacker, attacker.sandbox(name="web"), scene.host.create(image, name="web") as own:
        return "" if await _finds(scene.host, "web") == own.id else "the host's own was not found"


async def _forked(client: Client, word: str) -> str:
    """The checkpoint that this word forks, "" for none."""
    try:
        return (await client.call("GET", f"/v1/checkpoints/{word}", CheckpointInfo)).id
    except PagurusError:
        return ""


@act("have an administrator's word find a tenant's checkpoint by its label")
async def _by_label(scene: ApiScene) -> str:
    async with tenant(scene) as attacker, attacker.sandbox() as mine:
        taken = (await mine.checkpoint("release")).id
        if await _forked(attacker.client, "release") != taken:
            return "was not tried: its owner does not find it"
        return "the administrator's word found it" if await _forked(scene.host, "release") else ""


@act("have an administrator's word find a tenant's checkpoint by the beginning of its id")
async def _by_checkpoint_prefix(scene: ApiScene) -> str:
    async with tenant(scene) as attacker, attacker.sandbox() as mine:
        taken = (await mine.checkpoint()).id
        if await _forked(attacker.client, taken[:-2]) != taken:
            return "was not tried: its owner does not find it"
        return "the administrator's word found it" if await _forked(scene.host, taken[:-2]) else ""


@act("block an administrator's label by one of a tenant's")
async def _blocked_label(scene: ApiScene) -> str:
    async with tenant(scene) as attacker, attacker.sandbox() as mine:
        own = (await scene.attacker.checkpoint("candidate")).id
        await mine.checkpoint("candidate")
        return "" if await _forked(scene.host, "candidate") == own else "the host's own was not found"


@act("label a checkpoint as the id of another is written")
async def _label_like_an_id(scene: ApiScene) -> str:
    own = (await scene.neighbour.checkpoint()).id
    await scene.attacker.checkpoint(own[:6])
    result = await _forked(scene.host, own[:6])
    return "" if result == own else f"{own[:6]} found {result}"


# ------------------------------------------------------------------ what others have


GUESS = """
import os, random, sys, time
data = random.Random(sys.argv[1]).randbytes(int(sys.argv[2]))
open("/tmp/up", "w").write("up")
time.sleep(9999)
"""


async def _guessed(sandbox: Sandbox, seed: str) -> int:
    """Bytes that a checkpoint is told to take while a process holds a content."""
    await sandbox.files.write("/guess.py", GUESS)
    await sandbox.exec(
        f"setsid python3 /guess.py {seed} {MEMORY} </dev/null >/dev/null 2>&1 & "
        "until test -e /tmp/up; do sleep 0.05; done",
        timeout=60,
        ends_turn=False,
    )
    taken = await sandbox.checkpoint(wait="durable")
    assert taken.full_bytes > MEMORY, f"was not tried: {taken}"
    return taken.stored_bytes


@act("learn from the size of a checkpoint what a neighbour holds in memory")
async def _stored(scene: ApiScene) -> str:
    async with (
        tenant(scene) as attacker,
        tenant(scene) as neighbour,
        neighbour.sandbox() as victim,
        attacker.sandbox() as mine,
    ):
        theirs = await _guessed(victim, "theirs")
        if theirs < MEMORY:
            return f"was not tried: {theirs} bytes"
        reported = await _guessed(mine, "theirs")
    return "" if reported >= MEMORY else f"{reported} bytes: a neighbour has it"


@act("learn from an image's source where it lies on the host")
async def _sources(scene: ApiScene) -> str:
    image = scene.attacker.info.image
    shown = await scene.host.call("GET", f"/v1/images/{image}", ImageInfo)
    async with tenant(scene) as attacker:
        one = await attacker.client.call("GET", f"/v1/images/{image}", ImageInfo)
        many = await attacker.client.call("GET", "/v1/images", list[ImageInfo])
    if not shown.source:
        return "was not tried: the image has no source"
    return next((f"told: {item.source}" for item in (one, *many) if item.source), "")


@act("keep a neighbour's fork waiting by fork hooks that never end")
async def _hooks(scene: ApiScene) -> str:
    async with (
        tenant(scene) as attacker,
        tenant(scene) as neighbour,
        attacker.sandbox() as mine,
        neighbour.sandbox() as victim,
    ):
        await mine.exec(
            "mkdir -p /etc/pagurus/fork.d; printf '#!/bin/sh\\nexec sleep 9999\\n' > /etc/pagurus/fork.d/10-hang;"
            " chmod 755 /etc/pagurus/fork.d/10-hang"
        )
        requested = [asyncio.create_task(mine.fork(1)) for _ in range(8)]
        try:
            async with asyncio.timeout(60):
                children = await victim.fork(1)
        except TimeoutError:
            return "the neighbour's fork waited"
        finally:
            for task in requested:
                task.cancel()
            await asyncio.gather(*requested, return_exceptions=True)
            for client, retained in ((attacker.client, mine), (neighbour.client, victim)):
                for item in await client.sandboxes():
                    if item.id != retained.id:
                        with contextlib.suppress(PagurusError):
                            await (await client.get(item.id)).remove()
    return "" if children[0].error is None else f"the neighbour's fork failed: {children[0].error}"


# ------------------------------------------------------------------ policies

for _address, _whose in (
    ("169.254.169.254", "AWS's and Google's"),
    ("168.63.129.16", "Azure's"),
    ("100.100.100.200", "Alibaba's"),
    ("192.0.0.192", "Oracle's"),
):

    @act(f"name {_whose} metadata address in a policy")
    async def _named(scene: ApiScene, address: str = _address) -> str:
        async with tenant(scene) as attacker, attacker.sandbox() as mine:
            for text in (address, f"{address}/32", f"{address}:tcp/80"):
                target = {"mode": "allow", "cidrs": [text]}
                status, said = await attacker.request("PUT", f"/v1/sandboxes/{mine.id}/network", target)
                if status == 200:
                    return f"{text} was taken"
                if "no sandbox may reach" not in str(said):
                    return f"was not tried: {status} {said}"
        return ""
