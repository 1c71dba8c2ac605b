"""Changes to CRIU's images that keep their form: fields of records, records, whole files.

Guarantee: the images given stay as they are; the same generator gives the same changes.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError

from sandbox.criu import image_files
from sandbox.errors import CheckpointFailed

#: Kinds of the records of an image, by the stem of its name. Others are changed byte by byte.
KINDS: dict[str, tuple[str, ...]] = {
    "files": ("file_entry",),
    "inventory": ("inventory_entry",),
    "pstree": ("pstree_entry",),
    "fs": ("fs_entry",),
    "ids": ("task_kobj_ids_entry",),
    "core": ("core_entry",),
    "mm": ("mm_entry",),
    "fdinfo": ("fdinfo_entry",),
    "mountpoints": ("mnt_entry",),
    "userns": ("userns_entry",),
    "utsns": ("utsns_entry",),
    "remap-fpath": ("remap_file_path_entry",),
    "memfd": ("memfd_inode_entry",),
    "tty-info": ("tty_info_entry",),
    "filelocks": ("file_lock_entry",),
    "seccomp": ("seccomp_entry",),
    "pagemap": ("pagemap_head", "pagemap_entry"),
    "timens": ("timens_entry",),
    "ipcns-var": ("ipc_var_entry",),
    "ghost-file": ("ghost_file_entry",),  # its first record
}
#: Where paths and references lie is changed most.
FAVOURED = ("files", "remap-fpath", "ghost-file", "mountpoints", "fs", "inventory", "ids", "fdinfo", "core", "mm")
NUMBERS = (0, 1, 2, 3, 7, 255, 4095, 4096, 65535, 65536, 1 << 31, (1 << 32) - 1, 1 << 47, (1 << 63) - 1, (1 << 64) - 1)
Files = dict[str, bytes]


class Mutator:
    """Changes images. `paths` are the paths that are tried wherever a path may stand."""

    def __init__(self, draw: random.Random, paths: Sequence[str]):
        self.draw = draw
        self.paths = list(paths)

    def changed(self, images: Files) -> Files:
        """A copy with one to four changes."""
        files = dict(images)
        for _ in range(self.draw.choice((1, 1, 1, 2, 2, 3, 4))):
            with contextlib.suppress(DecodeError, EncodeError, struct.error, CheckpointFailed, IndexError, ValueError):
                if self.draw.random() < 0.06:
                    self._file(files)
                else:
                    self._records(files)
        return files

    # ------------------------------------------------------------------ files

    def _file(self, files: Files) -> None:
        name = self.draw.choice(sorted(files))
        content = files[name]
        what = self.draw.randrange(7)
        if what == 0:
            files[name] = content[: self.draw.randrange(len(content) + 1)]
        elif what == 1:
            files[name] = content + self.draw.randbytes(self.draw.choice((1, 8, 4096)))
        elif what == 2:
            del files[name]
        elif what == 3:
            files[name] = files[self.draw.choice(sorted(files))]
        elif what == 4:
            stem, _, tail = name.rpartition("-")
            files[f"{stem or 'netns'}-{self.draw.randrange(40)}.img" if tail else "netns-2.img"] = content
        elif what == 5 and content:
            at = self.draw.randrange(len(content))
            files[name] = content[:at] + self.draw.randbytes(1) + content[at + 1 :]
        else:
            files[self.draw.choice(("parent", "netns-9.img", "reg-files.img", "creds-1.img", "../x.img"))] = content

    # ------------------------------------------------------------------ records

    def _records(self, files: Files) -> None:
        existing = [name for name in sorted(files) if stem(name) in KINDS]
        favoured = [name for name in existing if stem(name) in FAVOURED]
        name = self.draw.choice(favoured if favoured and self.draw.random() < 0.8 else existing)
        content, rest = files[name], b""
        if stem(name) == "ghost-file":
            (size,) = struct.unpack_from("<I", content, 8)
            content, rest = content[: 12 + size], content[12 + size :]
        kinds = [getattr(image_files.messages(), kind) for kind in KINDS[stem(name)]]
        image = image_files.parse(content, *kinds)
        if not image.entries:
            return
        place = self.draw.randrange(len(image.entries))
        what = self.draw.randrange(20)
        if what == 0:
            del image.entries[place]
        elif what == 1:
            image.entries.append(image.entries[place])
        elif what == 2:
            self.draw.shuffle(image.entries)
        else:
            self._message(image.entries[place], image.entries)
        files[name] = image.content() + rest

    def _message(self, message: Any, alike: Sequence[Any]) -> None:
        """Change one field, at any depth."""
        fields = list(message.DESCRIPTOR.fields)
        there = [one for one, _ in message.ListFields()]
        one = self.draw.choice(there if there and self.draw.random() < 0.85 else fields)
        if one.is_repeated:
            self._repeated(message, one)
        elif one.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, one.name)
            if self.draw.random() < 0.05:
                message.ClearField(one.name)
            else:
                self._message(inner, [])
        elif self.draw.random() < 0.05:
            message.ClearField(one.name)
        else:
            others = [getattr(other, one.name) for other in alike if other.DESCRIPTOR is message.DESCRIPTOR]
            setattr(message, one.name, self._value(one, getattr(message, one.name), others))

    def _repeated(self, message: Any, one: Any) -> None:
        values = getattr(message, one.name)
        what = self.draw.randrange(6)
        if not values or what == 0:
            if one.type == FieldDescriptor.TYPE_MESSAGE:
                self._message(values.add(), [])
            else:
                values.append(self._value(one, 0 if one.type != FieldDescriptor.TYPE_STRING else "", []))
        elif what == 1:
            del values[self.draw.randrange(len(values))]
        elif what == 2:
            values.extend([values[self.draw.randrange(len(values))]] * self.draw.choice((1, 3, 300)))
        else:
            place = self.draw.randrange(len(values))
            if one.type == FieldDescriptor.TYPE_MESSAGE:
                self._message(values[place], list(values[:20]))
            else:
                values[place] = self._value(one, values[place], [])

    def _value(self, one: Any, now: Any, others: Sequence[Any]) -> Any:
        if others and self.draw.random() < 0.3:
            return self.draw.choice(others)
        if one.type == FieldDescriptor.TYPE_STRING:
            return self._text(now if isinstance(now, str) else now.decode("utf-8", "replace"))
        if one.type == FieldDescriptor.TYPE_BYTES:
            text = self._text(bytes(now).decode("utf-8", "replace")).encode("utf-8", "replace")
            return self.draw.choice((text, text + b"\0", b"\0" + text, self.draw.randbytes(9)))
        if one.type == FieldDescriptor.TYPE_BOOL:
            return not now
        if one.type == FieldDescriptor.TYPE_ENUM:
            return self.draw.choice([item.number for item in one.enum_type.values])
        return self._number(one, int(now))

    def _number(self, one: Any, now: int) -> int:
        wide = one.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
        bits = 64 if wide else 32
        result = self.draw.choice(
            (
                now + 1,
                now - 1,
                now ^ 1 << self.draw.randrange(bits),
                self.draw.choice(NUMBERS),
                self.draw.randrange(64),
                self.draw.getrandbits(bits),
            )
        ) % (1 << bits)
        signed = one.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_INT32)
        return result - (1 << bits) if signed and result >> (bits - 1) else result

    def _text(self, now: str) -> str:
        change: Callable[[], str] = self.draw.choice(
            (
                lambda: self.draw.choice(self.paths),
                lambda: self.draw.choice(self.paths) + "/" + now.rpartition("/")[2],
                lambda: self.draw.choice(self.paths) + now,
                lambda: "/.." * self.draw.randrange(1, 9) + self.draw.choice(self.paths),
                lambda: now + "/../" + self.draw.choice(("..", "etc", "x")),
                lambda: now.replace("/", "//", 1),
                lambda: now.lstrip("/"),
                lambda: now + " (deleted)",
                lambda: now[: self.draw.randrange(len(now) + 1)],
                lambda: "/" + "a" * self.draw.choice((200, 256, 4090, 70_000)),
                lambda: "",
                lambda: now + "\0x",
            )
        )
        return change()


def stem(name: str) -> str:
    """``core`` of ``core-12.img``."""
    head, _, tail = name.removesuffix(".img").rpartition("-")
    if head in KINDS:
        return head
    return name.removesuffix(".img") if not tail.isdigit() else head
