"""Streams of checkpoints, changed where it hurts: structure-aware mutations of what an exporter may say.

Frames are honest in form and end with the right hash, but for a share that is cut, flipped or in another order: so what
is said is looked at.
"""

from __future__ import annotations

import copy
import functools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import zstandard
from blake3 import blake3

from sandbox.content import transfer
from sandbox.content.page_hashes import PAGE
from sandbox.content.transfer import ContentPart, Entry, FrameKind, ImageFile, PageList, TransferHeader
from sandbox.messages import Verdict
from sandbox.tree import sparse
from tests.hostile.mutate_images import Files, Mutator

MIB = 1 << 20
ZEROS = bytes(PAGE)
MAX_PAGES = 64  # in one frame
CONTENTS = [b"x", b"one\n" * 500, bytes(range(256)) * 5000, bytes(3 * MIB) + b"end", b"{secret}"]
NAMES = [b"a", b"..", b".", b"", b"/", b"a/b", b"../../../etc/passwd", b"a\0b", b"\xff\xfe", b"n" * 255, b"n" * 256,
         b".wh.a", b"work", b"upper", b"links", b"0", b"1", b"proc", b".pagurus", b"init"]  # fmt: skip
TARGETS = [b"/", b"..", b"../../../../../../etc", b"/proc/self/root", b"a", b"", b"t" * 4095, b"t" * 4096, b"\0", b"."]
NUMBERS = [0, 1, -1, 2, 7, 255, 256, 4095, 4096, 4097, 65_535, 65_536, MIB, MIB + 1, 1 << 31, 1 << 32, 1 << 40,
           1 << 53, 1 << 62, (1 << 63) - 1, -(1 << 63), -(1 << 31)]  # fmt: skip
ATTRIBUTES = ["user.x", "user.", "user.overlay.opaque", "user.\0", "u" * 300, "security.capability",
              "security.selinux", "trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.overlay.metacopy",
              "trusted.overlay.origin", "trusted.x", "system.posix_acl_access", "system.posix_acl_default",
              "btrfs.compression"]  # fmt: skip
VALUES = [b"", b"y", b"x", b"/etc", b"../..", b"\x02\0\0\0", b"\x01\0\0\x02" + bytes(16), b"v" * 65_000, b"zlib"]
IDS = ["c-0123456789", "c-../../x", "", "c-" + "f" * 40, "c-" + "f" * 41, "s-0123456789", "c-0\n", "{checkpoint}"]
WORDS: list[Any] = ["", "..", "/etc", "../../..", "\0", "\ud7ff", "x" * 5000, 0, -1, 1 << 62, 1e308, None, True,
                    [], {}, ["/"], {"a": "b"}]  # fmt: skip
LIMITS = ("memory", "disk", "processes", "cpus", "open_files")
KINDS = "dflpsw"


@dataclass
class Stream:
    """What a stream says, taken apart."""

    head: dict[str, Any]
    entries: list[dict[str, Any]]
    images: list[dict[str, Any]] = field(default_factory=list)
    lists: list[tuple[Any, ...]] = field(default_factory=list)  # name, hashes, and maybe places and a count
    parts: list[dict[str, Any]] = field(default_factory=list)
    pages: list[bytes] = field(default_factory=list)
    dumped: Files = field(default_factory=dict)  # the process images that it has, or may be given
    bombs: list[bytes] = field(default_factory=list)  # pages that are packed already


