"""The few functions of libbpf.so.1 that the loader needs, through ctypes.

Guarantee: every failure is an :class:`OSError` with libbpf's own words.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import CFUNCTYPE, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from pathlib import Path

from sandbox import hints

_printed: list[str] = []
_RETAINED_LINES = 200


def _remembered(level: int, template: bytes, arguments: int) -> int:
    buffer = ctypes.create_string_buffer(4096)
    length = _libc.vsnprintf(buffer, len(buffer), template, c_void_p(arguments))
    if level < 2:  # warnings and notices; debug lines are thousands
        _printed.append(buffer.value.decode(errors="replace").rstrip())
        del _printed[:-_RETAINED_LINES]
    return int(length)


_remember = CFUNCTYPE(c_int, c_int, c_char_p, c_void_p)(_remembered)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.vsnprintf.argtypes = [c_char_p, c_size_t, c_char_p, c_void_p]

RING_CALLBACK = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)


def _open() -> ctypes.CDLL:
    library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    for name, result, arguments in (
        ("bpf_object__open_file", c_void_p, [c_char_p, c_void_p]),
        ("bpf_object__load", c_int, [c_void_p]),
        ("bpf_object__close", None, [c_void_p]),
        ("bpf_object__find_map_by_name", c_void_p, [c_void_p, c_char_p]),
        ("bpf_object__next_program", c_void_p, [c_void_p, c_void_p]),
        ("bpf_program__name", c_char_p, [c_void_p]),
        ("bpf_program__fd", c_int, [c_void_p]),
        ("bpf_program__set_autoload", c_int, [c_void_p, ctypes.c_bool]),
        ("bpf_program__attach", c_void_p, [c_void_p]),
        ("bpf_program__attach_iter", c_void_p, [c_void_p, c_void_p]),
        ("bpf_link__fd", c_int, [c_void_p]),
        ("bpf_link__destroy", c_int, [c_void_p]),
        ("bpf_map__fd", c_int, [c_void_p]),
        ("bpf_map__set_max_entries", c_int, [c_void_p, c_uint32]),
        ("bpf_map__max_entries", c_uint32, [c_void_p]),
        ("bpf_map__value_size", c_uint32, [c_void_p]),
        ("bpf_iter_create", c_int, [c_int]),
        ("bpf_map_update_elem", c_int, [c_int, c_void_p, c_void_p, ctypes.c_uint64]),
        ("bpf_prog_attach", c_int, [c_int, c_int, c_int, c_uint32]),
        ("bpf_map_delete_elem", c_int, [c_int, c_void_p]),
        ("btf__load_vmlinux_btf", c_void_p, []),
        ("btf__load_module_btf", c_void_p, [c_char_p, c_void_p]),
        ("btf__free", None, [c_void_p]),
        ("btf__find_by_name_kind", ctypes.c_int32, [c_void_p, c_char_p, c_uint32]),
        ("btf__type_by_id", c_void_p, [c_void_p, c_uint32]),
        ("btf__name_by_offset", c_char_p, [c_void_p, c_uint32]),
        ("ring_buffer__new", c_void_p, [c_int, RING_CALLBACK, c_void_p, c_void_p]),
        ("ring_buffer__consume", c_int, [c_void_p]),
        ("ring_buffer__free", None, [c_void_p]),
        ("libbpf_set_print", c_void_p, [c_void_p]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.libbpf_set_print(ctypes.cast(_remember, c_void_p))
    return library


_library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """libbpf, opened on first use. Raises OSError when it is not installed."""
    global _library
    if _library is None:
        _library = _open()
    return _library


def said(last: int = 12) -> str:
    """What libbpf printed last: the verifier's log among it."""
    return "\n".join(_printed[-last:])


def check(result: int | None, what: str) -> int:
    """`result`, or the OSError that libbpf left in errno. Takes pointers (NULL fails) and ints (< 0 fails)."""
    if result is None or result < 0:
        number = ctypes.get_errno() or (-result if result else 0)
        words = said()
        raise OSError(number, f"{what}: {os.strerror(number)}" + (f"\n{words}" if words else ""))
    return result


