"""The trainer's own save: everything that a killed run needs to continue where it was.

Guarantee: a save is visible only when complete and sealed (written aside, synced, renamed); after `kill -9` of any rank
at any instant `load` returns the state after some optimiser step, with the batch that this step consumed named in it,
so that the ledger learns of it exactly once. A save that was damaged later is passed over for the one before, and said.
Any number of ranks reads what another number wrote. Called resume state: checkpoints are of sandboxes.

::

    start_save(): copy to memory ─▶ [thread: write shards, sync] ─▶ wait_saved(): seal, rename, collect old ones
"""

from __future__ import annotations

import errno
import random
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from sandbox import durable
from sandbox.errors import EngineFailed
from trainer.batches.aside import PutAside
from trainer.distributed.ranks import ALONE, Ranks
from trainer.distributed.save_parts import SavePartsReader
from trainer.distributed.shard import local
from trainer.errors import TrainerFailed
from trainer.models.scorer import Scorer
from trainer.seal import verify_directory, write_manifest
from trainer.weights import need_finite

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # alone there is no group, and none needed
KEEP = 2
OPTIONS = StateDictOptions(ignore_frozen_params=True)  # with adapters, the frozen weights are the base directory's


class Resumable(Protocol):
    """Who takes steps: a model and its optimisers."""

    scorer: Scorer
    optimisers: list[torch.optim.Optimizer]


class ResumeState(msgspec.Struct, kw_only=True):
    """After optimiser step number `step` (0: fitted to the demonstrations, no step of the objective yet)."""

    step: int
    version: int = 0  # of the weights that follow from it
    consumed: list[str] = []  # prompts of the step's batch
    put_aside: list[PutAside] = []  # of these, the samples that were not trained on
    totals: dict[str, Any] = {}  # counters of the run so far, as report.Totals
    ranks: int = 1  # that wrote it


@dataclass(frozen=True)
class ShardCarrier:
    """Takes files to the host that keeps the saves, and parts of files from there."""

    upload: Callable[[Path], None]
    part: Callable[[str, int, int], bytes]  # of a file of the save to continue from: its name, offset, bytes
    first: bool  # of the ranks on this host