def seed(chance: random.Random, image_digest: str, template: dict[str, Any], checkpoint: str, dumped: Files) -> Stream:
    """A stream in order: a small tree with one of everything; half of them with the process images `dumped`."""
    contents = chance.sample(CONTENTS, chance.randint(1, len(CONTENTS)))
    entries = [_fields(Entry(parent=0, name=b"", kind="d", mode=0o755))]
    directories = [0]
    for number in range(chance.randint(1, 25)):
        kind = chance.choice(KINDS) if number > 2 else "df"[number % 2]
        while len(directories) > 1 and chance.random() < 0.3:
            directories.pop()
        entry = Entry(
            parent=directories[-1],
            name=b"n%d" % number,
            kind=cast(Any, kind),
            mode=chance.choice((0o644, 0o4755, 0o1777)),
        )
        if kind == "f":
            content = chance.choice(contents)
            entry.size, entry.content = len(content), _hash(content)
        elif kind == "l":
            entry.target = chance.choice(TARGETS[:5])
        others = [index for index, item in enumerate(entries) if item["kind"] == kind and item["same_as"] < 0]
        if kind != "d" and others and chance.random() < 0.2:
            entry = Entry(parent=entry.parent, name=entry.name, kind=entry.kind, same_as=chance.choice(others))
        if kind == "d":
            directories.append(len(entries))
        entries.append(_fields(entry))
    head = TransferHeader(
        id=checkpoint, sandbox="s-0123456789", verdict=Verdict.BOTH, image="debian", image_digest=image_digest,
        template=copy.deepcopy(template), ancestors=["c-aaaaaaaaaa"], files=True,
    )  # fmt: skip
    stream = Stream(msgspec.to_builtins(head), entries, dumped=dumped)
    used = {entry["content"] for entry in entries}
    stream.parts = [part for content in contents if _hash(content) in used for part in _parts(content)]
    if chance.random() < 0.5:
        _put_processes(stream, dumped)
    return stream


def _put_processes(stream: Stream, dumped: Files) -> None:
    """Give the stream these process images, in the place of those that it has."""
    stream.head["processes"] = True
    old = {image["content"] for image in stream.images}
    stream.parts = [part for part in stream.parts if part["content"] not in old]
    stream.images, stream.lists, stream.pages = [], [], []
    for name, data in sorted(dumped.items()):
        if name.startswith("pages-"):
            item = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
            stream.lists.append((name, b"".join(bytes(32) if page == ZEROS else _digest(page) for page in item)))
            filled = [page for page in item if page != ZEROS]
            stream.pages += [b"".join(filled[at : at + MAX_PAGES]) for at in range(0, len(filled), MAX_PAGES)]
        else:
            stream.images.append({"name": name, "size": len(data), "content": _digest(data)})
            stream.parts += [{**part, "content": _digest(data)} for part in _parts(data)]


@functools.lru_cache(4096)
def _digest(data: bytes) -> bytes:
    return blake3(data).digest()


@functools.cache
def _hash(data: bytes) -> bytes:
    with os.fdopen(os.memfd_create("content"), "wb", buffering=0) as file:
        file.write(data)
        return sparse.of_file(file.fileno())


def _fields(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in Entry.__struct_fields__}


def _parts(content: bytes) -> list[dict[str, Any]]:
    return [dict(part) for part in _cut(content)]


@functools.cache
def _cut(content: bytes) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for offset in range(0, len(content), transfer.PART_SIZE):
        data = content[offset : offset + transfer.PART_SIZE]
        if data != bytes(len(data)) or not (result or content[offset + len(data) :]):
            result.append({"content": _hash(content), "offset": offset, "size": len(data), "packed": _packed(data)})
    return result


@functools.cache
def _zeros(size: int) -> bytes:
    """Nothing but zeros, compressed."""
    return _packed(bytes(size))


def _packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


# --------------------------------------------------------------------------- mutations


def _of_entry(stream: Stream, chance: random.Random) -> None:
    number = chance.randrange(len(stream.entries))
    entry = stream.entries[number]
    name = chance.choice(list(entry))
    values: dict[str, Callable[[], Any]] = {
        "parent": lambda: chance.choice([number - 1, number, number + 1, *NUMBERS]),
        "same_as": lambda: chance.choice([number - 1, number, number + 1, *NUMBERS]),
        "name": lambda: chance.choice([*NAMES, stream.entries[chance.randrange(len(stream.entries))]["name"]]),
        "kind": lambda: chance.choice(KINDS),
        "content": lambda: chance.choice([b"", bytes(32), _hash(b"other"), b"short", _hash(CONTENTS[0])]),
        "target": lambda: chance.choice(TARGETS),
        "extended": lambda: {chance.choice(ATTRIBUTES): chance.choice(VALUES) for _ in range(chance.randint(1, 3))},
    }
    entry[name] = values.get(name, lambda: chance.choice(NUMBERS))()


