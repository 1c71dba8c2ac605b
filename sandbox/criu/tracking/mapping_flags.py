"""By which letters /proc/PID/smaps names the flags of a mapping, so that its text can be made without counting pages.

Guarantee: a letter is known only if all mappings of this process agree; of a mapping with any flag that is not, CRIU
reads what the kernel says.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from sandbox.criu.tracking import userfault
from sandbox.descriptors import closing
from sandbox.libc import checked, library

FILE = "tracked-letters.log"
PAGE = 4096
BITS = 64
_BUFFER = 1 << 16  # bytes of a read
_SYS_BPF, _LINK_CREATE, _ITER_CREATE, _TRACE_ITER = 321, 28, 33, 28
_ATTRIBUTES = 128  # bytes of a call
_RECORD = struct.Struct("=3Q")
_ENTRY = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .*\n(?:[A-Z].*\n)*?VmFlags: (.*)\n", re.M)
_SHARED, _PRIVATE, _GROWSDOWN, _LOCKED, _NORESERVE = 1, 2, 0x100, 0x2000, 0x4000
#: What a program may ask of its memory (madvise).
_ADVICE = (1, 2, 10, 12, 14, 15, 16, 18)


def learned(program: int) -> bytes:
    """Two letters for each flag, zeros for one that is not known; `program`: descriptor of the iterator.

    Raises OSError where the kernel has no such iterators.
    """
    with _Examples():
        flags_of = {(start, end): flags for start, end, flags in _mappings(program, os.getpid())}
        letters: dict[int, set[bytes]] = {}
        for entry in _ENTRY.finditer(Path("/proc/self/smaps").read_bytes()):
            flags = flags_of.get((int(entry[1], 16), int(entry[2], 16)))
            if flags is None:
                continue  # changed since
            set_bits = [bit for bit in range(BITS) if flags >> bit & 1]
            named = entry[3].split()
            if len(named) != len(set_bits):
                continue  # some of these flags have no letters
            for bit, name in zip(set_bits, named, strict=True):
                letters.setdefault(bit, set()).add(name)
    return _packed({bit: name for bit, names in letters.items() if len(names) == 1 for name in names})


def _packed(letters: Mapping[int, bytes]) -> bytes:
    return b"".join(letters.get(bit, b"").ljust(2, b"\0")[:2] for bit in range(BITS))


class _Examples:
    """Mappings of our own of all kinds, for a moment."""

    def __enter__(self) -> None:
        library.mmap.restype = ctypes.c_void_p
        kinds = (_PRIVATE, _SHARED, _PRIVATE | _NORESERVE, _PRIVATE | _GROWSDOWN, _PRIVATE | _LOCKED)
        self._places = [at for kind in kinds if (at := self._mapped(kind))]
        for advice in _ADVICE:
            if at := self._mapped(_PRIVATE):
                self._places.append(at)
                library.madvise(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), advice)
        self._protected = userfault.make()
        if at := self._mapped(_PRIVATE):
            self._places.append(at)
            userfault.register(self._protected, userfault.Mapping(at, at + PAGE))

    def __exit__(self, *_: object) -> None:
        os.close(self._protected)
        for at in self._places:
            library.munmap(ctypes.c_void_p(at), ctypes.c_size_t(PAGE))

    @staticmethod
    def _mapped(kind: int) -> int:
        at = library.mmap(None, ctypes.c_size_t(PAGE), 3, kind | 0x20, -1, 0)
        return 0 if at in (None, ctypes.c_void_p(-1).value) else int(at)


def _mappings(program: int, pid: int) -> Iterator[tuple[int, int, int]]:
    """Start, end and flags of each mapping of a process."""
    which = ctypes.create_string_buffer(struct.pack("=4I", pid, 0, 0, 0), 16)
    link = _bpf(_LINK_CREATE, struct.pack("=4IQI", program, 0, _TRACE_ITER, 0, ctypes.addressof(which), 12))
    with closing(link), closing(_bpf(_ITER_CREATE, struct.pack("=2I", link, 0))) as iterator:
        last = -1
        while part := os.read(iterator, _BUFFER):
            records = list(_RECORD.iter_unpack(part))
            if records[0][0] <= last:  # the kernel tells its last buffer again and again where it needs several
                return
            last = records[-1][0]
            yield from records


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes.ljust(_ATTRIBUTES, b"\0"), _ATTRIBUTES)
    return checked(library.syscall(_SYS_BPF, command, buffer, _ATTRIBUTES), "bpf")
