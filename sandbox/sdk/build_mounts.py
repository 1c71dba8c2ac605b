"""What a RUN of an image build finds and leaves out of the image: caches and secrets (``RUN --mount``).

Owns: putting them in before the command and taking them out after it. Does not own: the words of a Dockerfile
(:mod:`sandbox.image.dockerfile`). Guarantee: when the step's checkpoint is taken, nothing of a cache or of a secret is
in the tree; what a cache's directory held before lies there again. A cache belongs to the user who builds: it is a tar
archive below the user's cache directory, and of two builds at the same time the last one's is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from sandbox import paths
from sandbox.errors import Invalid, NotFound
from sandbox.image.dockerfile import BuildMount, Instruction
from sandbox.sdk.handle import Sandbox
from sandbox.tree import host_files

Execute = Callable[[Sequence[str]], Awaitable[None]]  # a command as root; raises Invalid when it fails
MAX_SECRET = 1 << 20  # bytes


def archive_of(mount: BuildMount) -> Path:
    """Where a cache lies between builds."""
    return paths.cache() / "mounts" / f"{blake3(mount.id.encode()).hexdigest()[:32]}.tar"


@contextlib.asynccontextmanager
async def mounted(
    sandbox: Sandbox, instruction: Instruction, given: Mapping[str, bytes], execute: Execute
) -> AsyncIterator[dict[str, str]]:
    """Around the command of a RUN: the variables that its secrets are. Nothing is taken out where the body fails:
    then nobody goes on with the sandbox."""
    variables: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        for mount in instruction.mounts:
            if mount.kind == "cache":
                await stack.enter_async_context(_cache(sandbox, mount, execute))
            elif mount.id in given:
                await stack.enter_async_context(_secret(sandbox, mount, given[mount.id], execute))
                if mount.variable:
                    variables[mount.variable] = given[mount.id].decode("utf-8", "surrogateescape")
            elif mount.required:
                here = f"line {instruction.line}: the secret {mount.id} is required"
                raise Invalid(here, remedy=f"--secret id={mount.id},src=FILE")
        yield variables


@contextlib.asynccontextmanager
async def _set_aside(sandbox: Sandbox, target: str) -> AsyncIterator[None]:
    """What lies at `target` is elsewhere meanwhile, and there again afterwards; what comes in its place is removed."""
    aside = f"/.pagurus-aside-{secrets.token_hex(4)}"
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


@contextlib.asynccontextmanager
async def _cache(sandbox: Sandbox, mount: BuildMount, execute: Execute) -> AsyncIterator[None]:
    inside, kept = f"/.pagurus-cache-{secrets.token_hex(4)}", archive_of(mount)
    target = shlex.quote(mount.target)
    async with _set_aside(sandbox, mount.target):
        await sandbox.files.mkdir(mount.target, mode=mount.mode)
        await execute(["chown", mount.owner, mount.target])
        if kept.is_file():
            await sandbox.files.upload(kept, inside)
            unpack = f"tar -xpf {inside}/{kept.name} -C {target} --numeric-owner"
            await execute(["/bin/sh", "-c", f"{unpack}; rm -rf {inside}"])
        yield
        pack = f"mkdir {inside} && tar -cf {inside}/{kept.name} -C {target} --numeric-owner ."
        await execute(["/bin/sh", "-c", pack])
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with host_files.fresh_directory(kept.parent) as fresh:
            with host_files.new_file(fresh, kept.name) as file:  # its content: the command may have put a link there
                async for part in sandbox.files.stream(f"{inside}/{kept.name}"):
                    await asyncio.to_thread(file.write, part)
            os.replace(fresh / kept.name, kept)
        await sandbox.files.remove(inside, recursive=True)


@contextlib.asynccontextmanager
async def _secret(sandbox: Sandbox, mount: BuildMount, content: bytes, execute: Execute) -> AsyncIterator[None]:
    if len(content) > MAX_SECRET:
        raise Invalid(f"the secret {mount.id} is larger than {MAX_SECRET} bytes")
    if not mount.target:
        yield
        return
    folder = mount.target.rpartition("/")[0] or "/"
    made = folder != "/"
    with contextlib.suppress(NotFound):
        await sandbox.files.stat(folder)
        made = False
    async with _set_aside(sandbox, mount.target):
        await sandbox.files.write(mount.target, content, mode=mount.mode)
        await execute(["chown", mount.owner, mount.target])
        yield
    if made:
        await sandbox.files.remove(folder, recursive=True)
