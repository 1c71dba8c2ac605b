"""A checkpoint as one stream: the format, its writer and its reader.

Everything here is pure: bytes in, values out, and the other way round.

::

    PAGURUS\\x01                                             magic and version
    HEAD      what the checkpoint is; image, settings for forks
    ENTRY*    the file tree, parents first: attributes, and the hash of each content
    IMAGE*    the process images but for pages: name, size, hash of the content
    LIST*     the hashes of the memory pages, in order, by page file
    PART*     content by hash: a piece of it at an offset, compressed; what is not sent is zero
    PAGES*    up to 64 pages, compressed; a page is known by its hash
    END       blake3 of everything before

A frame is its kind (1 byte), its length (4 bytes, little endian) and its payload, MessagePack but for PAGES and END.
A stream without PART and PAGES is a manifest: it says what is needed, so that the other side can say what it has.

Guarantee: the stream is untrusted. Every frame, every list and every size is bounded before memory is spent on it,
unpacking is bounded by what was announced, unknown kinds, a wrong order or anything after END raise Protocol, and
nothing counts before END has confirmed the hash. Names are single components; paths are made of parents by number.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
import zstandard
from blake3 import blake3

from sandbox.content.page_hashes import HASH, PAGE
from sandbox.content.pages import SLOTS
from sandbox.errors import Protocol
from sandbox.messages import Verdict

MAGIC = b"PAGURUS\x01"
FORMAT = 1
MAX_FRAME = 8 << 20  # bytes of one frame
PART_SIZE = 1 << 20  # bytes of content in one PART
MAX_ENTRIES = 1_000_000
ENTRIES_PER_FRAME = 2_000
HASHES_PER_FRAME = 32_768
MAX_PAGES = 1 << 28  # 1 TiB of memory
PLACE = 4  # bytes of a page's place in a list
MAX_NAME = 255
MAX_PATH = 4096
MAX_EXTENDED = 64 << 10  # bytes of all extended attributes of an entry
MAX_IMAGES = 100_000
MAX_ANCESTORS = 1_000
MAX_LABEL = 4096  # characters
MAX_NUMBER = 1 << 53  # of a turn, of a size
MAX_TIME = 1 << 40  # seconds since the epoch
MAX_IMAGE_BYTES = 2 << 30  # bytes of all process images but pages: deleted files that were open are among them
MAX_DEPTH = 1 << 17  # directories within one another

HAVE_MAGIC = b"PAGURUS-HAVE\x01"
HAVE_HASH = 16  # bytes of a hash in a list of what is there
MAX_HAVE = 1 << 30


class FrameKind(enum.IntEnum):
    HEAD = 1
    ENTRY = 2
    IMAGE = 3
    LIST = 4
    PART = 5
    PAGES = 6
    END = 7


class TransferHeader(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """exporter -> importer: what the checkpoint is."""

    id: str
    sandbox: str
    verdict: Verdict
    image: str  # its name there
    image_digest: str  # its content: the same must be here
    template: dict[str, Any]  # settings that forks inherit
    label: str | None = None
    ancestors: list[str] = []  # nearest first: it is hung below the first that is here
    turn: int = 0
    created_at: float = 0.0
    ipc: bool = False
    files: bool = False  # there is a file tree; else it is the empty one
    processes: bool = False  # there are process images; else a new init is all it takes
    raw_bytes: int = 0
    full_bytes: int = 0
    format: int = FORMAT
    programs: dict[str, Any] = {}  # its services, processes, terminals and sessions, by which a host knows them again


class Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """exporter -> importer: one name of the file tree. The first entry is the root, its own parent."""

    parent: int  # number of the entry of its directory
    name: bytes
    kind: Literal["d", "f", "l", "p", "s", "w"]  # directory, file, symlink, FIFO, socket, whiteout
    mode: int = 0  # permission bits
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    content: bytes = b""  # hash, of a file
    target: bytes = b""  # of a symlink
    same_as: int = -1  # number of an earlier entry that is another name of this file
    extended: dict[str, bytes] = {}
    inode: int = 0  # of a file: its number there, by which programs know again what they hold open


class ImageFile(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """exporter -> importer: one process image."""

    name: str
    size: int
    content: bytes


class PageList(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """exporter -> importer: hashes of the next pages of a page file; zeros for the zero page.

    With a count: it has so many pages, these at these places, and else those that it has in the checkpoint which the
    importer is to build upon, where the list has this hash.
    """

    name: str
    hashes: bytes
    places: bytes = b""  # 4 bytes each, little endian
    count: int = -1
    before: bytes = b""


class ContentPart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """exporter -> importer: a piece of a content."""

    content: bytes
    offset: int
    size: int
    packed: bytes  # zstd


BODIES: dict[FrameKind, Any] = {
    FrameKind.HEAD: msgspec.msgpack.Decoder(TransferHeader),
    FrameKind.ENTRY: msgspec.msgpack.Decoder(list[Entry]),
    FrameKind.IMAGE: msgspec.msgpack.Decoder(list[ImageFile]),
    FrameKind.LIST: msgspec.msgpack.Decoder(PageList),
    FrameKind.PART: msgspec.msgpack.Decoder(ContentPart),
}
_encode = msgspec.msgpack.Encoder().encode


class TransferWriter:
    """Makes the frames of one stream, in order."""

    def __init__(self) -> None:
        self._hash = blake3()
        self._packer = zstandard.ZstdCompressor(level=1)

    def start(self, head: TransferHeader) -> bytes:
        self._hash.update(MAGIC)
        return MAGIC + self.frame(FrameKind.HEAD, _encode(head))

    def entries(self, entries: list[Entry]) -> bytes:
        return self.frame(FrameKind.ENTRY, _encode(entries))

    def images(self, images: list[ImageFile]) -> bytes:
        return self.frame(FrameKind.IMAGE, _encode(images))

    def pages_of(self, name: str, hashes: bytes) -> Iterator[bytes]:
        step = HASHES_PER_FRAME * HASH
        for first in range(0, max(1, len(hashes)), step):
            yield self.frame(FrameKind.LIST, _encode(PageList(name, hashes[first : first + step])))

    def changed_pages_of(self, name: str, count: int, before: bytes, places: bytes, hashes: bytes) -> Iterator[bytes]:
        step = HASHES_PER_FRAME
        for first in range(0, max(1, len(places) // PLACE), step):
            some = places[first * PLACE : (first + step) * PLACE], hashes[first * HASH : (first + step) * HASH]
            yield self.frame(FrameKind.LIST, _encode(PageList(name, some[1], some[0], count, before)))

    def part(self, content: bytes, offset: int, data: bytes) -> bytes:
        return self.frame(FrameKind.PART, _encode(ContentPart(content, offset, len(data), self._packer.compress(data))))

    def pages(self, data: bytes) -> bytes:
        return self.frame(FrameKind.PAGES, self._packer.compress(data))

    def end(self) -> bytes:
        return self.frame(FrameKind.END, self._hash.digest())

    def frame(self, kind: FrameKind, payload: bytes) -> bytes:
        """A frame of a payload that is encoded already."""
        data = bytes([kind]) + len(payload).to_bytes(4, "little") + payload
        self._hash.update(data)
        return data


class Reader:
    """Takes a stream apart. Feed it bytes as they come; ask `ended` when there are no more."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._hash = blake3()
        self._started = False
        self._last = FrameKind.HEAD
        self._head_came = False
        self._entries = 0
        self._images = self._image_bytes = 0
        self._pages = 0
        self.received = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, Any]]:
        """The frames that are complete now: (kind, value). Raises Protocol."""
        self.received += len(data)
        self._buffer += data
        if not self._started:
            if len(self._buffer) < len(MAGIC):
                return
            if self._buffer[: len(MAGIC)] != MAGIC:
                raise Protocol("not an exported checkpoint, or of an unknown version")
            self._take(len(MAGIC))
            self._started = True
        while len(self._buffer) >= 5:
            if self.ended:
                raise Protocol("data after the end of the stream")
            size = int.from_bytes(self._buffer[1:5], "little")
            if size > MAX_FRAME:
                raise Protocol(f"a frame of {size} bytes")
            if len(self._buffer) < 5 + size:
                return
            kind = self._kind(self._buffer[0])
            if kind is FrameKind.END:
                if bytes(self._buffer[5 : 5 + size]) != self._hash.digest():
                    raise Protocol("the stream is damaged: its hash does not match")
                self.ended = True
                del self._buffer[: 5 + size]
                continue
            yield kind, self._value(kind, self._take(5 + size)[5:])

    def finish(self) -> None:
        """Raises Protocol unless the whole stream was read."""
        if not self.ended or self._buffer:
            raise Protocol("the stream broke off or has something behind its end", hint="export and send it again")

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._hash.update(taken)
        return taken

    def _kind(self, number: int) -> FrameKind:
        try:
            kind = FrameKind(number)
        except ValueError:
            raise Protocol(f"a frame of the unknown kind {number}") from None
        if not self._head_came and kind is not FrameKind.HEAD:
            raise Protocol("the stream does not begin with its head")
        in_order = kind >= self._last or {kind, self._last} == {FrameKind.PART, FrameKind.PAGES}
        if not in_order or (kind is FrameKind.HEAD and self._head_came):
            raise Protocol(f"a frame {kind.name} behind a frame {self._last.name}")
        return kind

    def _value(self, kind: FrameKind, payload: bytes) -> Any:
        self._last = kind
        if kind is FrameKind.HEAD:
            self._head_came = True
        if kind is FrameKind.PAGES:
            return unpack(payload, SLOTS * PAGE)
        try:
            value = BODIES[kind].decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Protocol(f"a frame {kind.name} cannot be read: {error}") from None
        match kind:
            case FrameKind.HEAD:
                check_head(value)
            case FrameKind.ENTRY:
                self._entries += len(value)
                self._need(len(value) <= ENTRIES_PER_FRAME and self._entries <= MAX_ENTRIES, "files")
                for number, entry in enumerate(value, self._entries - len(value)):
                    check_entry(number, entry)
            case FrameKind.IMAGE:
                self._images += len(value)
                self._image_bytes += sum(max(0, image.size) for image in value)
                self._need(self._images <= MAX_IMAGES and self._image_bytes <= MAX_IMAGE_BYTES, "process images")
                for image in value:
                    check_image(image)
            case FrameKind.LIST:
                check_page_file(value.name)
                reported = len(value.hashes) // HASH
                self._need(len(value.hashes) % HASH == 0, "odd hashes")
                self._need(len(value.places) == (PLACE * reported if value.count >= 0 else 0), "places")
                self._pages += reported
                self._need(max(self._pages, value.count) <= MAX_PAGES, "memory pages")
            case FrameKind.PART:
                self._need(len(value.content) == HASH and 0 <= value.size <= PART_SIZE and value.offset >= 0, "content")
        return value

    @staticmethod
    def _need(condition: bool, what: str) -> None:
        if not condition:
            raise Protocol(f"the stream holds too many or too large {what}")


