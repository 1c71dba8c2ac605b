"""E2B's service filesystem.Filesystem: what lies where, and watching it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import posixpath
import stat
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from daemon.api.presence import while_there
from daemon.auth.access import CALLER
from daemon.e2b.process import located, need_user
from daemon.e2b.route import Service
from daemon.e2b.watchers import WATCHERS, Watcher
from daemon.e2b.wire import STREAM, AlreadyExists, basic_user, first, last, message, single
from daemon.turns import watches
from daemon.turns.turns import LiveSandbox
from sandbox.container import users
from sandbox.container.users import User
from sandbox.errors import Invalid, NotFound, Unsupported
from sandbox.messages import FileEvent, FileInfo
from sandbox.tree import files
from sandbox.tree.safe_path import SandboxRoot

SERVICE = Service("filesystem.Filesystem")
KEEPALIVE = 50.0  # seconds
_Path = Annotated[str, msgspec.Meta(max_length=4096, pattern=r"^[^\0]*$")]
_KINDS = {
    "file": (stat.S_IFREG, "FILE_TYPE_FILE"),
    "directory": (stat.S_IFDIR, "FILE_TYPE_DIRECTORY"),
    "symlink": (stat.S_IFLNK, "FILE_TYPE_SYMLINK"),
    "other": (0, "FILE_TYPE_UNSPECIFIED"),
}


class PathRequest(msgspec.Struct, kw_only=True):
    path: _Path = ""


class ListRequest(PathRequest, kw_only=True):
    depth: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 1


class MoveRequest(msgspec.Struct, kw_only=True):
    source: _Path = ""
    destination: _Path = ""


class WatchRequest(PathRequest, kw_only=True, rename="camel"):
    recursive: bool = False
    include_entry: bool = False


class WatcherRequest(msgspec.Struct, kw_only=True, rename="camel"):
    watcher_id: str = ""


# --------------------------------------------------------------------------- looking


class Names:
    """Who owns what, by the sandbox's own files. Reads them once; blocks."""

    def __init__(self, inside: SandboxRoot) -> None:
        self._users = {existing.uid: name for name, existing in reversed(users.existing_users(inside).items())}
        self._groups = {existing.gid: name for name, existing in reversed(users.existing_groups(inside).items())}

    def entry(self, path: str, info: FileInfo) -> dict[str, Any]:
        kind, said = _KINDS[info.kind]
        reported: dict[str, Any] = {
            "name": posixpath.basename(path) or "/",
            "type": said,
            "path": path,
            "size": str(info.size),
            "mode": info.mode,
            "permissions": stat.filemode(kind | info.mode) if kind else stat.filemode(info.mode),
            "owner": self._users.get(info.uid, str(info.uid)),
            "group": self._groups.get(info.gid, str(info.gid)),
            "modifiedTime": datetime.datetime.fromtimestamp(info.modified_at, datetime.UTC)
            .isoformat(timespec="microseconds")
            .replace("+00:00", "Z"),
        }
        return reported if info.target is None else {**reported, "symlinkTarget": info.target}


def _status(inside: SandboxRoot, base: int, path: str) -> FileInfo:
    """What is at a path, the root included."""
    if path == "/":
        return FileInfo(name="/", kind="directory", mode=0o755)
    return files.status(inside, base, path)


def _entry(inside: SandboxRoot, base: int, path: str) -> dict[str, Any]:
    return Names(inside).entry(path, _status(inside, base, path))


def _entries(inside: SandboxRoot, base: int, path: str, depth: int) -> list[dict[str, Any]]:
    if _status(inside, base, path).kind == "file":
        raise Invalid(f"path is not a directory: {path}")
    names, result, ahead = Names(inside), list[dict[str, Any]](), deque([(path, 1)])
    while ahead:
        directory, level = ahead.popleft()
        try:
            inner = files.entries(inside, base, directory)
        except NotFound:
            if level == 1:
                raise
            continue  # removed while we look
        for info in inner:
            place = posixpath.join(directory, info.name)
            result.append(names.entry(place, info))
            if len(result) > files.MAX_ENTRIES:
                raise Invalid(f"{path} has more than {files.MAX_ENTRIES} entries", hint="list it by a command")
            if info.kind == "directory" and level < depth:
                ahead.append((place, level + 1))
    return result


async def place(request: web.Request, live: LiveSandbox, path: str) -> tuple[str, User]:
    """Where `path` is for the user that the call is for, and who that is."""
    user = await need_user(live, basic_user(request))
    return located(path, user.home, user.home), user


@SERVICE.call("Stat", scope="read")
async def _stat(request: web.Request, alive: LiveSandbox) -> object:
    path, _ = await place(request, alive, (await single(request, PathRequest)).path)
    return {"entry": await asyncio.to_thread(_entry, alive.root, alive.row.uid_base, path)}


@SERVICE.call("ListDir", scope="read")
async def _list(request: web.Request, alive: LiveSandbox) -> object:
    body = await single(request, ListRequest)
    path, _ = await place(request, alive, body.path)
    inside, base = alive.root, alive.row.uid_base
    return {"entries": await asyncio.to_thread(_entries, inside, base, path, max(1, body.depth))}


