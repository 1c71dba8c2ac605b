"""Routes of the fake host for the file tree: single files and whole trees."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from sandbox.descriptors import closing
from sandbox.errors import Conflict, Invalid, NotFound
from sandbox.testing.files import FakeFiles, described
from sandbox.testing.wire import delete, reply
from sandbox.tree import archive

MAX_TREE = 1 << 32  # bytes


class FileRoutes:
    """Part of :class:`FakeHost`."""

    _alive: Callable[[web.Request], Any]

    def _of_files(self) -> dict[tuple[str, str], Any]:
        one = "/v1/sandboxes/{id}"
        return {
            ("GET", f"{one}/files"): self._read,
            ("PUT", f"{one}/files"): self._write,
            ("DELETE", f"{one}/files"): self._remove_file,
            ("GET", f"{one}/files/status"): self._status,
            ("POST", f"{one}/files/move"): self._move,
            ("GET", f"{one}/entries"): self._entries,
            ("PUT", f"{one}/entries"): self._make_directory,
            ("GET", f"{one}/tree"): self._download,
            ("PUT", f"{one}/tree"): self._upload,
        }

    async def _read(self, request: web.Request) -> web.Response:
        path = self._there(request)
        if not path.is_file():
            raise Invalid(f"{request.query['path']} is not a regular file")
        offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", 1 << 30))
        return web.Response(body=path.read_bytes()[offset : offset + limit], content_type="application/octet-stream")

    async def _write(self, request: web.Request) -> web.Response:
        files, name = self._tree_of(request), request.query["path"]
        if files.path(name).is_dir():
            raise Invalid(f"{name} is not a regular file")
        mode, append = int(request.query.get("mode", "644"), 8), request.query.get("append") in ("1", "true")
        files.write(name, await request.read(), append=append, mode=mode)
        return reply({})

    async def _remove_file(self, request: web.Request) -> web.Response:
        path = self._there(request)
        if path.is_dir() and not path.is_symlink():
            if request.query.get("recursive") not in ("1", "true") and any(path.iterdir()):
                raise Conflict(f"{request.query['path']} is not empty", hint="remove it recursively")
            delete(path)
        else:
            path.unlink()
        return reply({})

    async def _status(self, request: web.Request) -> web.Response:
        return reply(described(self._there(request)))

    async def _move(self, request: web.Request) -> web.Response:
        source, target = self._there(request), self._tree_of(request).path(request.query["to"])
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        return reply({})

    async def _entries(self, request: web.Request) -> web.Response:
        path = self._there(request)
        if not path.is_dir():
            raise Invalid(f"{request.query['path']} is not a directory")
        return reply([described(entry) for entry in sorted(path.iterdir())])

    async def _make_directory(self, request: web.Request) -> web.Response:
        self._tree_of(request).path(request.query["path"]).mkdir(parents=True, exist_ok=True)
        return reply({})

    def _tree_of(self, request: web.Request) -> FakeFiles:
        tree: FakeFiles = self._alive(request).tree(request.query.get("service"))
        return tree

    def _there(self, request: web.Request) -> Path:
        path: Path = self._tree_of(request).path(request.query["path"])
        if not path.exists() and not path.is_symlink():
            raise NotFound(f"no such file or directory: {request.query['path']}")
        return path

    async def _download(self, request: web.Request) -> web.Response:
        self._there(request)
        content, root = io.BytesIO(), self._tree_of(request).root
        with _opened(root) as directory:
            await asyncio.to_thread(archive.pack, directory, request.query["path"], content)
        return web.Response(body=content.getvalue(), content_type="application/x-tar")

    async def _upload(self, request: web.Request) -> web.Response:
        target, content = self._tree_of(request).path(request.query["path"]), io.BytesIO(await request.read())
        target.mkdir(parents=True, exist_ok=True)
        with _opened(target) as directory:
            return reply({"bytes": await asyncio.to_thread(archive.unpack, content, directory, limit=MAX_TREE)})


@contextlib.contextmanager
def _opened(path: Path) -> Any:
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        yield directory
