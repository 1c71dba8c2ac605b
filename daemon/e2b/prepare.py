"""Sandboxes as clients of E2B take them for granted: with a user called ``user`` who has a home.

Owns: making one of an image, with this user where the image has none, by the host: no program of the sandbox runs for
it, so an image needs no shell, and a creation waits for no process. Does not own: how a command runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
from typing import Any

import msgspec

from daemon.catalogue import CheckpointRow, Template, put_checkpoint
from daemon.e2b.steps import CPUS, MEMORY
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.container import users
from sandbox.errors import Conflict, Invalid, NotFound
from sandbox.image.store import StoredImage
from sandbox.messages import CreateRequest, ExecRequest, Limits
from sandbox.tree import files

NAME, HOME, SKELETON = "user", "/home/user", "/etc/skel"
FIRST = 1000  # the number that distributions give to the first person
MAX_FILE = 1 << 20  # bytes of one of the files below /etc


async def prepare(live: LiveSandbox) -> None:
    """`live` was just made. Its default user exists from now on."""
    if live.row.user != NAME:
        return
    if NAME in await asyncio.to_thread(users.existing_users, live.container.inside):
        return
    try:
        async with live.altering("create", users.PASSWD, users.GROUP, HOME):
            there = await asyncio.to_thread(_Maker(live).make)
        if there:
            await live.exec(ExecRequest(command=["chown", "-R", f"{NAME}:", HOME], user="root", cwd="/", timeout=60))
    except (Invalid, NotFound) as error:
        raise Conflict(
            f"no user could be made in this image: {error.message[:500]}",
            hint="give the image a USER of its own",
            sandbox=live.row.id,
        ) from error


async def made(host: Host, name: str, image: StoredImage, **options: Any) -> LiveSandbox:
    """A sandbox of an image, as E2B's clients expect one."""
    config = image.config
    limits = Limits()
    if cpus := config.labels.get(CPUS):
        limits = msgspec.structs.replace(limits, cpus=float(cpus))
    if memory := config.labels.get(MEMORY):
        limits = msgspec.structs.replace(limits, memory=f"{memory}MiB")
    info = await host.create(
        CreateRequest(
            image=name,
            limits=limits,
            user=config.user or "user",
            workdir=None if config.user or config.workdir != "/" else "/home/user",
            **options,
        )
    )
    live = host.live(info.id)
    try:
        await prepare(live)
    except BaseException:
        await asyncio.shield(host.remove(live.row.id))
        raise
    return live


async def retain(host: Host, live: LiveSandbox, row: CheckpointRow) -> None:
    """Let a checkpoint outlive its sandbox."""
    row.template = msgspec.structs.replace(Template.of(live.row), gateway=None)
    await host.services.catalogue.write([put_checkpoint(row)], durable=True)


class _Maker:
    """Makes the user. Blocks."""

    def __init__(self, live: LiveSandbox) -> None:
        self._inside, self._base = live.container.inside, live.row.uid_base

    def make(self) -> bool:
        """Whether there was a directory where the home is: what is in it belongs to others."""
        existing, groups = users.existing_users(self._inside), users.existing_groups(self._inside)
        taken = {user.uid for user in existing.values()} | {group.gid for group in groups.values()}
        number = next(number for number in itertools.count(FIRST) if number not in taken)
        shell = "/bin/bash" if self._has("/bin/bash") else "/bin/sh"
        self._append(users.PASSWD, f"{NAME}:x:{number}:{number}::{HOME}:{shell}\n")
        if NAME not in groups:
            self._append(users.GROUP, f"{NAME}:x:{number}:\n")
        if self._has("/etc/shadow"):
            self._append("/etc/shadow", f"{NAME}:*:19000:0:99999:7:::\n")
        if self._has("/etc/sudoers.d"):
            self._write("/etc/sudoers.d/user", f"{NAME} ALL=(ALL) NOPASSWD: ALL\n".encode(), mode=0o440)
        if self._has(HOME):
            return True
        if not self._has("/home"):
            files.make_directory(self._inside, self._base, "/home")
        files.make_directory(self._inside, self._base, HOME, owner=(number, number))
        with contextlib.suppress(NotFound):  # an image without a skeleton
            for entry in files.entries(self._inside, self._base, SKELETON):
                if entry.kind == "file":
                    content = self._read(f"{SKELETON}/{entry.name}")
                    self._write(f"{HOME}/{entry.name}", content, owner=(number, number))
        return False

    def _has(self, path: str) -> bool:
        with contextlib.suppress(NotFound, Invalid):
            files.status(self._inside, self._base, path)
            return True
        return False

    def _read(self, path: str) -> bytes:
        return files.read(self._inside, path, limit=MAX_FILE)

    def _append(self, path: str, line: str) -> None:
        before = self._read(path) if self._has(path) else b""
        end = b"" if not before or before.endswith(b"\n") else b"\n"
        files.replace(self._inside, self._base, path, before + end + line.encode())

    def _write(self, path: str, content: bytes, *, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
        files.write(self._inside, self._base, path, io.BytesIO(content), mode=mode, owner=owner)
