"""Changes of weights in the file that vLLM's workers read (`rollout/engine/inside/pagurus_vllm.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from rollout.weights.layout import WORDS
from rollout.weights.mirror import Write

INSIDE = Path(__file__).parent / "inside"  # on the server's PYTHONPATH
# Whose parts are equal, whatever the number of heads or of rows of a padded vocabulary; the loader knows all others.
SPLIT = {"q_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}


class Patch(msgspec.Struct, array_like=True):
    """As the other side has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    split: int | None
    positions: bytes
    values: bytes


class PatchFile(msgspec.Struct):
    since: int
    version: int
    patches: list[Patch]


def write_patches(
    path: Path, writes: Sequence[Write], tensors: Mapping[str, tuple[str, tuple[int, ...]]], *, since: int, version: int
) -> bool:
    """Write the changes from one version to another; False where they cannot be written in place.

    `tensors`: dtype and shape of each, as safetensors spells them.
    """
    if any(WORDS[tensors[write.name][0]] != 1 for write in writes):
        return False
    patches = []
    for write in writes:
        dtype, shape = tensors[write.name]
        split = SPLIT.get(write.name.split(".")[-2]) if len(shape) == 2 else None
        positions = np.arange(len(write.values)) if write.positions is None else write.positions
        raw = positions.astype(np.int64, copy=False).tobytes()
        patches.append(Patch(write.name, dtype, shape, split, raw, write.values.tobytes()))
    path.write_bytes(msgspec.msgpack.encode(PatchFile(since, version, patches)))
    return True
