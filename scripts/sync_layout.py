"""Make ebpf/layout.py from ebpf/inspector.h: the structures and constants that kernel and user half share.

::

    python scripts/sync_layout.py            # print it
    python scripts/sync_layout.py --write    # write it; a test compares
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

EBPF = Path(__file__).resolve().parent.parent / "ebpf"
HEADER, TARGET = EBPF / "inspector.h", EBPF / "layout.py"

_STRUCT = re.compile(r"^struct (\w+) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^\t(?:struct )?(\w+) (\w+)(?:\[(\w+)\])?;", re.MULTILINE)
_DEFINE = re.compile(r"^#define (\w+) (0x[0-9a-f]+|\d+)$", re.MULTILINE)
_TYPES = {"u64": "ctypes.c_uint64", "u32": "ctypes.c_uint32", "char": "ctypes.c_char"}

_TOP = '''"""The structures of inspector.h as ctypes. Made by scripts/sync_layout.py; do not edit.

Guarantee: a field exists here exactly when it exists in the kernel half, at the same offset; the loader compares the
sizes with the loaded maps.
"""

from __future__ import annotations

import ctypes

'''


def class_name(structure: str) -> str:
    """The name of a structure as Python writes it.

    >>> class_name("files_bucket")
    'FilesBucketLayout'
    """
    return "".join(part.capitalize() for part in [*structure.split("_"), "layout"])


def layout(header: str) -> str:
    """The module for a header that has one field in each line."""
    lines = [f"{name} = {value.upper().replace('X', 'x')}\n" for name, value in _DEFINE.findall(header)]
    existing = dict(_TYPES)
    for structure, body in _STRUCT.findall(header):
        existing[structure] = class_name(structure)
        lines.append(f"\n\nclass {existing[structure]}(ctypes.Structure):\n    _fields_ = [\n")
        for kind, field, length in _FIELD.findall(body):
            lines.append(f'        ("{field}", {existing[kind]}{f" * {length}" if length else ""}),\n')
        lines.append("    ]\n")
    return _TOP + "".join(lines)


if __name__ == "__main__":
    text = layout(HEADER.read_text())
    if sys.argv[1:] == ["--write"]:
        TARGET.write_text(text)
    else:
        sys.stdout.write(text)
