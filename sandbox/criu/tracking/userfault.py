"""Asynchronous write protection of a process's memory by a userfaultfd that the process has made.

Owns: the calls on such a descriptor, which mappings are registered, the proof that this kernel keeps its promises.
Does not own: making one in a process (native/attach.c), asking which pages were written (native/written.c).

The kernel clears a page's mark itself at the first write to it; faults are not served. When the last descriptor is
closed, the kernel lets go of the mappings: then every page counts as written.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox.descriptors import closing
from sandbox.libc import checked, library

_API, _REGISTER = 0xC018AA3F, 0xC020AA00
_API_VERSION, _MODE_WP = 0xAA, 2
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_SYS_USERFAULTFD = 323
_USER_MODE_ONLY = 1
_SCAN = 0xC0606610
_SCAN_ARGUMENT = struct.Struct("=12Q")
_WPALLOWED, _WRITTEN, _PRESENT, _SWAPPED = 1, 2, 8, 16
_WP_MATCHING = 1
PAGE = 4096
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..(.)(.) \S+ \S+ \S+ *(.*)$", re.M)
#: Mappings of the kernel's own.
_KERNELS = (b"[vdso]", b"[vvar", b"[vsyscall]", b"[uprobes]")
AIO = b"/[aio]"


@dataclass(frozen=True)
class Mapping:
    """A private mapping of a process."""

    start: int
    end: int


class HasAio(Exception):
    """The kernel may write into this process without a fault: it has a ring of asynchronous I/O."""


def has_aio(pid: int) -> bool:
    """Whether a process has a ring of asynchronous I/O; also when it is gone."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return AIO in file.read()
    except OSError:
        return True


def private_mappings(pid: int) -> Iterator[Mapping]:
    """Those whose pages belong to the process. Raises HasAio; OSError when it is gone."""
    with open(f"/proc/{pid}/maps", "rb") as file:
        content = file.read()
    for result in _MAPPING.finditer(content):
        start, end, _, sharing, name = result.groups()
        if name.startswith(AIO):
            raise HasAio
        if sharing == b"p" and not name.startswith(_KERNELS):
            yield Mapping(int(start, 16), int(end, 16))


def enable(descriptor: int) -> None:
    """Choose what a new descriptor is for. Raises OSError where the kernel has it not."""
    request = bytearray(struct.pack("=3Q", _API_VERSION, _WP_ASYNC | _WP_UNPOPULATED, 0))
    fcntl.ioctl(descriptor, _API, request)


def register(descriptor: int, mapping: Mapping) -> bool:
    """Have its pages marked from now on; False where that cannot be (it is gone, or memory of another kind)."""
    request = bytearray(struct.pack("=4Q", mapping.start, mapping.end - mapping.start, _MODE_WP, 0))
    try:
        fcntl.ioctl(descriptor, _REGISTER, request)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EBUSY, errno.EPERM):
            return False
        raise
    return True


# ---------------------------------------------------------------------------- the proof


def make() -> int:
    """A descriptor for memory of our own. Raises OSError."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
    descriptor = checked(library.syscall(_SYS_USERFAULTFD, flags), "userfaultfd")
    try:
        enable(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@functools.cache
def missing() -> str:
    """Why written pages cannot be known on this kernel; "": they can. Tried on memory of our own, once."""
    try:
        with closing(make()) as fd:
            return _tried(fd)
    except OSError as error:
        return f"no asynchronous write protection: {os.strerror(error.errno or 0)} (Linux 6.7 has it)"


def _tried(descriptor: int) -> str:
    """What a mapping of our own shows: the kernel must forget marks with the memory that they were about."""
    pages = 8
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    size = pages * PAGE
    at = library.mmap(None, ctypes.c_size_t(2 * size), 3, 0x22, -1, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        return "no memory"
    library.madvise(ctypes.c_void_p(at), ctypes.c_size_t(2 * size), 15)  # small pages
    try:
        ctypes.memset(at, 1, size)
        if not register(descriptor, Mapping(at, at + size)):
            return "memory cannot be registered"
        with closing(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)) as pagemap:
            if _unwritten(pagemap, at, size):
                return "pages count as unwritten before they are protected"
            _scan(pagemap, at, size, _WP_MATCHING, _WRITTEN)
            if _unwritten(pagemap, at, size) != pages:
                return "pages cannot be protected"
            ctypes.memset(at + PAGE, 2, 1)
            if _unwritten(pagemap, at, size) != pages - 1:
                return "a write is not seen"
            library.madvise(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), 4)  # MADV_DONTNEED
            ctypes.memset(at, 3, 1)
            if _unwritten(pagemap, at, size) != pages - 2:
                return "a page that was dropped and written counts as unwritten"
            flags = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED
            moved = library.mremap(
                ctypes.c_void_p(at), ctypes.c_size_t(size), ctypes.c_size_t(size), flags, ctypes.c_void_p(at + size)
            )
            if moved != at + size:
                return "memory cannot be moved"
            if register(descriptor, Mapping(moved, moved + size)) and _unwritten(pagemap, moved, size):
                return "pages keep their marks when they are moved (mended in Linux 6.13, 6.12.10)"
        return ""
    finally:
        library.munmap(ctypes.c_void_p(at), ctypes.c_size_t(2 * size))


def _scan(pagemap: int, at: int, size: int, flags: int, mask: int) -> list[tuple[int, int, int]]:
    regions = (ctypes.c_uint64 * (3 * 64))()
    argument = bytearray(
        _SCAN_ARGUMENT.pack(
            _SCAN_ARGUMENT.size, flags, at, at + size, 0, ctypes.addressof(regions), 64, 0,
            0, mask, _PRESENT | _SWAPPED, _WPALLOWED | _WRITTEN | _PRESENT,
        )
    )  # fmt: skip
    count = fcntl.ioctl(pagemap, _SCAN, argument)
    return [(regions[3 * i], regions[3 * i + 1], regions[3 * i + 2]) for i in range(count)]


def _unwritten(pagemap: int, at: int, size: int) -> int:
    """How many of these pages a dump would leave out."""
    result = _scan(pagemap, at, size, 0, 0)
    return sum((end - start) // PAGE for start, end, kind in result if kind == _WPALLOWED | _PRESENT)


def supported() -> bool:
    return not missing() and Path("/proc/self/pagemap").exists()
