"""What a file snapshot holds, hashed, so that a flipped byte is found and content is known by its hash.

A record is two hashes: of the attributes (mode, owner, size, times of content, links, device, extended attributes)
and of the content (of a file :mod:`sandbox.tree.sparse`, target of a symlink, names and inodes of a directory). The
digest of a snapshot inherits from the digest of the one before: only inodes that the kernel says were changed since are
read again (``transid`` of the inode item), so the cost follows the change. Inode numbers of a subvolume are never used
twice.

Guarantee: :func:`damage` reads every inode that the snapshot has from the disk, past the page cache, and names what
is not as it was when it was hashed. Of files beyond MAX_HASHED bytes of data in one checkpoint, only the attributes
are hashed; their content is read, so that the checksums of btrfs find damage, and their names say so (`unhashed`):
what they share is read once, since a file of a tebibyte may lie on a mebibyte of the disk.
Holes are never read, and a tree may be as deep as it likes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from sandbox import durable
from sandbox.descriptors import closing
from sandbox.errors import CheckpointFailed, Invalid
from sandbox.names import reported
from sandbox.tree import btrfs, safe_path, sparse
from sandbox.tree.extents import shared_once
from sandbox.tree.walk import WalkEntry, walk

SUFFIX = ".tree"
FORMAT = 2
ATTRIBUTES, CONTENT = 16, 32  # bytes of the two hashes
UNHASHED = b"\xff" * CONTENT
MAX_HASHED = 512 << 20  # bytes of file content hashed for one checkpoint
COMPLETE = (1 << 64) - 1  # or all of it
ROOT_INODE = 256
MAX_PATH = 4000  # bytes of a path by which an inode is reached; the kernel returns and takes no longer ones
WALK_FROM = 512  # changed inodes from which one walk is cheaper than asking for each path
MAX_SIZE = 1 << 30  # bytes of an unpacked digest

_INODE_ITEM = 1
_INO_PATHS = (3 << 30) | (56 << 16) | (0x94 << 8) | 35


class DigestFile(msgspec.Struct):
    """On disk: behind a blake3 of it, zstd of this as MessagePack."""

    format: int
    inodes: bytes
    attributes: bytes
    contents: bytes


@dataclass(frozen=True)
class Digest:
    """Records by inode: numbers [n] uint64 ascending, attributes [n, 16] uint8, contents [n, 32] uint8."""

    inodes: np.ndarray
    attributes: np.ndarray
    contents: np.ndarray

    def save(self, path: Path) -> int:
        """Publish as `path`; durable on return. Returns its size."""
        raw = DigestFile(FORMAT, self.inodes.tobytes(), self.attributes.tobytes(), self.contents.tobytes())
        packed = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(raw))
        durable.publish(path, blake3(packed).digest() + packed)
        return len(packed) + CONTENT

    @classmethod
    def load(cls, path: Path) -> Digest:
        """Raises CheckpointFailed when it is not what was saved, FileNotFoundError when there is none."""
        content = path.read_bytes()
        try:
            if blake3(content[CONTENT:]).digest() != content[:CONTENT]:
                raise ValueError("it has changed on disk")
            unpacked = zstandard.ZstdDecompressor().decompress(content[CONTENT:], max_output_size=MAX_SIZE)
            raw = msgspec.msgpack.decode(unpacked, type=DigestFile)
            if raw.format != FORMAT:
                raise ValueError(f"it has format {raw.format}, this version reads {FORMAT}")
            inodes = np.frombuffer(raw.inodes, dtype=np.uint64)
            attributes = np.frombuffer(raw.attributes, dtype=np.uint8).reshape(len(inodes), ATTRIBUTES)
            contents = np.frombuffer(raw.contents, dtype=np.uint8).reshape(len(inodes), CONTENT)
        except (ValueError, zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise CheckpointFailed(f"{path.name}: {error}", hint="the digest of its files is damaged") from error
        return cls(inodes, attributes, contents)

    @property
    def content_hashes(self) -> set[bytes]:
        """The hashes of all content there is, of files and others."""
        return {row.tobytes() for row in self.contents}


def digest(snapshot: Path, before: tuple[Path, Digest] | None, *, limit: int = MAX_HASHED) -> Digest:
    """Hash `snapshot`; `before` is an older snapshot of the same line and its digest. Blocks.

    Of content at most `limit` bytes are hashed; the rest is recorded as UNHASHED.
    """
    since = btrfs.created_in(before[0]) + 1 if before is not None else 0
    with btrfs.opened(snapshot) as root:
        present = np.fromiter((number for number, _ in _inodes(root, 0)), dtype=np.uint64)
        changed = {number for number, touched in _inodes(root, since) if touched >= since} if since else None
        records: dict[int, tuple[bytes, bytes]] = {}
        budget = limit
        old = before[1] if before is not None else _EMPTY
        if changed is not None:
            changed |= set(np.setdiff1d(present, old.inodes).tolist())
        for place in _places(root, present.tolist() if changed is None else changed):
            facts, content, size = _record(place, budget)
            budget -= size
            records[place.number] = facts, content
    retained = np.isin(old.inodes, present) & ~np.isin(old.inodes, np.fromiter(records, dtype=np.uint64))
    inodes = np.concatenate([old.inodes[retained], np.fromiter(records, dtype=np.uint64)])
    attributes = np.concatenate([old.attributes[retained], _rows((item[0] for item in records.values()), ATTRIBUTES)])
    contents = np.concatenate([old.contents[retained], _rows((item[1] for item in records.values()), CONTENT)])
    order = np.argsort(inodes)
    return Digest(inodes[order], attributes[order], contents[order])


def damage(snapshot: Path, expected: Digest) -> list[str]:
    """What of `snapshot` is not as it was hashed, by name; [] when all is whole. Reads everything. Blocks."""
    wrong: list[str] = []
    root = os.open(snapshot, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        present = [number for number, _ in _inodes(root, 0)]
        missing = np.setdiff1d(expected.inodes, np.array(present, dtype=np.uint64))
        wrong += [f"inode {number} is missing" for number in missing.tolist()]
        result = set()
        unhashed = expected.inodes[(expected.contents == np.frombuffer(UNHASHED, np.uint8)).all(axis=1)]
        once = shared_once(root, set(unhashed.tolist())) if len(unhashed) else {}
        for place in _places(root, present):
            result.add(place.number)
            if trouble := _trouble(place, expected, once.get(place.number, [])):
                wrong.append(f"{place.reported} {trouble}")
        wrong += [f"inode {number} has no name" for number in set(present) - result]
    except OSError as error:
        wrong.append(f"its tree cannot be read: {os.strerror(error.errno or 0)}")
    finally:
        os.close(root)
    return wrong


def _trouble(place: _Place, expected: Digest, once: list[tuple[int, int]]) -> str:
    """How an inode is not as it was hashed; "" when it is. `once`: what is read of one whose content was not hashed."""
    at = int(np.searchsorted(expected.inodes, np.uint64(place.number)))
    if at == len(expected.inodes) or int(expected.inodes[at]) != place.number:
        return "was not there"
    existing = expected.contents[at].tobytes()
    try:
        attributes, content, _ = _record(place, 0 if existing == UNHASHED else COMPLETE, fresh=True)
        if expected.attributes[at].tobytes() != attributes:
            return "has other attributes"
        if existing == UNHASHED:
            with safe_path.regular(place.holder, place.name) as file:
                sparse.read_once(file, once)
        if existing in (UNHASHED, content):
            return ""
    except (OSError, Invalid) as error:
        return f"cannot be read: {os.strerror(error.errno or 0) if isinstance(error, OSError) else error.message}"
    return "has other content"


def _rows(values: Iterable[bytes], width: int) -> np.ndarray:
    return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(-1, width)


_EMPTY = Digest(np.zeros(0, np.uint64), np.zeros((0, ATTRIBUTES), np.uint8), np.zeros((0, CONTENT), np.uint8))


# ---------------------------------------------------------------------------- one inode


@dataclass(frozen=True)
class _Place:
    """Where an inode is found: by this name, or short path, in an open directory. Valid until the next is requested."""

    number: int
    holder: int
    name: str
    step: WalkEntry | None = None  # of a walk

    @property
    def reported(self) -> str:
        """Its path, to be shown."""
        return reported(self.step.path if self.step else "/" if self.name == "." else self.name)


def _record(place: _Place, budget: int, *, fresh: bool = False) -> tuple[bytes, bytes, int]:
    """Hashes of the attributes and the content of an inode, and how many bytes of content were read for that."""
    result = os.stat(place.name, dir_fd=place.holder, follow_symlinks=False)
    regular = stat.S_ISREG(result.st_mode)
    full = safe_path.named(place.holder, place.name)
    names = sorted(os.listxattr(full, follow_symlinks=False))
    facts = (
        result.st_mode,
        result.st_uid,
        result.st_gid,
        result.st_size if regular else 0,
        result.st_mtime_ns,
        result.st_nlink if not stat.S_ISDIR(result.st_mode) else 0,
        result.st_rdev,
        [(name, os.getxattr(full, name, follow_symlinks=False)) for name in names],
    )
    attributes = blake3(repr(facts).encode()).digest(ATTRIBUTES)
    if regular:
        size = sparse.data_size(result)
        if size > budget:
            return attributes, UNHASHED, 0
        with safe_path.regular(place.holder, place.name) as file:
            return attributes, sparse.of_file(file, fresh=fresh), size
    if stat.S_ISLNK(result.st_mode):
        return attributes, blake3(os.fsencode(os.readlink(place.name, dir_fd=place.holder))).digest(), 0
    if stat.S_ISDIR(result.st_mode):
        return attributes, _hash_directory(place), 0
    return attributes, bytes(CONTENT), 0


def _hash_directory(place: _Place) -> bytes:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with closing(safe_path.openat2(place.holder, place.name, flags)) as fd, os.scandir(fd) as entries:
        listed = sorted((entry.name, entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries)
    return blake3(repr(listed).encode()).digest()


# ---------------------------------------------------------------------------- what btrfs knows


def _inodes(root: int, since: int) -> Iterator[tuple[int, int]]:
    """Inode numbers of a subvolume and the transaction that last changed each, out of blocks newer than `since`."""
    for inode, kind, _, data in btrfs.items(root, since=since):
        if kind == _INODE_ITEM and inode >= ROOT_INODE:
            (links,) = struct.unpack_from("<I", data, 40)
            if links:  # without: deleted, and still open when the snapshot was taken
                yield inode, struct.unpack_from("<Q", data, 8)[0]


def _places(root: int, inodes: Iterable[int]) -> Iterator[_Place]:
    """Where to find each of these inodes that has a name; "." is the root itself."""
    target = set(inodes)
    if len(target) < WALK_FROM:
        for number in sorted(target):
            path = path_of(root, number)
            if path is not None:
                yield _Place(number, root, os.fsdecode(path) or ".")
                target.discard(number)
    if not target:
        return
    if ROOT_INODE in target:
        yield _Place(ROOT_INODE, root, ".")
    for step in walk(root):
        (holder,), (result,) = step.parents, step.result
        if result is not None and result.st_ino in target:
            target.discard(result.st_ino)
            yield _Place(result.st_ino, holder, step.name, step)


def path_of(root: int, inode: int) -> bytes | None:
    """A path below the root of a subvolume that leads to an inode; None: there is none, or too long a one."""
    if inode == ROOT_INODE:
        return b""
    path = next(iter(paths_of(root, inode)), None)
    return path if path is None or len(path) <= MAX_PATH else None


def paths_of(root: int, inode: int) -> list[bytes]:
    """The paths below the root of a subvolume that lead to an inode, as many as the kernel returns at once."""
    buffer = ctypes.create_string_buffer(1 << 16)
    args = bytearray(struct.pack("=QQ32xQ", inode, len(buffer), ctypes.addressof(buffer)))
    try:
        fcntl.ioctl(root, _INO_PATHS, args)
    except FileNotFoundError:
        return []
    (count,) = struct.unpack_from("=I", buffer, 8)
    offsets = struct.unpack_from(f"={count}Q", buffer, 16)  # relative to the first of them
    content = buffer.raw
    return [content[16 + at : content.index(b"\0", 16 + at)] for at in offsets]
