"""`ModelPublisher`: the weights of a model that takes steps, with the files that make an engine's directory of them."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

from rollout.weights.adapter import CONFIG
from rollout.weights.store import VersionStore
from rollout.weights.versions import VersionRef
from trainer.distributed.ranks import ALONE, Ranks
from trainer.models.load import Lora, published
from trainer.weights import Publisher, Seconds


class ModelPublisher:
    """``publisher.start(3)``, work, ``publisher.wait()``. All ranks call the same; the shards of each are its own."""

    def __init__(
        self,
        model: nn.Module,
        directory: Path,
        *,
        base: Path,
        lora: Lora | None = None,
        keep: int = 0,
        ranks: Ranks = ALONE,
        apart: bool = False,
        first: bool = True,
    ):
        """`directory` of versions, of which `keep` stay (0: all). `base`: what training began with. `apart`: each host
        has a directory of its own."""
        self.model, self.base, self.lora = model, base, lora
        self.publisher = Publisher(
            VersionStore(directory), keep=keep or sys.maxsize, ranks=ranks, apart=apart, first=first
        )
        self._resumed = False
        self._first = 0

    def begin(self, step: int, last: int) -> None:
        """Training continues after `step`, and takes those up to `last` again: what is published of them stays."""
        self._first = self.publisher.first(step, last)

    def start(self, version: int) -> None:
        """Begins to make this version. The first time: unless a process before this one has published these very
        weights; versions above, of steps that were lost, are withdrawn."""
        if version < self._first:
            return
        tensors, files = published(self.model), self._files()
        if not self._resumed:
            self._resumed = True
            if self.publisher.resume(tensors, version=version, files=files):
                return
        self.publisher.start(version, tensors, files)

    def wait(self) -> VersionRef | None:
        """Makes the version that was started visible; None if it was not needed."""
        return self.publisher.wait()

    @property
    def seconds(self) -> Seconds:
        return self.publisher.seconds

    def close(self) -> None:
        self.publisher.close()

    def _files(self) -> dict[str, bytes]:
        if self.lora is not None:
            return {CONFIG: self.lora.file(self.base, self.model)}
        paths = [path for path in self.base.iterdir() if path.is_file() and ".safetensors" not in path.name]
        return {path.name: path.read_bytes() for path in paths}
