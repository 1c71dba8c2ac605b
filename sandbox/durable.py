"""Files that are there as a whole or not at all, and names that survive the loss of power."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.descriptors import closing


def publish(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = True) -> Path:
    """Replace the file `path`. Not `durable`: a loss of power may leave it empty; a killed process never does."""
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)  # of a process that was killed
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)  # of a full disk: what is half written takes no space
    if durable:
        sync(path.parent)
    return path


def sync(path: Path) -> None:
    """A file's content, or a directory's names, survive the loss of power from now on."""
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)
