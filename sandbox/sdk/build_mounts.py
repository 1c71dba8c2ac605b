"""What a RUN of an image build finds and leaves out of the image: ``RUN --mount``.

Guarantee: when the step's checkpoint is taken, nothing of a mount is in the tree; what its place held before lies there
again. A cache belongs to the user who builds: it is a tar archive below the user's cache directory, and of two builds
at the same time the last one's is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from blake3 import blake3

from sandbox import paths
from sandbox.errors import Invalid, NotFound
from sandbox.image.run_mounts import BuildMount
from sandbox.messages import CopyRequest, CopyResult
from sandbox.patterns import PatternList
from sandbox.sdk import key_agent
from sandbox.sdk.handle import Sandbox
from sandbox.sdk.sources.context import BuildContext
from sandbox.tree import host_files

CopyCall = Callable[[Sandbox, CopyRequest, Callable[[IO[bytes]], None] | None], Awaitable[CopyResult]]
Bind = Callable[[BuildMount, str], Awaitable[None]]  # copy what a mount names to a target
MAX_SECRET = 1 << 20  # bytes
CHUNK = 1 << 20


def archive_of(mount: BuildMount) -> Path:
    """Where a cache lies between builds."""
    return paths.cache() / "mounts" / f"{blake3(mount.id.encode()).hexdigest()[:32]}.tar"


@contextlib.asynccontextmanager
async def mounted(
    sandbox: Sandbox,
    line: int,
    mounts: Sequence[BuildMount],
    given: Mapping[str, bytes],
    agents: Mapping[str, Path],
    copy: CopyCall,
    bind: Bind,
) -> AsyncIterator[dict[str, str]]:
    """Around the command of a RUN: the variables that its secrets are. Nothing is taken out where the body fails:
    then the sandbox is not used further."""
    variables: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        for mount in mounts:
            if mount.kind == "secret":
                if mount.id in given:
                    await stack.enter_async_context(_secret(sandbox, mount, given[mount.id], copy))
                    if mount.variable:
                        variables[mount.variable] = given[mount.id].decode("utf-8", "surrogateescape")
                elif mount.required:
                    here = f"line {line}: the secret {mount.id} is required"
                    raise Invalid(here, hint=f"--secret id={mount.id},src=FILE")
                continue
            if mount.kind == "ssh":
                if mount.id in agents:
                    await stack.enter_async_context(_agent(sandbox, mount, agents[mount.id], copy))
                elif mount.required:
                    raise Invalid(f"line {line}: the agent of keys {mount.id} is required", hint=f"--ssh {mount.id}")
                continue
            await stack.enter_async_context(_set_aside(sandbox, mount.target))
            if mount.kind == "bind":
                await bind(mount, mount.target)
            else:
                await copy(sandbox, _directory(mount), None)
            if mount.kind == "cache":
                await stack.enter_async_context(_cache(sandbox, mount, copy, bind))
        yield variables


def _directory(mount: BuildMount) -> CopyRequest:
    mode = f"{mount.mode:o}"
    return CopyRequest(target=mount.target, make_directory=True, directory_owner=mount.owner, mode=mode)


@contextlib.asynccontextmanager
async def _set_aside(sandbox: Sandbox, target: str) -> AsyncIterator[None]:
    """What lies at `target` is elsewhere during it, and there again afterwards; what comes in its place is removed,
    with the directories that were made for it."""
    aside = f"/.pagurus-aside-{secrets.token_hex(4)}"
    above, made = target, ""
    while (above := posixpath.dirname(above)) != "/":
        if await sandbox.files.exists(above):
            break
        made = above
    there = True
    try:
        await sandbox.files.move(target, aside)
    except NotFound:
        there = False
    yield
    with contextlib.suppress(NotFound):  # the command may have removed it
        await sandbox.files.remove(target, recursive=True)
    if there:
        await sandbox.files.move(aside, target)
    if made:
        await _remove_empty(sandbox, posixpath.dirname(target), made)


async def _remove_empty(sandbox: Sandbox, directory: str, top: str) -> None:
    """Directories from `directory` up to `top`, as far as the command has put nothing into them."""
    while directory.startswith(top):
        try:
            if await sandbox.files.list(directory):
                return
            await sandbox.files.remove(directory)
        except NotFound:
            pass
        directory = posixpath.dirname(directory)


@contextlib.asynccontextmanager
async def _cache(sandbox: Sandbox, mount: BuildMount, copy: CopyCall, bind: Bind) -> AsyncIterator[None]:
    retained = archive_of(mount)
    if retained.is_file():
        await copy(sandbox, CopyRequest(sources=["/"], target=mount.target), lambda out: _send(retained, out))
    elif mount.origin:
        await bind(mount, mount.target)
    yield
    retained.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with host_files.fresh_directory(retained.parent) as fresh:
        with host_files.new_file(fresh, retained.name) as file:
            async for part in sandbox.files.archive(mount.target):
                await asyncio.to_thread(file.write, part)
        os.replace(fresh / retained.name, retained)


def _send(file: Path, out: IO[bytes]) -> None:
    with file.open("rb") as source:
        shutil.copyfileobj(source, out, CHUNK)


@contextlib.asynccontextmanager
async def _agent(sandbox: Sandbox, mount: BuildMount, agent: Path, copy: CopyCall) -> AsyncIterator[None]:
    async with _set_aside(sandbox, mount.target):
        await copy(sandbox, CopyRequest(target=posixpath.dirname(mount.target), make_directory=True), None)
        async with key_agent.forwarded(sandbox, mount.target, agent, mount.mode, mount.owner):
            yield


@contextlib.asynccontextmanager
async def _secret(sandbox: Sandbox, mount: BuildMount, content: bytes, copy: CopyCall) -> AsyncIterator[None]:
    if len(content) > MAX_SECRET:
        raise Invalid(f"the secret {mount.id} is larger than {MAX_SECRET} bytes", hint="COPY it, if it is no secret")
    if not mount.target:
        yield
        return
    async with _set_aside(sandbox, mount.target):
        with host_files.fresh_directory() as directory:
            with host_files.new_file(directory, "secret") as file:
                await asyncio.to_thread(file.write, content)
            selection = await asyncio.to_thread(BuildContext(directory, PatternList([])).select, ["secret"], 0)
            mode = f"{mount.mode:o}"
            above = CopyRequest(target=posixpath.dirname(mount.target), make_directory=True)
            await copy(sandbox, above, None)
            request = CopyRequest(sources=["secret"], target=mount.target, owner=mount.owner, mode=mode)
            await copy(sandbox, request, selection.pack)
        yield
