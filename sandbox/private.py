"""Directories and files that only their owner may read: what the daemon keeps of all sandboxes.

Guarantee: after a call no other user of the host reads what is there, also where it was there before; a directory that
may belong to another user is left alone and refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from sandbox.errors import Invalid

OTHERS = 0o077


def directory(path: Path, *, ours: Collection[str] = (), mode: int = 0o700) -> None:
    """Make `path` with at most `mode`, or take away what an existing one lets others do.

    `ours`: names of which one at least lies in an existing directory that is not empty. Raises Invalid.
    """
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    result = path.stat()
    if result.st_uid != os.geteuid():
        raise Invalid(
            f"{path} belongs to the user {result.st_uid}, who could read and replace what is kept there",
            hint=f"chown {os.geteuid()} {path}, or choose another directory",
        )
    if not result.st_mode & OTHERS & ~mode:
        return
    names = os.listdir(path)
    if stat.S_IMODE(result.st_mode) & stat.S_ISVTX or (names and not set(ours).intersection(names)):
        raise Invalid(
            f"other users may enter {path}, and it holds what is not of Pagurus",
            hint=f"choose a directory of its own, or chmod {mode:o} {path} if no one else needs it",
        )
    path.chmod(stat.S_IMODE(result.st_mode) & (mode | 0o700))


def file(path: Path) -> None:
    """Make `path`, empty, or take away what an existing one lets others do."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    if path.stat().st_mode & OTHERS:
        path.chmod(0o600)


def passable(place: Path, top: Path) -> None:
    """Make `place`, which CRIU reaches with a sandbox's rights: every directory up to `top` lets it pass."""
    place.mkdir(parents=True, exist_ok=True)
    for result in (place, *place.parents):
        result.chmod(0o711)
        if result == top:
            return