class Object:
    """A compiled object: open, adjust, load, attach. Closing it unloads it."""

    def __init__(self, path: Path):
        self._lib = library()
        _printed.clear()
        self.path = path
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: {hints.parts('native')}")
        self._object: int | None = check(self._lib.bpf_object__open_file(os.fsencode(path), None), f"open {path}")
        self._links: dict[str, int] = {}
        self.programs: dict[str, int] = {}
        program = self._lib.bpf_object__next_program(self._object, None)
        while program:
            self.programs[self._lib.bpf_program__name(program).decode()] = program
            program = self._lib.bpf_object__next_program(self._object, program)

    def _map(self, name: str) -> int:
        return check(self._lib.bpf_object__find_map_by_name(self._object, name.encode()), f"map {name}")

    def resize(self, name: str, entries: int) -> None:
        check(self._lib.bpf_map__set_max_entries(self._map(name), entries), f"resize {name}")

    def leave_out(self, program: str) -> None:
        check(self._lib.bpf_program__set_autoload(self.programs.pop(program), False), f"leave out {program}")

    def load(self) -> None:
        check(self._lib.bpf_object__load(self._object), f"load {self.path}")

    def map_fd(self, name: str) -> int:
        return check(self._lib.bpf_map__fd(self._map(name)), f"map {name}")

    def map_shape(self, name: str) -> tuple[int, int]:
        """Entries and size of a value."""
        result = self._map(name)
        return self._lib.bpf_map__max_entries(result), self._lib.bpf_map__value_size(result)

    def program_fd(self, program: str) -> int:
        return check(self._lib.bpf_program__fd(self.programs[program]), f"program {program}")

    def attach(self, program: str) -> None:
        """Nothing happens when it is attached already."""
        if program in self._links:
            return
        self._links[program] = check(self._lib.bpf_program__attach(self.programs[program]), f"attach {program}")

    def detach(self, program: str) -> None:
        """Undo :meth:`attach`. Nothing happens when it is not attached."""
        if (link := self._links.pop(program, None)) is not None:
            self._lib.bpf_link__destroy(link)

    def attach_iterator(self, program: str) -> int:
        """Attach; returns the link's descriptor for :func:`run_iterator`."""
        link = check(self._lib.bpf_program__attach_iter(self.programs[program], None), f"attach {program}")
        self._links[program] = link
        return check(self._lib.bpf_link__fd(link), f"link of {program}")

    def close(self) -> None:
        for link in self._links.values():
            self._lib.bpf_link__destroy(link)
        self._links.clear()
        if self._object:
            self._lib.bpf_object__close(self._object)
            self._object = None


def run_iterator(link_fd: int) -> bytes:
    """Let an attached iterator program see all its objects once. Returns what it wrote."""
    fd = check(library().bpf_iter_create(link_fd), "create iterator")
    written = bytearray()
    try:
        while part := os.read(fd, 1 << 16):
            written += part
    finally:
        os.close(fd)
    return bytes(written)


def update(fd: int, key: int, value: int) -> None:
    """Set an entry of a map from u64 to u32."""
    k, v = ctypes.c_uint64(key), ctypes.c_uint32(value)
    check(library().bpf_map_update_elem(fd, ctypes.byref(k), ctypes.byref(v), 0), "map update")


def put(fd: int, key: int | ctypes.Structure, value: ctypes.Structure) -> None:
    """Set an entry of a map from u64, or from a structure, to a structure."""
    check(library().bpf_map_update_elem(fd, ctypes.byref(_key(key)), ctypes.byref(value), 0), "map update")


def attach_to_cgroup(program: int, cgroup: int, kind: int) -> None:
    """Attach a program, both by descriptor, for as long as the group lives, instead of one of that kind there."""
    check(library().bpf_prog_attach(program, cgroup, kind, 0), "attach to a control group")


def delete(fd: int, key: int | ctypes.Structure) -> None:
    """Remove an entry of such a map; absent is fine."""
    library().bpf_map_delete_elem(fd, ctypes.byref(_key(key)))


def _key(key: int | ctypes.Structure) -> ctypes.c_uint64 | ctypes.Structure:
    return ctypes.c_uint64(key) if isinstance(key, int) else key