class Saves:
    """``saves.start_save(learner, ResumeState(step=3))``, work, ``saves.wait_saved()``. All ranks call the same, in
    order."""

    def __init__(self, directory: Path, ranks: Ranks = ALONE, *, carry: ShardCarrier | None = None):
        """`carry`: from a host without the directory that rank 0 writes to."""
        self.directory, self.ranks, self.carry = directory, ranks, carry
        self.notes: list[str] = []  # saves that were passed over, and why
        self._group = None if ranks.alone else dist.new_group(backend="gloo")  # its own: a thread uses it
        self._pending: tuple[ResumeState, Future[Any]] | None = None

    def start_save(self, learner: Resumable, state: ResumeState) -> None:
        """Copies what is to be saved; from here on the weights may change. One save at a time."""
        self.wait_saved()
        aside = self.directory / ".new"
        if self.ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            (aside / "state.json").write_bytes(msgspec.json.encode(state))
        elif self.carry is not None and self.carry.first:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        self._together()
        (aside / f"random-{self.ranks.rank}.msgpack").write_bytes(msgspec.msgpack.encode(_chance()))
        tensors = _tensors(learner)
        need_finite({name: local(tensor) for name, tensor in tensors["model"].items()})
        self._capacity(tensors)
        alone = self.ranks.alone
        future = dcp.async_save(tensors, checkpoint_id=str(aside), process_group=self._group, no_dist=alone)
        assert isinstance(future, Future)
        self._pending = (state, future)

    def poll(self) -> None:
        """Makes the save that was started visible if it is written, on all ranks."""
        if self._pending is not None and not self.ranks.any(not self._pending[1].done()):
            self.wait_saved()

    def wait_saved(self) -> None:
        """Waits for the save that was started, if any, and makes it visible."""
        if self._pending is None:
            return
        (state, future), self._pending = self._pending, None
        try:
            future.result()
            self._carry()
        except Exception as error:
            if shutil.disk_usage(self.directory).free < 1 << 20:
                raise OSError(errno.ENOSPC, "no space left for the resume state") from error
            if isinstance(error, RuntimeError) and not self.ranks.alone:
                raise  # between ranks: another one is gone, which who watches them names
            raise TrainerFailed(f"the resume state of step {state.step} was not written: {error}") from error
        self._together()
        if self.ranks.rank == 0:
            self._show(state)
        self._together()

    def save(self, learner: Resumable, state: ResumeState) -> None:
        self.start_save(learner, state)
        self.wait_saved()

    def load(self, learner: Resumable) -> ResumeState | None:
        """Puts the newest whole save into `learner` and the generators of chance; None where there is none yet."""
        chosen = self._choose()
        if chosen is None:
            return None
        state = msgspec.json.decode((chosen / "state.json").read_bytes(), type=ResumeState)
        tensors = _tensors(learner)
        reader = None if self.carry is None else SavePartsReader(chosen, self.carry.part)
        dcp.load(tensors, checkpoint_id=str(chosen), storage_reader=reader, no_dist=self.ranks.alone)
        set_state_dict(
            learner.scorer,
            learner.optimisers,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimiser"],
            options=StateDictOptions(strict=False),
        )
        drawn = chosen / f"random-{self.ranks.rank}.msgpack"
        if drawn.exists():
            _restore_chance(msgspec.msgpack.decode(drawn.read_bytes()))
        else:  # more ranks than before: a stream of its own for each new one
            torch.manual_seed(state.step * 4096 + self.ranks.rank)
        return state

    def newest(self) -> ResumeState | None:
        """What the newest whole save says, without its tensors."""
        chosen = self._choose()
        return None if chosen is None else msgspec.json.decode((chosen / "state.json").read_bytes(), type=ResumeState)

    # ------------------------------------------------------------------ parts

    def _carry(self) -> None:
        """This rank's part of the save, to where rank 0 completes it."""
        if self.carry is None:
            return
        rank = self.ranks.rank
        for path in (self.directory / ".new").iterdir():
            if path.name.startswith(f"__{rank}_") or path.name == f"random-{rank}.msgpack":
                self.carry.upload(path)

    def _show(self, state: ResumeState) -> None:
        aside, target = self.directory / ".new", self.directory / f"step-{state.step:06d}"
        for path in aside.iterdir():
            durable.sync(path)
        write_manifest(aside, state.step)
        shutil.rmtree(target, ignore_errors=True)  # a save of the same step, by a run that went on from before it
        aside.rename(target)
        durable.sync(self.directory)
        for old in saves_in(self.directory)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def _choose(self) -> Path | None:
        """The newest save that is whole; all ranks take the one that rank 0 found."""
        result: list[str | None] = [None]
        if self.ranks.rank == 0:
            chosen = self._complete()
            result = [None if chosen is None else chosen.name]
        if not self.ranks.alone:
            dist.broadcast_object_list(result, src=0)
        return None if result[0] is None else self.directory / result[0]

    def _complete(self) -> Path | None:
        there = saves_in(self.directory)
        for path in reversed(there):
            try:
                verify_directory(path)
            except EngineFailed as error:
                self.notes.append(f"{path.name} is damaged and passed over: {error.message}")
            else:
                return path
        if there:
            raise TrainerFailed(f"no save in {self.directory} is whole", hint="; ".join(self.notes))
        return None

    def _capacity(self, tensors: dict[str, Any]) -> None:
        """Refuses before the disk is full."""
        target = sum(_bytes(part) for part in tensors.values())
        free = shutil.disk_usage(self.directory).free
        if free < target:
            raise OSError(errno.ENOSPC, f"the resume state needs {target >> 20} MiB, {free >> 20} are free")

    def _together(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)


def saves_in(directory: Path) -> list[Path]:
    """Visible saves, oldest first."""
    return sorted(directory.glob("step-*"))


def weights_of(save: Path) -> dict[str, torch.Tensor]:
    """The weights of a save, complete, under the names of the model."""
    prefix = "model.model."
    there = dcp.FileSystemReader(save).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in there.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=str(save), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _tensors(learner: Resumable) -> dict[str, Any]:
    model, optimiser = get_state_dict(learner.scorer, learner.optimisers, options=OPTIONS)
    return {"model": model, "optimiser": optimiser}


def _bytes(part: object) -> int:
    if isinstance(part, torch.Tensor):
        return local(part).numel() * part.element_size()
    if isinstance(part, dict):
        return sum(_bytes(item) for item in part.values())
    return 0


def _chance() -> dict[str, Any]:
    """The state of every generator of random numbers of this process."""
    kind, key, position, has, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (kind, np.asarray(key).tobytes(), position, has, cached),
    }


def _restore_chance(state: dict[str, Any]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))
    version, numbers, cached = state["python"]
    random.setstate((version, tuple(numbers), cached))
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(key, dtype=np.uint32), *rest))
