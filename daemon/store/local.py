"""Content that is here already, for a checkpoint that comes without it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from daemon.checkpoints.capture import Places
from sandbox.content import dumpfile
from sandbox.content.renewed import Former
from sandbox.descriptors import closing
from sandbox.errors import Conflict, PagurusError
from sandbox.tree import hashing

_FICLONE = 0x40049409


@dataclass
class Sources:
    """Where content that is here already can be taken from: a snapshot and an inode in it, by hash."""

    places: Places
    former: Former | None = None
    likely: list[str] = field(default_factory=list)  # checkpoints that are looked through first
    result: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    _images: dict[bytes, bytes] = field(default_factory=dict)
    _read: set[Path] = field(default_factory=set)  # dump files whose images are all in `_images`

    def poll(self, needed: set[bytes]) -> None:
        """Find as much of `needed` as the digests of local snapshots show."""
        missing = needed - self.result.keys()
        if not missing:
            return
        for path in self._stored(hashing.SUFFIX):
            name = path.name.removesuffix(hashing.SUFFIX)
            if (digest := self._digest(path, name)) is None or not self.places.snapshot(name).is_dir():
                continue
            for place, row in enumerate(digest.contents):
                content = row.tobytes()
                if content in missing:
                    self.result[content] = name, int(digest.inodes[place])
                    missing.discard(content)
            if not missing:
                return

    def _digest(self, path: Path, checkpoint: str) -> hashing.Digest | None:
        """None: removed since, or damaged: content from elsewhere then. A likely one is made if it is not there."""
        try:
            return hashing.Digest.load(path)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                if checkpoint in self.likely:  # not hashed yet
                    return hashing.digest(self.places.snapshot(checkpoint), None, limit=hashing.COMPLETE)
        except PagurusError:
            pass
        return None

    def _stored(self, suffix: str) -> Iterator[Path]:
        """The likely ones, then all."""
        first = [self.places.stored / f"{name}{suffix}" for name in self.likely]
        yield from first
        yield from sorted(set(self.places.stored.glob(f"*{suffix}")) - set(first))

    def clone(self, content: bytes, into: int) -> bool:
        """Make the file `into` share the bytes of a local file with this content. False: there is none after all."""
        name, inode = self.result.get(content, ("", 0))
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
            with closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)) as fd:
                fcntl.ioctl(into, _FICLONE, fd)
        except OSError:  # the snapshot was removed since
            return False
        finally:
            os.close(root)
        return True

    def images(self, target: set[bytes]) -> set[bytes]:
        """Those of some process images that the likely checkpoints have."""
        here: set[bytes] = set()
        for name in self.likely:
            if here < target:
                with contextlib.suppress(PagurusError, OSError):
                    packed = dumpfile.read(self.places.packed(name))
                    here |= target & {blake3(image).digest() for image in packed.images.values()}
        return here

    def image(self, content: bytes) -> bytes:
        """The process image with this content. Raises Conflict."""
        if self.former is not None and not self._images:
            self._images = {blake3(image).digest(): image for image in self.former.hashed.images.values()}
        for path in () if content in self._images else self._stored(dumpfile.SUFFIX):
            if path not in self._read:
                with contextlib.suppress(PagurusError, OSError):  # removed since or damaged: another may have it
                    result = {blake3(image).digest(): image for image in dumpfile.read(path).images.values()}
                    if content in result:
                        self._images |= result
                        self._read.add(path)
                        break
        if content in self._images:
            return self._images[content]
        raise Conflict("the stream lacks a process image that is not here either", hint="export it again in full")
