"""SDK <-> daemon: the file tree of a sandbox. Names that are not UTF-8 are shown as :mod:`sandbox.names` says."""

from __future__ import annotations

from typing import Literal

from sandbox.messages.brief import Brief


class FileInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one entry of a directory."""

    name: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int = 0  # bytes
    mode: int = 0  # permission bits
    modified_at: float = 0.0  # seconds since the epoch
    uid: int = 0  # owner, as the sandbox sees it
    gid: int = 0
    target: str | None = None  # of a symbolic link


class FileEvent(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: something happened below a watched directory.

    A move is a removal and a creation. `overflow` means that events were lost: look again. `end` is the
    last one: the directory is gone, or the sandbox was restored or died.
    """

    kind: Literal["created", "modified", "removed", "overflow", "end"]
    path: str = ""


class Change(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one difference of the file tree."""

    path: str
    kind: Literal["added", "modified", "removed"]
    why: str = ""  # the last call that is known to have changed it, and whose; only when requested


class FileVersion(Brief, kw_only=True, omit_defaults=True):
    """A path in one state of the file tree."""

    kind: Literal["absent", "file", "directory", "symlink", "other"]
    size: int = 0  # bytes
    mode: int = 0  # permission bits
    data: bytes = b""  # the beginning of a file; where a symbolic link points


class FileVersions(Brief, kw_only=True, omit_defaults=True):
    """daemon -> page: a path in two states of the file tree."""

    before: FileVersion
    after: FileVersion
