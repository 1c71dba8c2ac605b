"""Routes of images: list, bring in by stream, make from a checkpoint, export, push, remove."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from daemon.api.presence import while_requested
from daemon.api.route import Area, ValueStream
from daemon.api.wire import chunks, frame, piped, streaming
from daemon.auth.access import CALLER
from daemon.host.host import Host
from daemon.store import pulling
from sandbox.errors import ImageNotFound, Invalid, PagurusError
from sandbox.image import export, reference
from sandbox.image.store import StoredImage
from sandbox.messages import CommitRequest, ImageInfo, NameImage, PullImage, PullProgress, PushImage, PushResult
from sandbox.tree.safe_path import refused
from sandbox.tree.space import Reserve

AREA = Area()
MAX_ARCHIVE = 64 << 30  # bytes of one archive
_WRITE_AT_ONCE = 1 << 22


class ImportQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    replace: bool = False  # let the name point to the new image when it exists


@AREA("GET", "/v1/images")
async def _list(host: Host) -> list[ImageInfo]:
    """The images that sandboxes can start from."""
    return await asyncio.to_thread(_infos, host, host.images_used())


def _infos(host: Host, used: dict[str, int]) -> list[ImageInfo]:
    return [_shown(host.images.info(name, used)) for name in host.images.list()]


def _shown(image: ImageInfo) -> ImageInfo:
    """Where an image came from may be a path of the host or another owner's checkpoint: administrators see it."""
    if CALLER.get().everything:
        return image
    return msgspec.structs.replace(image, source="", used_by=0)


@AREA("GET", "/v1/images/{name}")
async def _info(host: Host, name: str) -> ImageInfo:
    """One image."""
    return _shown(await asyncio.to_thread(host.images.info, name, host.images_used()))


@AREA(
    "PUT",
    "/v1/images/{name}",
    body=bytes,
    max_body=MAX_ARCHIVE,
    content="application/x-tar",
    status=201,
    scope="admin",
)
async def _import(request: web.Request, host: Host, name: str, query: ImportQuery) -> ImageInfo:
    """Make an image from an archive: an OCI layout, what docker save writes, or a tar of a root file system."""
    await asyncio.to_thread(host.images.check_free, name, query.replace)  # before gigabytes travel
    descriptor, path = await asyncio.to_thread(_spool, host)
    try:
        with os.fdopen(descriptor, "wb", buffering=_WRITE_AT_ONCE) as spool:
            reserve = Reserve(descriptor)
            try:
                async for part in chunks(request):
                    reserve.take(len(part))
                    await asyncio.to_thread(spool.write, part)
            except OSError as error:
                raise refused(error, "the archive") from error
        await asyncio.to_thread(host.images.import_archive, name, path, replace=query.replace)
    finally:
        await asyncio.to_thread(path.unlink)
    return _shown(await asyncio.to_thread(host.images.info, name, host.images_used()))


def _spool(host: Host) -> tuple[int, Path]:
    host.images.trees.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=".new-", dir=host.images.trees)
    return descriptor, Path(path)


@AREA("POST", "/v1/images/pull", status=201, scope="admin")
async def _pull(request: web.Request, host: Host, body: PullImage) -> ImageInfo:
    """Take an image from a registry. Only what is missing is fetched; an equal image stays as it is."""
    name = await while_requested(request, pulling.pull(host.images, body.reference, body.name))
    return _shown(await asyncio.to_thread(host.images.info, name, host.images_used()))


@AREA("POST", "/v1/images/pull/stream", answer=ValueStream(PullProgress), scope="admin")
async def _pull_stream(request: web.Request, host: Host, body: PullImage) -> web.StreamResponse:
    """The same, and how far it is. What fails before the first bytes is an error as everywhere, later the last part."""
    response = streaming(request)

    async def put(part: PullProgress) -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(frame(request, part))

    async def report(done: int, total: int) -> None:
        await put(PullProgress(done=done, total=total))

    try:
        name = await while_requested(request, pulling.pull(host.images, body.reference, body.name, report))
        await put(PullProgress(image=await asyncio.to_thread(host.images.info, name, host.images_used())))
    except PagurusError as error:
        if not response.prepared:
            raise
        await put(PullProgress(error=error.body()))
    await response.write_eof()
    return response


@AREA("POST", "/v1/checkpoints/{checkpoint}/image", status=201, scope="admin")
async def _commit(request: web.Request, host: Host, checkpoint: str, body: CommitRequest) -> ImageInfo:
    """Make an image of the files of a checkpoint."""
    work = host.store.image(checkpoint, body.name, body.config, replace=body.replace)
    await while_requested(request, work)
    return await asyncio.to_thread(host.images.info, body.name, host.images_used())


@AREA("POST", "/v1/images/{name}/name", status=201, scope="admin")
async def _name(host: Host, name: str, body: NameImage) -> ImageInfo:
    """Give the tree of an image another name, with its own configuration. No file is copied."""
    return await asyncio.to_thread(_named, host, name, body)


def _named(host: Host, name: str, body: NameImage) -> ImageInfo:
    result = host.images.resolve(name)
    source, config = f"image {name}", body.config or result.config
    if not host.images.give_name(body.name, result.digest, source, config, replace=body.replace):
        raise ImageNotFound(
            f"image {name} has just been removed", hint="see `pagurus image ls`"
        )  # or lies in another store
    return host.images.info(body.name, host.images_used())


@AREA("GET", "/v1/images/{name}/archive", answer=bytes, content="application/x-tar", scope="admin")
async def _export(request: web.Request, host: Host, name: str) -> web.StreamResponse:
    """An image as an archive: an OCI layout that `docker load` reads as well."""
    async with _reading(host, name) as (image, created_at, directory):
        arguments = image.tree, image.config, created_at, name, directory
        aside = host.services.aside.run(export.write_layout, *arguments, sandbox=f"image {name}")
        await while_requested(request, aside)
        return await piped(request, "application/x-tar", partial(export.pack_layout, directory))


@AREA("POST", "/v1/images/{name}/push", scope="admin")
async def _push(request: web.Request, host: Host, name: str, body: PushImage) -> PushResult:
    """Send an image to a registry, by the credentials of the host."""
    target = reference.parse(body.reference)
    if target.digest:
        raise Invalid("an image is pushed to a tag, not to a digest", hint="registry/path:tag")
    async with _reading(host, name) as (image, created_at, directory):
        arguments = image.tree, image.config, created_at, body.reference, directory
        aside = host.services.aside.run(export.push, *arguments, sandbox=f"image {name}")
        digest = await while_requested(request, aside)
    return PushResult(reference=f"{target.repository}:{target.tag}", digest=digest)


@contextlib.asynccontextmanager
async def _reading(host: Host, name: str) -> AsyncIterator[tuple[StoredImage, float, Path]]:
    """An image that stays while it is read, when it was made, and an empty directory."""
    image = await asyncio.to_thread(host.images.resolve, name)
    host.store.coming.append(image.digest)
    try:
        info = await asyncio.to_thread(host.images.info, name)
        with host.images.aside() as directory:
            yield image, info.created_at, directory
    finally:
        host.store.coming.remove(image.digest)


@AREA("DELETE", "/v1/images/{name}", scope="admin")
async def _remove(host: Host, name: str) -> None:
    """Remove the name of an image. Its tree stays while another name or a sandbox needs it."""
    await asyncio.to_thread(host.images.remove, name, host.images_used)
