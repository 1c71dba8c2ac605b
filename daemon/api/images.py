"""Routes of images: list, bring in by stream, make from a checkpoint, remove."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import msgspec
from aiohttp import web

from daemon.api.presence import while_asked
from daemon.api.wire import HOST, Route, body, chunks, parameters, reply
from daemon.host.host import Host
from daemon.store import pulling
from sandbox.messages import CommitRequest, ImageInfo, PullImage

ARCHIVE_MOST = 64 << 30  # bytes of one archive
_WRITE_AT_ONCE = 1 << 22


class ImportQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    replace: bool = False  # let the name point to the new image when it exists


async def _list(request: web.Request) -> web.Response:
    """The images that sandboxes can start from."""
    host = request.app[HOST]
    return reply(request, await asyncio.to_thread(_infos, host, host.images_used()))


def _infos(host: Host, used: dict[str, int]) -> list[ImageInfo]:
    return [host.images.info(name, used) for name in host.images.list()]


async def _info(request: web.Request) -> web.Response:
    """One image."""
    host = request.app[HOST]
    return reply(request, await asyncio.to_thread(host.images.info, request.match_info["name"], host.images_used()))


async def _import(request: web.Request) -> web.Response:
    """Make an image from an archive: an OCI layout, what docker save writes, or a tar of a root file system."""
    host, name, replace = request.app[HOST], request.match_info["name"], parameters(request, ImportQuery).replace
    await asyncio.to_thread(host.images.check_free, name, replace)  # before gigabytes travel
    descriptor, path = await asyncio.to_thread(_spool, host)
    try:
        with os.fdopen(descriptor, "wb", buffering=_WRITE_AT_ONCE) as spool:
            async for part in chunks(request):
                await asyncio.to_thread(spool.write, part)
        await asyncio.to_thread(host.images.import_archive, name, path, replace=replace)
    finally:
        await asyncio.to_thread(path.unlink)
    return reply(request, await asyncio.to_thread(host.images.info, name, host.images_used()), 201)


def _spool(host: Host) -> tuple[int, Path]:
    host.images.trees.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=".new-", dir=host.images.trees)
    return descriptor, Path(path)


async def _pull(request: web.Request) -> web.Response:
    """Take an image from a registry. Only what is missing is fetched; an equal image stays as it is."""
    host, wanted = request.app[HOST], await body(request, PullImage)
    name = await while_asked(request, pulling.pull(host.images, wanted.reference, wanted.name))
    return reply(request, await asyncio.to_thread(host.images.info, name, host.images_used()), 201)


async def _commit(request: web.Request) -> web.Response:
    """Make an image of the files of a checkpoint."""
    host, wanted = request.app[HOST], await body(request, CommitRequest)
    work = host.store.image(request.match_info["id"], wanted.name, wanted.config, replace=wanted.replace)
    await while_asked(request, work)
    return reply(request, await asyncio.to_thread(host.images.info, wanted.name, host.images_used()), 201)


async def _remove(request: web.Request) -> web.Response:
    """Remove the name of an image. Its tree stays while another name or a sandbox needs it."""
    host = request.app[HOST]
    await asyncio.to_thread(host.images.remove, request.match_info["name"], set(host.images_used()))
    return reply(request, {})


ROUTES: list[Route] = [
    Route("GET", "/v1/images", _list, answer=list[ImageInfo]),
    Route("GET", "/v1/images/{name}", _info, answer=ImageInfo),
    Route(
        "PUT",
        "/v1/images/{name}",
        _import,
        query=ImportQuery,
        body=bytes,
        body_most=ARCHIVE_MOST,
        content="application/x-tar",
        answer=ImageInfo,
        status=201,
        scope="admin",
    ),
    Route("POST", "/v1/images/pull", _pull, body=PullImage, answer=ImageInfo, status=201, scope="admin"),
    Route("DELETE", "/v1/images/{name}", _remove, scope="admin"),
    Route(
        "POST", "/v1/checkpoints/{id}/image", _commit, body=CommitRequest, answer=ImageInfo, status=201, scope="admin"
    ),
]
