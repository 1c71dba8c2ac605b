"""E2B's paths of templates.

Guarantee: an image that is no template is neither replaced nor removed here.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import re
import time
import uuid
from typing import Annotated, Any

import msgspec
from aiohttp import web

from daemon.api.wire import chunks
from daemon.auth.access import CALLER
from daemon.auth.visibility import caller_owner
from daemon.e2b import bodies
from daemon.e2b.route import ALIASES, RouteTable, json_answer
from daemon.e2b.steps import BASES, CPUS, MEMORY, TEMPLATE, BuildBody, written
from daemon.e2b.templates import MAX_ARCHIVE, TEMPLATES, Build, holder_of
from daemon.host.host import Host
from sandbox.errors import Conflict, Forbidden, Invalid, NotFound
from sandbox.messages import ImageInfo
from sandbox.messages.images import ImageName
from sandbox.sdk.client import Client

AT = RouteTable()
PAGE = 100  # lines of an answer
URL_LIFETIME = 3600  # seconds for which an address takes an archive


class TemplateBody(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    alias: str | None = None
    tags: Annotated[list[str], msgspec.Meta(max_length=20)] | None = None
    cpuCount: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    memoryMB: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | None = None


class TagsBody(msgspec.Struct, kw_only=True):
    target: str
    tags: Annotated[list[str], msgspec.Meta(min_length=1, max_length=20)]


class UntagBody(msgspec.Struct, kw_only=True):
    name: str
    tags: Annotated[list[str], msgspec.Meta(min_length=1, max_length=20)]


# --------------------------------------------------------------------------- names


def names_of(name: str, tags: list[str]) -> list[str]:
    """The images that a template's name and tags mean.

    >>> names_of("mine", []), names_of("mine:v1", ["stable", "default"])
    (['mine'], ['mine:v1', 'mine:stable', 'mine'])
    """
    plain, _, tag = name.partition(":")
    every = dict.fromkeys([*([tag] if tag else []), *tags] or ["default"])
    made = [plain if item == "default" else f"{plain}:{item}" for item in every]
    for item in made:
        try:
            msgspec.convert(item, ImageName)
        except msgspec.ValidationError:
            raise Invalid(f"{item[:100]!r} is no name of a template", hint="write it like mine or mine:v1") from None
    return made


def _templates(host: Host) -> dict[str, ImageInfo]:
    """The images that are templates, by name. Blocks."""
    infos = (host.images.info(name, {}) for name in host.images.list())
    return {info.name: info for info in infos if TEMPLATE in info.config.labels}


async def _template(host: Host, name: str) -> ImageInfo:
    result = (await asyncio.to_thread(_templates, host)).get(names_of(name, [])[0])
    if result is None:
        raise NotFound(f"no such template: {name[:100]}", hint="build it, or see `pagurus image ls`")
    return result


def build_id(info: ImageInfo) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, info.digest))


def _shown(info: ImageInfo) -> dict[str, Any]:
    tag = info.name.partition(":")[2]
    labels, made = info.config.labels, bodies.written(datetime.datetime.fromtimestamp(info.created_at, datetime.UTC))
    return {
        "templateID": info.name,
        "buildID": build_id(info),
        "cpuCount": int(labels.get(CPUS, 1)),
        "memoryMB": int(labels.get(MEMORY, 0)),
        "diskSizeMB": info.size >> 20,
        "public": False,
        "aliases": [info.name],
        "names": [info.name],
        "tags": [tag or "default"],
        "createdAt": made,
        "updatedAt": made,
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": 1,
        "envdVersion": bodies.ENVD_VERSION,
        "buildStatus": "ready",
    }


# --------------------------------------------------------------------------- routes


@AT("POST", "/v3/templates", "/v2/templates", scope="admin")
async def _request(request: web.Request, host: Host, body: TemplateBody) -> web.Response:
    """Ask for a build of a template."""
    names = names_of(body.name or body.alias or "", body.tags or [])
    existing = await asyncio.to_thread(_templates, host)
    images = set(await asyncio.to_thread(host.images.list))
    if taken := [name for name in names if name in images and name not in existing]:
        raise Conflict(f"{taken[0]} is an image and no template", hint="choose another name")
    labels = {CPUS: str(body.cpuCount or ""), MEMORY: str(body.memoryMB or "")}
    build = request.app[TEMPLATES].admit(Build(caller_owner(), names, labels))
    tags = [name.partition(":")[2] or "default" for name in names]
    reported = {"templateID": names[0], "buildID": build.id, "public": False}
    return json_answer({**reported, "names": names, "tags": tags, "aliases": names}, 202)


@AT("GET", "/templates/{template}/files/{hash}", scope="admin")
async def _upload(request: web.Request, template: str, hash: str) -> web.Response:
    """Whether an archive is here, and where to put it."""
    templates, owner = request.app[TEMPLATES], caller_owner()
    number = _hash(hash)
    until = int(time.time()) + URL_LIFETIME
    holder = holder_of(owner)
    ticket = templates.ticket(holder, number, until)
    url = f"{request.scheme}://{request.host}/templates/archives/{holder}/{number}/{until}/{ticket}"
    present = await asyncio.to_thread(templates.archive(holder, number).is_file)
    return json_answer({"present": present, "url": url}, 201)


@AT("PUT", "/templates/archives/{holder}/{hash}/{until}/{ticket}", scope="open", body=bytes, max_body=MAX_ARCHIVE)
async def _put_archive(request: web.Request, holder: str, hash: str, until: str, ticket: str) -> web.Response:
    """Bring an archive, by a signed address."""
    templates = request.app[TEMPLATES]
    right = re.fullmatch(r"[0-9]{1,12}", until) and re.fullmatch(r"[0-9a-f]{32}", holder)
    if not right or not hmac.compare_digest(templates.ticket(holder, _hash(hash), int(until)), ticket):
        raise Forbidden("the signature is wrong", hint="begin the build again")
    if int(until) < time.time():
        raise Forbidden("the address has expired", hint="begin the build again")
    await templates.store(holder, hash, chunks(request))
    return web.Response()


def _hash(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise Invalid("not a hash of files")
    return text


@AT("POST", "/v2/templates/{template}/builds/{build}", scope="admin")
async def _begin(request: web.Request, host: Host, build: str, body: BuildBody) -> web.Response:
    """Begin the build."""
    templates = request.app[TEMPLATES]
    target = templates.build(build)
    if target.task is not None:
        raise Conflict("this build has begun already", hint="begin another build")
    base = await asyncio.to_thread(_base, host, body, request.app[ALIASES])
    written(body, base=base[0], user=base[1], workdir=base[2])  # refused now, not in the middle
    target.status = "building"
    work = templates.carry_out(target, body, request.headers.get("X-API-KEY"), base)
    target.task = asyncio.create_task(work)
    return web.Response(status=202)


def _base(host: Host, body: BuildBody, aliases: dict[str, str]) -> tuple[str, str, str]:
    """What a build begins with: an image, who commands run as and where. Blocks."""
    if body.fromTemplate:
        name = names_of(aliases.get(body.fromTemplate, body.fromTemplate), [])[0]
        config = host.images.resolve(name).config
        return name, config.user, config.workdir
    name = body.fromImage or "base"
    if name.partition(":")[0] in BASES:
        name = "base"
    return aliases.get(name, name), "", "/"


@AT("GET", "/templates/{template}/builds/{build}/status", scope="admin")
async def _status(request: web.Request, template: str, build: str) -> web.Response:
    """How far a build is, with the next lines of its log."""
    target, offset = request.app[TEMPLATES].build(build), request.query.get("logsOffset", "0")
    if not (offset.isascii() and offset.isdigit() and len(offset) < 10):
        raise Invalid("logsOffset is a number of lines")
    entries = target.log[int(offset) : int(offset) + PAGE]
    reported = {"templateID": target.names[0], "buildID": target.id, "status": target.status}
    reason = {} if target.reason is None else {"reason": target.reason}
    return json_answer({**reported, "logs": [], "logEntries": entries, **reason})


@AT("GET", "/templates", "/v2/templates")
async def _list(host: Host) -> web.Response:
    """The templates of this host."""
    return json_answer([_shown(info) for info in (await asyncio.to_thread(_templates, host)).values()])


@AT("GET", "/templates/aliases/{alias}")
async def _alias(host: Host, alias: str) -> web.Response:
    """Whether there is a template of this name."""
    info = await _template(host, alias)
    return json_answer({"templateID": info.name, "public": False})


@AT("GET", "/templates/{template}/tags")
async def _tags(host: Host, template: str) -> web.Response:
    """The tags of a template."""
    plain = template.partition(":")[0]
    infos = [_shown(info) for info in (await asyncio.to_thread(_templates, host)).values()]
    own = [info for info in infos if info["templateID"].partition(":")[0] == plain]
    if not own:
        raise NotFound(f"no such template: {template[:100]}", hint="`pagurus image ls` lists the images of this host")
    return json_answer(
        [{"tag": info["tags"][0], "buildID": info["buildID"], "createdAt": info["createdAt"]} for info in own]
    )


@AT("POST", "/templates/tags", scope="admin")
async def _tag(request: web.Request, host: Host, body: TagsBody) -> web.Response:
    """Give a template further tags."""
    info = await _template(host, body.target)
    names = names_of(info.name.partition(":")[0], body.tags)
    async with _as_caller(request) as client:
        for name in names:
            await client.images.give_name(info.name, name, config=info.config, replace=True)
    return json_answer({"tags": body.tags, "buildID": build_id(info)}, 201)


@AT("DELETE", "/templates/tags", scope="admin")
async def _untag(request: web.Request, host: Host, body: UntagBody) -> web.Response:
    """Take tags from a template."""
    async with _as_caller(request) as client:
        for name in names_of(body.name.partition(":")[0], body.tags):
            await client.images.remove((await _template(host, name)).name)
    return web.Response(status=204)


@AT("GET", "/templates/{template}")
async def _info(host: Host, template: str) -> web.Response:
    """One template."""
    shown = _shown(await _template(host, template))
    build = {name: shown[name] for name in ("createdAt", "updatedAt", "cpuCount", "memoryMB", "diskSizeMB")}
    return json_answer({**shown, "builds": [{**build, "buildID": shown["buildID"], "status": "ready"}]})


async def remove(request: web.Request, host: Host, name: str) -> None:
    """Remove a template and all of its tags. Raises NotFound."""
    if CALLER.get().scope != "admin":
        raise Forbidden("a template is removed by a key of scope admin", hint="use a key of scope admin")
    own = [item for item in await asyncio.to_thread(_templates, host) if item == name or item.startswith(f"{name}:")]
    if not own:
        raise NotFound(
            f"no such snapshot or template: {name[:100]}", hint="`pagurus image ls` and `pagurus tree` list them"
        )
    async with _as_caller(request) as client:
        for item in own:
            await client.images.remove(item)


def _as_caller(request: web.Request) -> Client:
    return Client(request.app[TEMPLATES].address, token=request.headers.get("X-API-KEY"))