def unpack(packed: bytes, limit: int) -> bytes:
    """Decompress at most `limit` bytes."""
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed)
        data = reader.read(limit + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Protocol(f"compressed data cannot be read: {error}") from None
    if len(data) > limit:
        raise Protocol(f"compressed data holds more than {limit} bytes")
    return data


# ---------------------------------------------------------------------------- what values may be

RETAINED = ("user.", "security.capability")  # extended attributes that travel
ACLS = ("system.posix_acl_access", "system.posix_acl_default")  # and those that hold ids
OPAQUE = "trusted.overlay.opaque"  # this directory hides the one below
REDIRECT = "trusted.overlay.redirect"  # this directory continues one of the image that had another name
HOST_ONLY = ("trusted.overlay.origin", "trusted.overlay.impure", "trusted.overlay.nlink", "trusted.overlay.uuid")
ACL_USER, ACL_GROUP, NOBODY = 0x02, 0x08, 0xFFFFFFFF  # tags with an id, and the id of the others
MAX_ID = 65_536  # an upper holds ids as the sandbox sees them


CHECKPOINT_ID, SANDBOX_ID = re.compile(r"c-[0-9a-f]{6,40}"), re.compile(r"s-[0-9a-f]{6,40}")


def check_head(head: TransferHeader) -> None:
    """Its ids become names of files; its settings are checked by their user."""
    if head.format != FORMAT:
        raise Protocol(f"the stream has format {head.format}, this version reads {FORMAT}")
    if not (0 <= head.created_at < MAX_TIME and all(0 <= n < MAX_NUMBER for n in _numbers(head))):
        raise Protocol("the stream's head holds an impossible number")
    if len(head.ancestors) > MAX_ANCESTORS or len(head.label or "") > MAX_LABEL or len(head.image) > MAX_NAME:
        raise Protocol("the stream's head is too long")
    names = [head.id, *head.ancestors]
    if not SANDBOX_ID.fullmatch(head.sandbox) or not all(map(CHECKPOINT_ID.fullmatch, names)):
        raise Protocol("the stream holds an impossible id")


def _numbers(head: TransferHeader) -> tuple[int, ...]:
    return head.turn, head.raw_bytes, head.full_bytes


def check_name(name: bytes) -> None:
    """A single component, that leads nowhere else."""
    if not name or len(name) > MAX_NAME or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise Protocol(f"{name[:40]!r} is not the name of a file")


def check_entry(number: int, entry: Entry) -> None:
    """Raises Protocol unless an entry can be made without harm; its references are checked by :class:`Tree`."""
    if number == 0:
        if entry.kind != "d" or entry.parent != 0 or entry.name:
            raise Protocol("the first entry is not the root")
    else:
        check_name(entry.name)
        if not 0 <= entry.parent < number or entry.same_as >= number:
            raise Protocol(f"entry {number} refers to a later one")
    if not (0 <= entry.mode <= 0o7777 and 0 <= entry.uid < MAX_ID and 0 <= entry.gid < MAX_ID and entry.size >= 0):
        raise Protocol(f"entry {number} has impossible attributes")
    if not 0 <= entry.inode < MAX_NUMBER:
        raise Protocol(f"entry {number} has an impossible inode number")
    if not -(1 << 62) < entry.mtime_ns < 1 << 62:
        raise Protocol(f"entry {number} has an impossible time")
    if entry.kind == "f" and entry.same_as < 0 and len(entry.content) != (HASH if entry.size else 0):
        raise Protocol(f"entry {number} has no content hash")
    if entry.kind == "l" and entry.same_as < 0 and (not 0 < len(entry.target) < 4096 or b"\0" in entry.target):
        raise Protocol(f"entry {number} is no symbolic link")
    total = 0
    for name, value in entry.extended.items():
        total += len(name) + len(value)
        opaque = name == OPAQUE and entry.kind == "d" and value in (b"y", b"x")
        moved = name == REDIRECT and entry.kind == "d" and _stays_below(value)
        plain = name.startswith(RETAINED) and entry.kind in "df" and len(name) <= MAX_NAME and "\0" not in name
        rights = name in ACLS[: 2 if entry.kind == "d" else 1] and entry.kind not in "lw" and _names_own_ids(value)
        if not (opaque or moved or plain or rights) or total > MAX_EXTENDED:
            raise Protocol(f"entry {number} has the extended attribute {name[:40]!r}")


def _names_own_ids(acl: bytes) -> bool:
    """Whether an access control list (linux/posix_acl_xattr.h) names no user beyond a sandbox's range.

    The rest of its grammar is the kernel's, which refuses what it cannot read.
    """
    if len(acl) < 4 or len(acl) % 8 != 4 or int.from_bytes(acl[:4], "little") != 2:
        return False
    return all(
        identity < MAX_ID if tag in (ACL_USER, ACL_GROUP) else identity in (0, NOBODY)
        for tag, _, identity in struct.iter_unpack("<HHI", acl[4:])
    )


def _stays_below(target: bytes) -> bool:
    """Whether a redirection names a directory of the layers below: a neighbour, or a path from their root."""
    names = target[1:].split(b"/") if target.startswith(b"/") else [target]
    return len(target) <= MAX_PATH and all(
        name not in (b"", b".", b"..") and b"/" not in name and b"\0" not in name for name in names
    )


def check_image(image: ImageFile) -> None:
    """A process image has the plain name of a file, and is no page file."""
    name = image.name.encode()
    check_name(name)
    if not name.endswith(b".img") or name.startswith(b"pages-") or image.size < 0:
        raise Protocol(f"{image.name[:40]!r} is not the name of a process image")
    if len(image.content) != HASH:
        raise Protocol(f"{image.name[:40]!r} has no content hash")


def check_page_file(name: str) -> None:
    number = name.removeprefix("pages-").removesuffix(".img")
    if name != f"pages-{number}.img" or not number.isascii() or not number.isdigit() or len(number) > 9:
        raise Protocol(f"{name[:40]!r} is not the name of a page file")


class Tree:
    """The entries of a stream, as paths. A directory is followed by all that is in it, before anything else."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._above: list[int] = []  # the directories that lead to the last entry
        self._names: set[tuple[int, bytes]] = set()

    def add(self, entry: Entry) -> None:
        number = len(self.entries)
        parent = self.entries[entry.parent] if number else entry
        if parent.kind != "d":
            raise Protocol(f"entry {number} lies in something that is no directory")
        if entry.same_as >= 0 and (entry.kind == "d" or self.entries[entry.same_as].kind != entry.kind):
            raise Protocol(f"entry {number} is another name of something else")
        while self._above and self._above[-1] != entry.parent:
            self._above.pop()
        if number and not self._above:
            raise Protocol(f"entry {number} lies in a directory that was left already")
        if len(self._above) > MAX_DEPTH:
            raise Protocol("the file tree is too deep")
        if entry.kind == "d":
            self._above.append(number)
        if number and (entry.parent, entry.name) in self._names:
            raise Protocol(f"entry {number} is there twice")
        self._names.add((entry.parent, entry.name))
        self.entries.append(entry)

    def path(self, number: int) -> bytes:
        """Path below the root; b"" for the root itself."""
        parts = []
        while number:
            parts.append(self.entries[number].name)
            number = self.entries[number].parent
        return b"/".join(reversed(parts))


# ---------------------------------------------------------------------------- what the other side has


class Have(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """importer -> exporter: what need not be sent: beginnings of hashes, one after another."""

    pages: bytes = b""
    contents: bytes = b""

    @classmethod
    def of(cls, pages: Iterable[bytes], contents: Iterable[bytes]) -> Have:
        return cls(*(b"".join(sorted({item[:HAVE_HASH] for item in side})) for side in (pages, contents)))

    def joined(self, other: Have) -> Have:
        return Have(self.pages + other.pages, self.contents + other.contents)

    def sets(self) -> tuple[set[bytes], set[bytes]]:
        """(pages, contents)"""
        return _split(self.pages), _split(self.contents)


def _split(joined: bytes) -> set[bytes]:
    return {joined[first : first + HAVE_HASH] for first in range(0, len(joined), HAVE_HASH)}


def write_have(have: Have) -> bytes:
    return HAVE_MAGIC + zstandard.ZstdCompressor(level=1).compress(_encode(have))


def read_have(data: bytes) -> Have:
    """Raises Protocol when it is not what :func:`write_have` made."""
    if not data.startswith(HAVE_MAGIC):
        raise Protocol("this is no list of what a host has", hint="make one with `pagurus checkpoint have`")
    try:
        have = msgspec.msgpack.decode(unpack(data[len(HAVE_MAGIC) :], MAX_HAVE), type=Have)
    except msgspec.MsgspecError as error:
        raise Protocol(f"unreadable have-list: {error}") from None
    if len(have.pages) % HAVE_HASH or len(have.contents) % HAVE_HASH:
        raise Protocol("truncated have-list")
    return have
