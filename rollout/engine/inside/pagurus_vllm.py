"""A weight-transfer engine for vLLM: exact changes, from a file next to the server, written into the weights in place.

Guarantee: changes are applied to exactly the version that they are based on, or refused before anything was written; a
worker that failed in the middle has no version, and refuses all changes until the weights were loaded again.

vLLM imports this module in each worker (``--worker-extension-cls pagurus_vllm.WorkerExtension``), before it makes its
engine
(``--weight-transfer-config '{"backend": "pagurus"}'``). Imports of ours are not available here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

BACKEND = "pagurus"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


class VllmPatch(msgspec.Struct, array_like=True):
    """supervisor -> worker: changes of one tensor of the checkpoint, in elements of two bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    split: int | None  # the dimension of which each tensor-parallel rank has an equal part; None: let the loader say
    positions: bytes  # int64, in the flat tensor
    values: bytes


class VllmPatchFile(msgspec.Struct):
    """supervisor -> worker: the whole file."""

    since: int
    version: int
    patches: list[VllmPatch]


@dataclass
class Begin(WeightTransferInitInfo):  # type: ignore[misc]
    """The weights were loaded, as this version."""

    version: int


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    file: str


class PagurusTransfer(WeightTransferEngine):  # type: ignore[misc]
    """``init {"version": 6}``, then for each version: start, ``update {"file": ...}``, finish."""

    init_info_cls = Begin
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        self.version: int | None = None
        parallel = vllm_config.parallel_config
        self.parts: int = parallel.tensor_parallel_size
        self.part: int = parallel.rank % self.parts  # tensor-parallel ranks follow one another

    def init_transfer_engine(self, init_info: Begin) -> None:
        self.version = init_info.version

    def start_weight_update(self) -> None:
        """Nothing: weights are changed in place."""

    def finish_weight_update(self) -> None:
        """Nothing: they are changed when `update_weights` returns."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        result = msgspec.msgpack.decode(Path(update_info.file).read_bytes(), type=VllmPatchFile)
        if self.version != result.since:
            raise ValueError(f"changes from version {result.since} do not fit weights of version {self.version}")
        ready = list(self._mine(result.patches))
        self.version = None  # until all is written
        for item in ready:  # one at a time: each is laid out as large as its tensor
            load_checkpoint_weight_patches(self.model, [item], validate_unique_indices=False)
        self.version = result.version

    def shutdown(self) -> None:
        """Nothing is held."""

    def _mine(self, patches: list[VllmPatch]) -> Iterator[CheckpointWeightPatch]:
        for patch in patches:
            dtype = DTYPES[patch.dtype]
            positions = np.frombuffer(patch.positions, dtype=np.int64)
            values = np.frombuffer(patch.values, dtype=np.int16)
            if patch.split is not None and self.parts > 1 and patch.shape[patch.split] % self.parts == 0:
                item = patch.shape[patch.split] // self.parts
                inner = math.prod(patch.shape[patch.split + 1 :])
                inside = positions // inner % patch.shape[patch.split] // item == self.part
                positions, values = positions[inside], values[inside]
            if len(positions):
                yield CheckpointWeightPatch(
                    name=patch.name,
                    shape=patch.shape,
                    dtype=dtype,
                    values=torch.from_numpy(values.copy()).view(dtype).to(self.device),
                    indices=torch.from_numpy(positions.copy()).to(self.device),
                )


WeightTransferEngineFactory.register_engine(BACKEND, PagurusTransfer)


class WorkerExtension:
    """For ``--worker-extension-cls``: to name it is to import this module."""
