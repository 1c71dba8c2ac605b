"""Directories that a sandbox has in addition to its file tree: of the host, read-only, or scratch of its own.

They are no part of checkpoints: a restore in place leaves scratch as it is, a fork begins with an empty one, and what a
turn does there needs no checkpoint of files.

Guarantee: nothing that belongs to the daemon is ever mounted into a sandbox, whatever links the source has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from daemon.auth import access
from daemon.catalogue import SandboxRow
from daemon.checkpoints.capture import Places
from sandbox.container.cgroup import parse_bytes
from sandbox.container.container import Bind
from sandbox.errors import Invalid
from sandbox.messages import Mount
from sandbox.tree import btrfs, quota

MAX_MOUNTS = 16  # as many as the shim takes
TAKEN = ("/", "/proc", "/dev", "/sys", "/etc", "/.pagurus")  # and below, but for "/"


def checked(mounts: Sequence[Mount]) -> None:
    """Raise Invalid unless these targets can be mounted next to one another. Pure."""
    if len(mounts) > MAX_MOUNTS:
        raise Invalid(
            f"{len(mounts)} mounts; at most {MAX_MOUNTS} are possible", hint="mount a directory above several of them"
        )
    targets: list[PurePosixPath] = []
    for mount in mounts:
        target = PurePosixPath(mount.target)
        if not mount.target.startswith("/") or ".." in target.parts or "\0" in mount.target:
            raise Invalid(
                f"a mount's target must be absolute and without '..', not {mount.target!r}", hint="such as /data"
            )
        for taken in TAKEN:
            if target == PurePosixPath(taken) or (taken != "/" and target.is_relative_to(taken)):
                raise Invalid(f"nothing can be mounted at {target}", hint="use a directory of its own, such as /data")
        for other in targets:
            if target.is_relative_to(other) or other.is_relative_to(target):
                raise Invalid(f"the mounts at {other} and {target} overlap", hint="use directories next to each other")
        targets.append(target)
        if mount.source is None and parse_bytes(mount.size) < 1 << 20:
            raise Invalid(f"scratch of less than 1 MiB: {mount.size!r}", hint="raise `size`")


async def admitted(mounts: Sequence[Mount], private: Sequence[Path]) -> list[Mount]:
    """The mounts of a new sandbox, with sources as they really are. Only an administrator mounts of the host."""
    if not mounts:
        return []
    checked(mounts)
    of_host = any(mount.source is not None for mount in mounts)
    if of_host and (refused := access.refusal(access.CALLER.get(), "admin")) is not None:
        raise refused
    return await asyncio.to_thread(resolved, mounts, private)


def resolved(mounts: Sequence[Mount], private: Sequence[Path]) -> list[Mount]:
    """The mounts with sources as they really are. Raises Invalid for what is missing, or holds or is in `private`."""
    result = []
    for mount in mounts:
        if mount.source is None:
            result.append(mount)
            continue
        if not mount.source.startswith("/") or not os.path.isdir(mount.source):  # False also for what is no path
            raise Invalid(f"{mount.source[:200]!r} is not a directory of this host", hint="give an absolute path")
        source = Path(os.path.realpath(mount.source))
        for own in (Path(os.path.realpath(path)) for path in private):
            if source.is_relative_to(own) or own.is_relative_to(source):
                raise Invalid(f"{mount.source} holds what belongs to the daemon ({own})", hint="mount a smaller part")
        result.append(Mount(target=mount.target, source=str(source)))
    return result


def binds(row: SandboxRow, places: Places) -> tuple[Bind, ...]:
    """What the container is to mount."""
    return tuple(
        Bind(Path(mount.source), mount.target)
        if mount.source is not None
        else Bind(places.tree(_name(row, number)), mount.target, read_only=False)
        for number, mount in enumerate(row.mounts)
    )


def scratch(row: SandboxRow) -> list[str]:
    """Names of its scratch subvolumes, in addition to its tree."""
    return [_name(row, number) for number, mount in enumerate(row.mounts) if mount.source is None]


def make(row: SandboxRow, places: Places) -> None:
    """Make what is missing of its scratch, empty. Blocks."""
    for number, mount in enumerate(row.mounts):
        path = places.tree(_name(row, number))
        if mount.source is None and not path.exists():
            make_scratch(path, mount.size)
            quota.join(path, row.id)


def make_scratch(path: Path, size: str | int) -> None:
    """An empty scratch of this size, in the pool. Blocks."""
    limited = quota.need(path.parent, size, Mount(target="").size)
    btrfs.create_subvolume(path)
    path.chmod(0o1777)
    if limited:
        btrfs.limit(path, parse_bytes(size))


def drop(row: SandboxRow, places: Places) -> None:
    """Remove its scratch. Blocks."""
    for name in scratch(row):
        if places.tree(name).exists():
            btrfs.delete_subvolume(places.tree(name))


def _name(row: SandboxRow, number: int) -> str:
    return f"{row.id}.scratch{number}"
