"""E2B's files: whole ones, down and up, by a token or a signed address; and whether a sandbox answers.

Guarantee: an upload that breaks off changes nothing; what is uploaded is bounded as by our own API.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import tempfile
from collections.abc import AsyncIterator
from email.message import Message
from typing import IO
from urllib.parse import quote

import msgspec
from aiohttp import BodyPartReader, web

from daemon.api.files import MAX_WRITE
from daemon.api.route import ApiRoute
from daemon.api.wire import DISK, RAW, TIMEOUT, TooLarge, chunks
from daemon.e2b.process import located, need_user
from daemon.e2b.route import BELOW, declared
from daemon.e2b.wire import basic_user
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.container.users import User
from sandbox.errors import Invalid, Timeout
from sandbox.tree import files, safe_path
from sandbox.tree.safe_path import SandboxRoot

MAX_PARTS = 1000  # files of one upload


async def _place(request: web.Request, live: LiveSandbox, path: str) -> tuple[str, User]:
    """Where a file lies, and whose it is."""
    if not path or "\0" in path or len(path) > 4096:
        raise Invalid("a path is needed", hint="?path=/home/user/a.txt")
    user = await need_user(live, request.query.get("username") or basic_user(request))
    return located(path, user.home, user.home), user


async def _health(alive: LiveSandbox) -> web.Response:
    """Whether the sandbox runs."""
    return web.Response(status=204)


async def _read(request: web.Request, alive: LiveSandbox) -> web.StreamResponse:
    path, _ = await _place(request, alive, request.query.get("path", ""))
    part, begin = await asyncio.to_thread(_begin, alive.root, path)
    headers = {"Content-Type": RAW, "Content-Disposition": f"attachment; filename*=UTF-8''{_named(path)}"}
    with part:
        response = web.StreamResponse(headers=headers)
        response.content_length = part.size
        with contextlib.suppress(ConnectionError):  # the reader went away
            await response.prepare(request)
            await response.write(begin)
            while data := await asyncio.to_thread(part.next):
                await response.write(data)
            await response.write_eof()
        return response


def _named(path: str) -> str:
    return quote(posixpath.basename(path), safe="")


def _begin(inside: SandboxRoot, path: str) -> tuple[files.FileRange, bytes]:
    part = files.FileRange(inside, path)
    with contextlib.ExitStack() as undo:
        undo.enter_context(part)
        begin = part.next()
        undo.pop_all()
    return part, begin


async def _write(request: web.Request, host: Host, alive: LiveSandbox) -> web.Response:
    target = request.query.get("path", "")
    written: list[dict[str, str]] = []
    if request.content_type == RAW:
        written.append(await _store(request, host, alive, target, chunks(request)))
    elif request.content_type == "multipart/form-data":
        async for name, data in _parts(request):
            written.append(await _store(request, host, alive, target or name, data))
            if len(written) > MAX_PARTS:
                raise Invalid(f"more than {MAX_PARTS} files at once", hint="write them in several calls")
    else:
        raise Invalid(f"a body of type {request.content_type}", hint=f"send multipart/form-data or {RAW}")
    return web.Response(body=msgspec.json.encode(written), content_type="application/json")


async def _parts(request: web.Request) -> AsyncIterator[tuple[str, AsyncIterator[bytes]]]:
    """Each file of a form, with its name, which may be a path."""
    try:
        reader = await request.multipart()
        while (part := await reader.next()) is not None:
            if isinstance(part, BodyPartReader) and part.name == "file":
                yield _filename(part), _read_part(part)
    except (ValueError, AssertionError, web.RequestPayloadError) as error:
        raise Invalid(
            f"the form cannot be read: {error}", hint="send multipart/form-data, as the client of E2B does"
        ) from None


def _filename(part: BodyPartReader) -> str:
    """As it was sent: aiohttp takes the slash away with which a path begins."""
    header = Message()
    header["Content-Disposition"] = part.headers.get("Content-Disposition", "")
    return header.get_filename() or ""


async def _read_part(part: BodyPartReader) -> AsyncIterator[bytes]:
    size = 0
    while True:
        try:
            async with asyncio.timeout(TIMEOUT):
                data = await part.read_chunk(1 << 18)
        except TimeoutError:
            raise Timeout(f"no byte of the body came for {TIMEOUT:g} s", hint="send the file again") from None
        if not data:
            return
        size += len(data)
        if size > MAX_WRITE:
            raise TooLarge(f"a file of more than {MAX_WRITE} bytes")
        yield data


async def _store(
    request: web.Request, host: Host, live: LiveSandbox, path: str, data: AsyncIterator[bytes]
) -> dict[str, str]:
    """Write one file, once it is here as a whole."""
    place, user = await _place(request, live, path)
    with tempfile.SpooledTemporaryFile(files.CHUNK, dir=str(host.images.directory)) as spool:
        try:
            async for part in data:
                request[DISK].add(len(part))
                await asyncio.to_thread(spool.write, part)
        except OSError as error:
            raise safe_path.refused(error, place) from error
        spool.seek(0)
        async with live.altering("write", place):
            await asyncio.to_thread(_put, live, place, spool, (user.uid, user.gid))
    return {"name": posixpath.basename(place), "type": "file", "path": place}


def _put(live: LiveSandbox, place: str, spool: IO[bytes], owner: tuple[int, int]) -> None:
    files.write(live.root, live.row.uid_base, place, spool, owner=owner)


ROUTES: list[ApiRoute] = [
    declared("GET", f"{BELOW}/health", _health, scope="read"),
    declared("GET", f"{BELOW}/files", _read, scope="read"),
    declared("POST", f"{BELOW}/files", _write, scope="exec", max_body=MAX_WRITE, body=bytes),
]