def _of_tree(stream: Stream, chance: random.Random) -> None:
    entries = stream.entries
    match chance.randrange(5):
        case 0:
            chance.shuffle(entries)
        case 1:
            entries.insert(chance.randrange(len(entries) + 1), copy.deepcopy(chance.choice(entries)))
        case 2:
            del entries[chance.randrange(len(entries))]
        case 3:  # deeper than any path
            parent = 0
            for _ in range(chance.choice((50, 700, 3000))):
                entries.append(_fields(Entry(parent=parent, name=chance.choice((b"d", b"d" * 255)), kind="d")))
                parent = len(entries) - 1
        case 4:
            link = _fields(Entry(parent=0, name=b"link", kind="l", target=chance.choice(TARGETS)))
            below = _fields(Entry(parent=len(entries), name=b"passwd", kind="f"))
            entries += [link, below]


def _of_head(stream: Stream, chance: random.Random) -> None:
    name = chance.choice(list(TransferHeader.__struct_fields__))
    if name in ("id", "sandbox"):
        stream.head[name] = chance.choice(IDS)
    elif name == "ancestors":
        stream.head[name] = [chance.choice(IDS) for _ in range(chance.choice((0, 1, 2000)))]
    elif name == "template" or chance.random() < 0.5:
        _of_settings(stream, chance)
    else:
        stream.head[name] = chance.choice([*WORDS, *NUMBERS])


def _of_settings(stream: Stream, chance: random.Random) -> None:
    settings = stream.head["template"]
    if chance.random() < 0.4:
        settings[chance.choice([*settings, "unknown"])] = chance.choice(WORDS)
        return
    directory = chance.choice(("/etc", "/", "/proc/1/root", "{folder}", "relative", "/\0"))
    said: dict[str, Any] = {
        "mounts": [{"target": chance.choice(("/x", "/etc", "/a/../b", "x")), "source": chance.choice((directory,
        None))}],
        "layer": chance.choice(("../../../../etc", "f" * 32, "x")),
        "env": {chance.choice(("A", "", "A=B", "\0")): chance.choice(("x", "\0"))},
        "limits": {chance.choice(LIMITS): chance.choice([*NUMBERS, "1GiB", "-1", "1e9"])},
        "network": {"mode": chance.choice(("none", "allow", "open")), "cidrs": [directory], "names": ["*"]},
        "workdir": directory,
        "user": chance.choice(("0", "root:root", "x" * 500, "\0")),
        "lifetime": chance.choice((-1, 0, 1e300)),
        "gateway": {"upstream": directory},
        "ignore": {"paths": [directory] * chance.choice((1, 500))},
    }  # fmt: skip
    name = chance.choice(list(said))
    settings[name] = said[name]


def _of_images(stream: Stream, chance: random.Random) -> None:
    if not stream.images:
        _put_processes(stream, stream.dumped)
    if chance.random() < 0.5:
        _put_processes(stream, Mutator(chance, ["/", "/etc", "/proc/1/root", "{folder}"]).changed(stream.dumped))
        return
    image = chance.choice(stream.images)
    name = chance.choice(list(image))
    names = ["../x.img", "pages-1.img", "/etc/x.img", "x", "", "a\0.img", "n" * 300 + ".img", "files.img", ".img"]
    values: dict[str, list[Any]] = {"name": names, "size": NUMBERS, "content": [b"", bytes(32), _hash(b"other")]}
    image[name] = chance.choice(values[name])


