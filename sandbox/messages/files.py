"""SDK <-> daemon: the file tree of a sandbox."""

from __future__ import annotations

from typing import Literal

import msgspec


class FileInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one entry of a directory."""

    name: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int = 0  # bytes
    mode: int = 0  # permission bits
    modified_at: float = 0.0  # seconds since the epoch


class Change(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one difference of the file tree."""

    path: str
    kind: Literal["added", "modified", "removed"]