# --------------------------------------------------------------------------- altering


async def alter(live: LiveSandbox, change: Callable[..., Any], path: str, *more: Any, **named: Any) -> Any:
    """Change the file tree; it belongs to the next turn's effects."""
    async with live.altering(change.__name__, path):
        return await asyncio.to_thread(change, live.root, live.row.uid_base, path, *more, **named)


def _make(inside: SandboxRoot, base: int, path: str, owner: tuple[int, int]) -> dict[str, Any]:
    try:
        result = _status(inside, base, path)
    except NotFound:
        files.make_directory(inside, base, path, owner=owner)
        return _entry(inside, base, path)
    if result.kind == "directory":
        raise AlreadyExists(f"directory already exists: {path}")
    raise Invalid(f"path already exists but it is not a directory: {path}")


@SERVICE.call("MakeDir")
async def _make_dir(request: web.Request, alive: LiveSandbox) -> object:
    path, user = await place(request, alive, (await single(request, PathRequest)).path)
    return {"entry": await alter(alive, _make, path, (user.uid, user.gid))}


def _remove(inside: SandboxRoot, base: int, path: str) -> None:
    with contextlib.suppress(NotFound):
        files.remove(inside, base, path, recursive=True)


@SERVICE.call("Remove")
async def _remove_call(request: web.Request, alive: LiveSandbox) -> object:
    path, _ = await place(request, alive, (await single(request, PathRequest)).path)
    await alter(alive, _remove, path)
    return {}


def _move(inside: SandboxRoot, base: int, source: str, target: str, owner: tuple[int, int]) -> dict[str, Any]:
    files.move(inside, base, source, target, owner=owner)
    return _entry(inside, base, target)


@SERVICE.call("Move")
async def _move_call(request: web.Request, alive: LiveSandbox) -> object:
    body = await single(request, MoveRequest)
    source, user = await place(request, alive, body.source)
    target, _ = await place(request, alive, body.destination)
    async with alive.altering("move", source, target):
        inside, base, owner = alive.root, alive.row.uid_base, (user.uid, user.gid)
        return {"entry": await asyncio.to_thread(_move, inside, base, source, target, owner)}


# --------------------------------------------------------------------------- watching


def _need_directory(inside: SandboxRoot, base: int, path: str) -> None:
    if _status(inside, base, path).kind != "directory":
        raise Invalid(f"path is not a directory: {path}")


async def _watched(request: web.Request, live: LiveSandbox, body: WatchRequest) -> str:
    if body.include_entry:
        raise Unsupported("watching with entries", hint="ask for the entry by files.get_info")
    path, _ = await place(request, live, body.path)
    await asyncio.to_thread(_need_directory, live.root, live.row.uid_base, path)
    return path


@SERVICE.stream("WatchDir", scope="read")
async def _watch(request: web.Request, alive: LiveSandbox) -> web.StreamResponse:
    body = await first(request, WatchRequest)
    path = await _watched(request, alive, body)
    response = web.StreamResponse(headers={"Content-Type": STREAM})

    async def send() -> None:
        async with watches.events(alive.root.opened, path, recursive=body.recursive) as events:
            await response.prepare(request)
            await response.write(message({"start": {}}))
            event: FileEvent | None = None
            while event is None or event.kind != "end":
                try:
                    async with asyncio.timeout(KEEPALIVE):
                        event = await events.get()
                except TimeoutError:
                    await response.write(message({"keepalive": {}}))
                    continue
                for item in reported(event):
                    await response.write(message({"filesystem": item}))
            await response.write(last())
            await response.write_eof()

    with watches.place(CALLER.get().owner):
        await while_there(request, send())
    return response


_EVENTS = {"created": "EVENT_TYPE_CREATE", "modified": "EVENT_TYPE_WRITE", "removed": "EVENT_TYPE_REMOVE"}


def reported(event: FileEvent) -> list[dict[str, str]]:
    """What E2B says of an event: names are relative to what is watched. Lost events have no word there."""
    if event.kind not in _EVENTS:
        return []
    return [{"name": event.path, "type": _EVENTS[event.kind]}]


@SERVICE.call("CreateWatcher")
async def _create_watcher(request: web.Request, alive: LiveSandbox) -> object:
    body = await single(request, WatchRequest)
    path = await _watched(request, alive, body)
    watcher = Watcher(alive, path, recursive=body.recursive, owner=CALLER.get().owner)
    return {"watcherId": await request.app[WATCHERS].add(watcher)}


@SERVICE.call("GetWatcherEvents", scope="read")
async def _watcher_events(request: web.Request, alive: LiveSandbox) -> object:
    watcher = request.app[WATCHERS].find(alive, (await single(request, WatcherRequest)).watcher_id)
    return {"events": [item for event in watcher.taken() for item in reported(event)]}


@SERVICE.call("RemoveWatcher")
async def _remove_watcher(request: web.Request, alive: LiveSandbox) -> object:
    await request.app[WATCHERS].remove(alive, (await single(request, WatcherRequest)).watcher_id)
    return {}
