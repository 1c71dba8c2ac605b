"""What restores of one capture have in common: made once for all forks that are made at a time.

Guarantee: a capture that is not being restored has no base.

::

    capture ▸ links, with all pages (layers.py) ▸ gate ▸ without the large memory (carried/memory.py)    once
            ▸ links for CRIU, in the directory of the sandbox's restores                          each restore
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.criu import rewrite
from sandbox.criu.carried import memory
from sandbox.criu.gate import gate
from sandbox.criu.gate.images import CriuImages


@dataclass(frozen=True)
class RestoreBase:
    """Images of a capture, none of which is written to."""

    complete: CriuImages  # with all pages, for the gate
    files: dict[str, Path]  # for CRIU, by name
    fill: memory.Fill | None  # memory that those lack

    def link(self, into: Path) -> None:
        """Make the directory `into` with the images for CRIU. Blocks."""
        into.mkdir(parents=True)
        for name, path in self.files.items():
            os.link(path, into / name)


@dataclass
class _SharedBase:
    directory: Path
    users: int = 0
    making: threading.Lock = field(default_factory=threading.Lock)
    base: RestoreBase | None = None


class RestoreBases:
    """Those of one host. Its methods block, and may be called from several threads."""

    def __init__(self, directory: Path) -> None:
        """`directory`: of its own, on the file system of captures."""
        self._directory = directory
        self._entries: dict[Path, _SharedBase] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def take(self, source: Path) -> RestoreBase:
        """The base of restores of a capture. Raises ImageRefused, OSError; else :meth:`leave` it once."""
        with self._lock:
            if (entry := self._entries.get(source)) is None:
                entry = self._entries[source] = _SharedBase(self._directory / str(next(self._numbers)))
            entry.users += 1
        try:
            with entry.making:
                if entry.base is None:
                    entry.base = _made(source, entry.directory)
                return entry.base
        except BaseException:
            self.leave(source)
            raise

    def leave(self, source: Path) -> None:
        """The restore is over; the last one removes the base."""
        with self._lock:
            entry = self._entries[source]
            entry.users -= 1
            if entry.users:
                return
            del self._entries[source]
        if entry.base is not None and entry.base.fill is not None:
            entry.base.fill.close()
        shutil.rmtree(entry.directory, ignore_errors=True)


def _made(source: Path, directory: Path) -> RestoreBase:
    shutil.rmtree(directory, ignore_errors=True)  # of a try that failed
    complete, lean = directory / "complete", directory / "lean"
    spread = rewrite.copy(source, complete, later=True)
    try:
        images = gate.of_directory(complete)
        gate.checked(images)  # before anything else reads them
    except BaseException:
        for pages in spread.values():
            pages.close()
        raise
    fill = memory.split(complete, lean, spread)
    files = {entry.name: Path(entry.path) for entry in os.scandir(complete)}
    if fill is not None:
        files |= {entry.name: Path(entry.path) for entry in os.scandir(lean)}
    return RestoreBase(images, files, fill)
