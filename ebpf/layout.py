"""The structures of inspector.h as ctypes, read from that very file.

Owns: nothing of its own; the header is the source. Guarantee: a field exists here exactly when it exists in the
kernel half, at the same offset; the loader compares the sizes with the loaded maps.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

HEADER = Path(__file__).with_name("inspector.h")

_STRUCT = re.compile(r"^struct (\w+) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^\t(?:struct )?(\w+) (\w+)(?:\[(\w+)\])?;", re.MULTILINE)
_DEFINE = re.compile(r"^#define (\w+) (0x[0-9a-f]+|\d+)$", re.MULTILINE)


def parse(text: str) -> tuple[dict[str, type[ctypes.Structure]], dict[str, int]]:
    """All structures and integer constants of a header that keeps to one field per line."""
    constants = {name: int(value, 0) for name, value in _DEFINE.findall(text)}
    types: dict[str, Any] = {"u64": ctypes.c_uint64, "u32": ctypes.c_uint32, "char": ctypes.c_char}
    structures: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(text):
        fields: list[tuple[str, Any]] = []
        for kind, field, length in _FIELD.findall(body):
            base = types[kind]
            if length:
                base = base * (constants[length] if length in constants else int(length))
            fields.append((field, base))
        structures[name] = types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structures, constants


_structures, CONSTANTS = parse(HEADER.read_text())

Sandbox = _structures["sandbox"]
Explanation = _structures["explanation"]
Census = _structures["census"]
BUCKETS = CONSTANTS["BUCKETS"]
