"""What an engine must hold of a model directory, whether it computes in float32 or as the directory has it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np


class TensorEntry(msgspec.Struct):
    dtype: str
    data_offsets: tuple[int, int]


def computed_hashes(directory: Path, names: Collection[str] | None = None, *, widen: bool = True) -> dict[str, str]:
    """sha256 of each tensor's values, widened to float32, which is exact, or as they are. `names`: these alone."""
    hashes = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            for name, raw in header.items():
                if names is None or name in names:
                    entry = msgspec.json.decode(raw, type=TensorEntry)
                    start, end = entry.data_offsets
                    file.seek(8 + length + start)
                    raw_values = file.read(end - start)
                    values = _widened(raw_values, entry.dtype) if widen else raw_values
                    hashes[name] = hashlib.sha256(values).hexdigest()
    return hashes


def _widened(raw: bytes, dtype: str) -> bytes | memoryview:
    if dtype == "BF16":
        return (np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16).data.cast("B")
    if dtype == "F16":
        return np.frombuffer(raw, dtype=np.float16).astype(np.float32).data.cast("B")
    return raw
