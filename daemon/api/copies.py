"""The route by which builds copy into a sandbox's file tree."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from daemon.api.route import Area
from daemon.api.wire import chunks
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.container import identity
from sandbox.container.cgroup import parse_bytes
from sandbox.container.pipes import in_thread, put
from sandbox.errors import Invalid
from sandbox.messages import CopyRequest, CopyResult
from sandbox.tree import archive, host_files, safe_path
from sandbox.tree.copy_into import TargetTree, copy_into
from sandbox.tree.merged import merged

AREA = Area()
MAX_TREE = 64 << 30  # bytes of the files of one request where the sandbox has no disk limit
MAX_REQUEST = 4 << 20
_LENGTH = 4  # bytes in front of a request
_CHUNK = 1 << 18


@AREA("PUT", "/v1/sandboxes/{id}/copy", body=bytes, max_body=MAX_TREE, scope="admin")
async def _copy(request: web.Request, host: Host, alive: LiveSandbox) -> CopyResult:
    """Copy into the file tree, as COPY and ADD do: from an archive behind the request, an image or a checkpoint."""
    parts = chunks(request)
    target, rest = await _read_request(parts)
    disk = alive.row.limits.disk
    limit = parse_bytes(disk) if disk is not None else MAX_TREE
    inside, base = alive.root, alive.row.uid_base

    def work(*layers: Path) -> CopyResult:
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(merged(layers)) if layers else None
            root = stack.enter_context(inside.opened())
            stack.enter_context(safe_path.as_sandbox_root(base))
            return copy_into(source, TargetTree(root, base), target, limit=limit)

    async with alive.altering("copy", target.target):
        if target.checkpoint:
            row = await host.restorable(target.checkpoint)
            with host.collector.pin(row):
                below = await asyncio.to_thread(host.image_below, row)
                upper = None if row.files is None else host.places.snapshot(row.files) / "upper"
                return await in_thread(_of_checkpoint, work, upper, below.tree)
        if target.image:
            tree = (await asyncio.to_thread(host.images.resolve, target.image)).tree
            return await in_thread(work, tree)
        if target.make_directory:
            return await in_thread(work)
        with host.images.aside() as directory:
            await _unpacked(parts, rest, directory, limit)
            return await in_thread(work, directory)


def _of_checkpoint(work: Callable[..., CopyResult], upper: Path | None, lower: Path) -> CopyResult:
    with host_files.fresh_directory() as top:
        layers = [top] if identity.without_host(top, upper, lower) else []
        return work(*layers, *([upper] if upper is not None else []), lower)


async def _read_request(parts: AsyncIterator[bytes]) -> tuple[CopyRequest, bytes]:
    """The request, and what has come of the archive behind it."""
    data = b""
    while len(data) < _LENGTH or len(data) < _LENGTH + (size := int.from_bytes(data[:_LENGTH], "big")):
        if len(data) >= _LENGTH and int.from_bytes(data[:_LENGTH], "big") > MAX_REQUEST:
            raise Invalid(
                f"a request of more than {MAX_REQUEST} bytes", hint="a smaller copy: fewer sources, or shorter names"
            )
        try:
            data += await anext(parts)
        except StopAsyncIteration:
            raise Invalid("the request ends before it is complete", hint="send it again") from None
    try:
        return msgspec.msgpack.decode(data[_LENGTH : _LENGTH + size], type=CopyRequest), data[_LENGTH + size :]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Invalid(f"not a CopyRequest: {error}", hint="use a client of this version") from None


async def _unpacked(parts: AsyncIterator[bytes], first: bytes, directory: Path, limit: int) -> None:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    unpacking = in_thread(_unpack, directory, reader, limit)
    try:
        with os.fdopen(writer, "wb", buffering=0) as out:
            await _feed(out, first, unpacking.done)
            async for part in parts:
                await _feed(out, part, unpacking.done)
    finally:
        await unpacking


async def _feed(out: object, part: bytes, done: Callable[[], bool]) -> None:
    if part and not done():  # after a refusal the rest is read all the same: then the answer arrives
        with contextlib.suppress(BrokenPipeError):
            await asyncio.to_thread(put, out, part)  # type: ignore[arg-type]


def _unpack(dir_path: Path, reader: int, limit: int) -> None:
    with os.fdopen(reader, "rb", buffering=_CHUNK) as stream, safe_path.directory(dir_path) as directory:
        archive.unpack(stream, directory, limit=limit, rules=archive.Rules(owners=True, reserve=True))