def _of_pages(stream: Stream, chance: random.Random) -> None:
    if not stream.lists:
        _put_processes(stream, stream.dumped)
    match chance.randrange(5):
        case 0:
            names = ("pages-../1.img", "pages-.img", "pages-²1.img", "pages-9999999999.img", "x", "pages-2.img")
            stream.lists.append((chance.choice(names), *stream.lists[0][1:]))
        case 1:
            stream.lists[0] = (stream.lists[0][0], chance.randbytes(chance.choice((1, 31, 32, 32 * 2000))))
        case 2:
            stream.pages.append(chance.randbytes(chance.choice((1, PAGE, PAGE + 1, 64 * PAGE, 65 * PAGE))))
        case 3:
            stream.bombs.append(_zeros(chance.choice((PAGE, 64 * PAGE, 300 * MIB))))
        case 4:
            places, count = chance.randbytes(chance.choice((0, 4, 5))), chance.choice((0, 1, 3, *NUMBERS))
            stream.lists[0] = (*stream.lists[0][:1], bytes(len(places) // 4 * 32), places, count)


def _of_parts(stream: Stream, chance: random.Random) -> None:
    if not stream.parts:
        return
    part = chance.choice(stream.parts)
    match chance.randrange(5):
        case 0:
            name = chance.choice(("offset", "size"))
            part[name] = chance.choice(NUMBERS)
        case 1:
            part["packed"] = chance.choice((b"", b"x", _zeros(200 * MIB), _packed(b"y" * 10)))
        case 2:
            part["content"] = chance.choice((b"", bytes(32), _hash(b"other"), b"../../x"))
        case 3:
            stream.parts.append(copy.deepcopy(part))
        case 4:
            stream.parts.remove(part)


MUTATIONS = (_of_entry, _of_entry, _of_entry, _of_tree, _of_head, _of_settings, _of_images, _of_pages, _of_parts)


def mutate(stream: Stream, chance: random.Random) -> None:
    """One to three changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if stream.entries:
            chance.choice(MUTATIONS)(stream, chance)


# --------------------------------------------------------------------------- frames


def frames(stream: Stream, chance: random.Random) -> bytes:
    """The bytes of it. A share is damaged as a whole: cut, flipped, in another order."""
    encode = msgspec.msgpack.encode
    made = [(FrameKind.HEAD, encode(stream.head))]
    for first in range(0, len(stream.entries), 1000):
        batch = [tuple(item.values()) for item in stream.entries[first : first + 1000]]
        made.append((FrameKind.ENTRY, encode(batch)))
    if stream.images:
        made.append((FrameKind.IMAGE, encode([tuple(image.values()) for image in stream.images])))
    made += [(FrameKind.LIST, encode(item)) for item in stream.lists]
    made += [(FrameKind.PART, encode(tuple(part.values()))) for part in stream.parts]
    made += [(FrameKind.PAGES, packed) for packed in [*map(_packed, stream.pages), *stream.bombs]]
    complete = chance.random()
    if complete < 0.03:
        chance.shuffle(made)
    elif complete < 0.06:
        made.insert(chance.randrange(len(made) + 1), chance.choice(made))
    elif complete < 0.09:
        place = chance.randrange(len(made))
        made[place] = (made[place][0], _flipped(made[place][1], chance))
    data = bytearray(transfer.MAGIC)
    for kind, payload in made:
        data += bytes([kind]) + len(payload).to_bytes(4, "little") + payload
    data += bytes([FrameKind.END]) + (32).to_bytes(4, "little") + blake3(data).digest()
    if chance.random() < 0.03:
        return _flipped(bytes(data), chance)[: chance.randint(1, len(data))]
    return bytes(data)


def _flipped(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


#: The order of fields in a frame is that of the structs.
assert list(_fields(Entry(parent=0, name=b"", kind="d"))) == list(Entry.__struct_fields__)
assert ImageFile.__struct_fields__ == ("name", "size", "content")
assert PageList.__struct_fields__[:2] == ("name", "hashes") and ContentPart.__struct_fields__[0] == "content"
