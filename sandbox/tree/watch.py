"""Changes below a directory of a sandbox, as they happen.

Guarantee: a directory made below a recursive watch is covered, and what was put into it before it was is
reported; when events are lost, an ``overflow`` says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from sandbox.errors import Invalid, PagurusError, Unsupported
from sandbox.messages import FileEvent
from sandbox.names import native, reported
from sandbox.tree.safe_path import openat2, refused

MAX_DIRECTORIES = 8192  # of one watch
MAX_EVENTS = 10_000  # of one read; then an overflow

_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x8, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_UNMOUNT, _Q_OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_ONLYDIR, _ISDIR = 0x0100_0000, 0x4000_0000
_MASK = _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR
_EVENT = struct.Struct("iIII")

_libc = ctypes.CDLL(None, use_errno=True)


class TreeWatch:
    """Watch the directory `path` of a sandbox. `root` opens its root, or raises when it is gone. Open it, and close it.

    Directories are opened by path each time: an inotify watch keeps no mount busy, an open descriptor does. `open`,
    `read` and `close` may take long, one after another: they belong in a thread.
    """

    def __init__(self, root: Callable[[], AbstractContextManager[int]], path: str, *, recursive: bool) -> None:
        self.recursive = recursive
        self.descriptor = -1
        self._root = root
        self._path = path
        self._names: dict[int, str] = {}  # watch descriptor -> directory
        self._ended = False
        self._busy = threading.Lock()

    def open(self) -> None:
        """From now on what happens is kept for `read`."""
        with self._busy:
            if self._ended:
                return
            self.descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self.descriptor < 0:
                raise _failure("cannot watch")
            for _ in self._cover("", report=False):
                pass

    def stop(self) -> None:
        """Let what runs in another thread come to its end soon, and nothing more begin: there is no reader any more."""
        self._ended = True

    def close(self) -> None:
        with self._busy:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            self.descriptor = -1

    def read(self) -> list[FileEvent]:
        """What happened since; paths are relative to the watched directory. Does not wait for anything to happen."""
        result: list[FileEvent] = []
        with self._busy:
            if self._ended:
                return result
            try:
                data = os.read(self.descriptor, 1 << 18)
            except BlockingIOError:
                return result
            offset = 0
            while offset < len(data) and not self._ended:
                number, mask, _, size = _EVENT.unpack_from(data, offset)
                name = reported(os.fsdecode(data[offset + _EVENT.size : offset + _EVENT.size + size].rstrip(b"\0")))
                offset += _EVENT.size + size
                for event in self._reported(number, mask, name):
                    if len(result) < MAX_EVENTS or event.kind == "end":
                        result.append(event)
                    elif len(result) == MAX_EVENTS:
                        result.append(FileEvent(kind="overflow"))
        return result

    def _reported(self, number: int, mask: int, name: str) -> Iterator[FileEvent]:
        if mask & _Q_OVERFLOW:
            yield FileEvent(kind="overflow")
            return
        directory = self._names.get(number)
        if directory is None:
            return
        if mask & (_UNMOUNT | _IGNORED | _DELETE_SELF | _MOVE_SELF):
            if mask & (_UNMOUNT | _IGNORED | _DELETE_SELF):
                del self._names[number]
            if not directory:
                self._ended = True
                yield FileEvent(kind="end")
            return
        path = f"{directory}/{name}" if directory else name
        if mask & (_CREATE | _MOVED_TO):
            yield FileEvent(kind="created", path=path)
            if mask & _ISDIR and self.recursive:
                yield from self._cover(path, report=True)
        elif mask & (_DELETE | _MOVED_FROM):
            if mask & _ISDIR:
                self._forget(path)
            yield FileEvent(kind="removed", path=path)
        elif name:
            yield FileEvent(kind="modified", path=path)

    def _cover(self, path: str, *, report: bool) -> Iterator[FileEvent]:
        """Watch a directory, and those below it when recursive; `report` what is in them already."""
        pending = [path]
        with self._root() as root:
            while pending and not self._ended:
                for name, is_directory in self._add(root, pending.pop()):
                    if report:
                        yield FileEvent(kind="created", path=name)
                    if is_directory:
                        if len(self._names) + len(pending) >= MAX_DIRECTORIES:
                            raise Invalid(f"more than {MAX_DIRECTORIES} directories", hint="watch a smaller part")
                        pending.append(name)

    def _add(self, root: int, path: str) -> Iterator[tuple[str, bool]]:
        """Watch one directory; when recursive, what is in it, and which of that are directories."""
        complete = f"{self._path}/{path}" if path else self._path
        try:
            directory = openat2(root, native(complete), os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if path else 0))
        except OSError as error:
            if path and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
                return  # gone or replaced since, or a mount
            raise refused(error, complete) from error
        try:
            number = _libc.inotify_add_watch(self.descriptor, f"/proc/self/fd/{directory}".encode(), _MASK)
            if number < 0:
                raise _failure("cannot watch")
            self._names[number] = path
            if not self.recursive:
                return
            with os.scandir(directory) as listing:
                for entry in listing:
                    if self._ended:
                        return
                    name = reported(entry.name)
                    yield f"{path}/{name}" if path else name, entry.is_dir(follow_symlinks=False)
        finally:
            os.close(directory)

    def _forget(self, path: str) -> None:
        for number, name in list(self._names.items()):
            if name == path or name.startswith(f"{path}/"):
                _libc.inotify_rm_watch(self.descriptor, number)
                del self._names[number]


def _failure(what: str) -> PagurusError:
    number = ctypes.get_errno()
    hint = "raise fs.inotify.max_user_watches" if number in (errno.ENOSPC, errno.EMFILE) else ""
    return Unsupported(f"{what}: {os.strerror(number)}", hint=hint)
