"""Content that is here already, for a checkpoint that comes without it.

Owns: finding it by its hash in local snapshots and process images, sharing it. Does not own: what is needed
(:mod:`daemon.store.imports`, which also compares what it got).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass, field

from blake3 import blake3

from daemon.checkpoints.capture import Places
from sandbox.content import dumpfile
from sandbox.content.renewed import Former
from sandbox.errors import Conflict, PagurusError
from sandbox.tree import hashing

_FICLONE = 0x40049409


@dataclass
class Sources:
    """Where content that is here already can be taken from: a snapshot and an inode in it, by hash."""

    places: Places
    former: Former | None = None
    found: dict[bytes, tuple[str, int]] = field(default_factory=dict)

    def look(self, needed: set[bytes]) -> None:
        """Find as much of `needed` as the digests of local snapshots tell."""
        missing = needed - self.found.keys()
        for path in sorted(self.places.stored.glob(f"*{hashing.SUFFIX}")):
            if not missing:
                return
            try:
                digest = hashing.Digest.load(path)
            except (FileNotFoundError, PagurusError):  # removed meanwhile, or damaged: content from elsewhere then
                continue
            name = path.name.removesuffix(hashing.SUFFIX)
            if not self.places.snapshot(name).is_dir():
                continue
            for place, row in enumerate(digest.contents):
                content = row.tobytes()
                if content in missing:
                    self.found[content] = name, int(digest.inodes[place])
                    missing.discard(content)

    def clone(self, content: bytes, into: int) -> bool:
        """Make the file `into` share the bytes of a local file with this content. False: there is none after all."""
        name, inode = self.found.get(content, ("", 0))
        if not name:
            return False
        try:
            root = os.open(self.places.snapshot(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            path = hashing.path_of(root, inode)
            if path is None:
                return False
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
            try:
                fcntl.ioctl(into, _FICLONE, fd)
            finally:
                os.close(fd)
        except OSError:  # the snapshot went meanwhile
            return False
        finally:
            os.close(root)
        return True

    def image(self, content: bytes) -> bytes:
        """The process image with this content. Raises Conflict."""
        for image in () if self.former is None else self.former.hashed.images.values():
            if blake3(image).digest() == content:
                return image
        for path in sorted(self.places.stored.glob(f"*{dumpfile.SUFFIX}")):
            with contextlib.suppress(PagurusError, OSError):  # removed meanwhile or damaged: another may have it
                for image in dumpfile.read(path).images.values():
                    if blake3(image).digest() == content:
                        return image
        raise Conflict("the stream lacks a process image that is not here either", remedy="export it again in full")
