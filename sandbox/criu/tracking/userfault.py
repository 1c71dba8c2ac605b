"""Asynchronous write protection of a process's memory by a userfaultfd that the process has made.

The kernel clears a page's mark itself at the first write to it; faults are not served. When the last descriptor is
closed, the kernel lets go of the mappings: then every page counts as written.

A mapping also stops being registered when memory is moved next to it (mremap: the kernel joins both, and lets go of
both). Its marks stay, and no write clears them any more. So marks count only while a mapping is registered, and
:func:`register` clears those that it finds.
"""

from __future__ import annotations

import bisect
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

import numpy as np

from sandbox.descriptors import closing
from sandbox.libc import checked, library

_API, _REGISTER, _WRITE_PROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06
_API_VERSION, _MODE_WP = 0xAA, 2
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
CALL = 323  # the number of the system call, and with which flags
_USER_MODE_ONLY = 1
FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
_SCAN = 0xC0606610
_ARGUMENT = struct.Struct("=12Q")
_REGION = np.dtype([("start", "<u8"), ("end", "<u8"), ("categories", "<u8")])
_REGIONS = 4096  # of one call
_WP_MATCHING = 1
#: Categories of pages.
WPALLOWED, WRITTEN, FILE, PRESENT, SWAPPED, PFNZERO = 1, 2, 4, 8, 16, 32
PAGE = 4096
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..(.)(.) \S+ (\S+) \S+ *(.*)$", re.M)
_NO_DEVICE = b"00:00"
#: Mappings of the kernel's own.
_KERNELS = (b"[vdso]", b"[vvar", b"[vsyscall]", b"[uprobes]")
AIO = b"/[aio]"


@dataclass(frozen=True)
class Mapping:
    """A private mapping of a process; `anonymous`: of no file."""

    start: int
    end: int
    anonymous: bool = False


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
        start, end, _, sharing, device, name = result.groups()
        if name.startswith(AIO):
            raise HasAio
        if sharing == b"p" and not name.startswith(_KERNELS):
            yield Mapping(int(start, 16), int(end, 16), device == _NO_DEVICE)


def enable(descriptor: int) -> None:
    """Choose what a new descriptor is for. Raises OSError where the kernel has it not."""
    request = bytearray(struct.pack("=3Q", _API_VERSION, _WP_ASYNC | _WP_UNPOPULATED, 0))
    fcntl.ioctl(descriptor, _API, request)


def register(descriptor: int, mapping: Mapping) -> bool:
    """Have its pages marked from now on; False where that cannot be (it is gone, or memory of another kind).

    All of its pages count as written then.
    """
    size = mapping.end - mapping.start
    try:
        fcntl.ioctl(descriptor, _REGISTER, bytearray(struct.pack("=4Q", mapping.start, size, _MODE_WP, 0)))
        fcntl.ioctl(descriptor, _WRITE_PROTECT, bytearray(struct.pack("=3Q", mapping.start, size, 0)))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EBUSY, errno.EPERM, errno.ENOENT):
            return False
        raise
    return True


# ---------------------------------------------------------------------------- asking about pages


@dataclass(frozen=True)
class PageQuery:
    """Which pages are wanted, in sets of categories: all of `every`, none of `none`, one of `some` (0: any page).

    FILE makes the kernel look up each page, which takes several times as long as all else.
    """

    every: int = 0
    none: int = 0
    some: int = PRESENT | SWAPPED
    returned: int = 0  # categories that are returned with each region

    def regions(
        self, pagemap: int, start: int, end: int, *, protect: bool = False, limit: int = 0
    ) -> Iterator[tuple[int, int, int]]:
        """Regions of such pages from `start` to `end`, as (from, to, their categories), in addresses.

        `protect`: their pages count as unwritten from then on. `limit`: of the number of pages; 0: all. Blocks.
        Raises OSError.
        """
        listed = np.zeros(_REGIONS, _REGION)
        left = limit
        while start < end:
            argument = bytearray(
                _ARGUMENT.pack(
                    _ARGUMENT.size, _WP_MATCHING * protect, start, end, 0, listed.ctypes.data, _REGIONS, left,
                    self.none, self.every | self.none, self.some, self.returned,
                )
            )  # fmt: skip
            count = fcntl.ioctl(pagemap, _SCAN, argument)
            yield from map(tuple, listed[:count].tolist())
            reached = _ARGUMENT.unpack(argument)[4]
            if limit:
                left -= int((listed["end"][:count] - listed["start"][:count]).sum()) // PAGE
            if reached <= start or (limit and left <= 0):
                return
            start = reached


