"""The kernel's own types: what a hook is given, by name.

Guarantee: a tracepoint that the running kernel lacks is None; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebpf import libbpf

BTF = Path("/sys/kernel/btf")

_PTR, _STRUCT, _UNION, _ENUM, _TYPEDEF, _FUNC, _PROTO = 2, 4, 5, 6, 8, 12, 13
_QUALIFIERS = {9, 10, 11, 18}  # volatile, const, restrict, type tags


class _Type(ctypes.Structure):
    _fields_ = (("name", ctypes.c_uint32), ("info", ctypes.c_uint32), ("type", ctypes.c_uint32))

    @property
    def kind(self) -> int:
        return int(self.info >> 24 & 0x1F)


class _Argument(ctypes.Structure):
    _fields_ = (("name", ctypes.c_uint32), ("type", ctypes.c_uint32))


@contextmanager
def _types(module: str) -> Iterator[int]:
    """Those of the kernel, with those of a module where that is loaded and not built in."""
    lib = libbpf.library()
    with contextlib.ExitStack() as opened:
        btf = libbpf.check(lib.btf__load_vmlinux_btf(), "read the kernel's types")
        opened.callback(lib.btf__free, btf)
        if module and (BTF / module).exists():
            btf = libbpf.check(lib.btf__load_module_btf(module.encode(), btf), f"read the types of {module}")
            opened.callback(lib.btf__free, btf)
        yield btf


@functools.cache
def of_tracepoint(name: str, module: str = "") -> tuple[str, ...] | None:
    """Types of the arguments of a tracepoint. Example: ``of_tracepoint("sys_exit")[0] == "struct pt_regs *"``.

    `module`: where it may be instead of in the kernel itself. That module must be loaded.
    """
    result = _arguments(f"btf_trace_{name}", _TYPEDEF, module)
    return None if result is None else result[1:]  # the first one is the kernel's own


def _arguments(name: str, kind: int, module: str) -> tuple[str, ...] | None:
    lib = libbpf.library()
    with _types(module) as btf:
        number = lib.btf__find_by_name_kind(btf, name.encode(), kind)
        if number < 0:
            return None
        while (result := _Type.from_address(lib.btf__type_by_id(btf, number))).kind != _PROTO:
            number = result.type
        first = ctypes.addressof(result) + ctypes.sizeof(_Type)
        given = (_Argument * (result.info & 0xFFFF)).from_address(first)
        return tuple(_name(btf, item.type) for item in given)


def _name(btf: int, number: int) -> str:
    """As C writes it, without qualifiers. Example: ``struct dentry *``."""
    lib = libbpf.library()
    if number == 0:
        return "void"
    result = _Type.from_address(lib.btf__type_by_id(btf, number))
    if result.kind in _QUALIFIERS:
        return _name(btf, result.type)
    if result.kind == _PTR:
        return f"{_name(btf, result.type)} *".replace("* *", "**")
    prefix = {_STRUCT: "struct ", _UNION: "union ", _ENUM: "enum "}.get(result.kind, "")
    return prefix + str(lib.btf__name_by_offset(btf, result.name).decode())
