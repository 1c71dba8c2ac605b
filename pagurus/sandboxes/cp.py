"""``pagurus cp``: files and trees between this machine and a sandbox, with the meaning of cp, scp and docker cp."""

from __future__ import annotations

import os
import posixpath
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagurus import output
from pagurus.common import ServiceOption, call
from sandbox.errors import Invalid, NotFound

if TYPE_CHECKING:
    from sandbox import Client, Sandbox

verbs = typer.Typer()


Place = Annotated[str, typer.Argument(help="A local path, or SANDBOX:PATH.")]


@dataclass(frozen=True)
class CopyTarget:
    """Where a copy goes: one file of this name in a directory, or the content of a directory into a directory."""

    directory: str
    name: str | None = None  # of the file; None: a directory's content is copied
    below: str = ""  # of that content: the directory in `directory` that it fills, which may be there already


def placed(source: str, target: str, *, tree: bool, result: str | None) -> CopyTarget:
    """What to copy where. `tree`: the source is a directory; `result`: what is at the target, ``directory``, ``file``
    or None. Raises Invalid where that means nothing.

    >>> placed("a.txt", "/tmp", tree=False, found="directory")
    CopyTarget(directory='/tmp', name='a.txt')
    >>> placed("a.txt", "/tmp/b.txt", tree=False, found=None)
    CopyTarget(directory='/tmp', name='b.txt')
    >>> placed("src/.", "/work", tree=True, found="directory")
    CopyTarget(directory='/work', name=None)
    """
    name = posixpath.basename(posixpath.normpath(source))
    if tree:
        if result == "file":
            raise Invalid(f"{target} is a file and {source} a directory", hint="name a directory")
        content = source.endswith("/.") or name in ("", ".", "..")
        return CopyTarget(target, below="" if result is None or content else name)
    if result == "directory":
        return CopyTarget(target, name)
    if target.endswith("/"):
        raise Invalid(f"there is no directory {target}", hint="make it first, or leave out the slash at the end")
    return CopyTarget(posixpath.dirname(target) or ".", posixpath.basename(target))


@verbs.command("cp")
def copy(source: Place, target: Place, service: ServiceOption = None) -> None:
    """Copy a file or a directory, as cp -r does.

    If TARGET is a directory, a file goes into it; else the file becomes TARGET. A directory becomes TARGET if there is
    none yet; else it goes into it. DIR/. means its content.
    """
    (origin, taken), (sandbox, into) = _place(source), _place(target)
    if (origin is None) == (sandbox is None):
        raise Invalid("one side must be SANDBOX:PATH, the other one local", hint="pagurus cp ./dir my-sandbox:/work")
    if origin is None and not os.path.lexists(taken):
        raise Invalid(f"{taken} does not exist", hint="name a local file or directory")
    size = _size(Path(taken)) if origin is None else None
    with output.progress(f"copy {source}", size) as advanced:

        async def work(host: Client) -> int:
            if origin is None:
                return await _upload(await host.get(sandbox or ""), service, taken, into, advanced)
            return await _download(await host.get(origin), service, taken, into, advanced)

        copied = call(work)
    print(output.size(copied))


async def _upload(
    sandbox: Sandbox, service: str | None, source: str, target: str, advanced: Callable[[int], None]
) -> int:
    where = placed(
        source, target, tree=_local_kind(source) == "directory", result=await _kind(sandbox, service, target)
    )
    if where.name is None:
        return await sandbox.files.upload(
            source, posixpath.join(where.directory, where.below), progress=advanced, service=service
        )
    if await _kind(sandbox, service, where.directory) != "directory":
        raise Invalid(f"there is no directory {where.directory} in the sandbox", hint="make it first")
    alongside = posixpath.join(where.directory, f".pagurus-cp-{secrets.token_hex(4)}")
    try:
        copied = await sandbox.files.upload(source, alongside, progress=advanced, service=service)
        await sandbox.files.move(
            posixpath.join(alongside, Path(source).name), posixpath.join(where.directory, where.name), service=service
        )
    finally:
        if await sandbox.files.exists(alongside, service=service):
            await sandbox.files.remove(alongside, recursive=True, service=service)
    return copied


async def _download(
    sandbox: Sandbox, service: str | None, source: str, target: str, advanced: Callable[[int], None]
) -> int:
    from sandbox.tree import host_files

    kind = await _kind(sandbox, service, source)
    if kind is None:
        raise NotFound(f"there is no {source} in the sandbox", hint="look with `pagurus exec SANDBOX ls`")
    where = placed(source, target, tree=kind == "directory", result=_local_kind(target))
    if where.name is None:
        return await sandbox.files.download(
            source, where.directory, below=where.below, progress=advanced, service=service
        )
    if _local_kind(where.directory) != "directory":
        raise Invalid(f"there is no directory {where.directory} here", hint="make it first")
    # TARGET itself may be a link that an earlier copy has brought; what stands before its last name is the user's word.
    into = target if where.directory == target else f"{where.directory}/"
    with host_files.target(into) as directory, host_files.fresh_name(directory) as fresh:
        copied = await sandbox.files.download(source, into, below=fresh, progress=advanced, service=service)
        host_files.move_up(directory, fresh, posixpath.basename(source), where.name)
    return copied


async def _kind(sandbox: Sandbox, service: str | None, path: str) -> str | None:
    """What is at `path` in the sandbox; a link to a directory counts as one."""
    if path == "/" or path.endswith("/."):
        return "directory"
    try:
        result = await sandbox.files.stat(path, service=service)
    except NotFound:
        return None
    if result.kind != "symlink":
        return "directory" if result.kind == "directory" else "file"
    try:
        await sandbox.files.list(path, service=service)
    except (Invalid, NotFound):
        return "file"
    return "directory"


def _local_kind(path: str) -> str | None:
    return "directory" if os.path.isdir(path) else "file" if os.path.lexists(path) else None


def _place(text: str) -> tuple[str | None, str]:
    name, colon, path = text.partition(":")
    if colon and "/" not in name and name:
        return name, path or "/"
    return None, text


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(item.lstat().st_size for item in path.rglob("*") if item.is_file() and not item.is_symlink())