def unregistered(pid: int, mappings: list[Mapping]) -> list[Mapping]:
    """Those of a process's `mappings`, sorted, that are not registered, with pages or without. Raises OSError."""
    if not mappings:
        return []
    query = PageQuery(none=WPALLOWED, some=0)
    with closing(os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)) as pagemap:
        regions = [(start, end) for start, end, _ in query.regions(pagemap, mappings[0].start, mappings[-1].end)]
    ends = [end for _, end in regions]
    result = []
    for mapping in mappings:
        at = bisect.bisect_right(ends, mapping.start)
        if at < len(regions) and regions[at][0] < mapping.end:
            result.append(mapping)
    return result


# ---------------------------------------------------------------------------- the proof


def make() -> int:
    """A descriptor for memory of our own. Raises OSError."""
    descriptor = checked(library.syscall(CALL, FLAGS), "userfaultfd")
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
    """What mappings of our own show: the kernel must forget marks with the memory that they were about."""
    pages = 16
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
            return _writes_tried(pagemap, at, pages) or _moves_tried(descriptor, pagemap, at, pages)
    finally:
        library.munmap(ctypes.c_void_p(at), ctypes.c_size_t(2 * size))


def _writes_tried(pagemap: int, at: int, pages: int) -> str:
    size = pages * PAGE
    if _unwritten(pagemap, at, size):
        return "pages count as unwritten before they are protected"
    _protect(pagemap, at, size)
    if _unwritten(pagemap, at, size) != pages:
        return "pages cannot be protected"
    ctypes.memset(at + PAGE, 2, 1)
    if _unwritten(pagemap, at, size) != pages - 1:
        return "a write is not seen"
    library.madvise(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), 4)  # MADV_DONTNEED
    ctypes.memset(at, 3, 1)
    if _unwritten(pagemap, at, size) != pages - 2:
        return "a page that was dropped and written counts as unwritten"
    return ""


def _moves_tried(descriptor: int, pagemap: int, at: int, pages: int) -> str:
    """Half of the memory is moved away and back: the kernel lets go of the other half then, with its marks."""
    half = pages // 2 * PAGE
    flags = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP: no other thread can map what was left
    size = ctypes.c_size_t(half)
    _protect(pagemap, at, 2 * half)
    away = at + 2 * half
    for source, target in ((at + half, away), (away, at + half)):
        if library.mremap(ctypes.c_void_p(source), size, size, flags, ctypes.c_void_p(target)) != target:
            return "memory cannot be moved"
        if source == at + half:
            if register(descriptor, Mapping(away, away + half)) and _unwritten(pagemap, away, half):
                return "pages keep their marks when they are moved"
            _protect(pagemap, away, half)
    ctypes.memset(at, 4, 2 * half)
    for mapping in unregistered(os.getpid(), [Mapping(at, at + half), Mapping(at + half, at + 2 * half)]):
        register(descriptor, mapping)
    if _unwritten(pagemap, at, 2 * half):
        return "pages keep their marks when memory is moved next to them"
    return ""


def _protect(pagemap: int, at: int, size: int) -> None:
    for _ in PageQuery(every=WRITTEN).regions(pagemap, at, at + size, protect=True):
        pass


def _unwritten(pagemap: int, at: int, size: int) -> int:
    """How many of these pages a dump would leave out."""
    regions = PageQuery(every=WPALLOWED | PRESENT, none=WRITTEN).regions(pagemap, at, at + size)
    return sum((end - start) // PAGE for start, end, _ in regions)


def supported() -> bool:
    return not missing() and Path("/proc/self/pagemap").exists()
