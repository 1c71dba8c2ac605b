"""Our own small Qwen3 over rows of a contiguous cache: on a CPU it is quicker than blocks, which must be gathered."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rollout.engine.embedded.model import KVCache, Qwen3
from rollout.engine.embedded.scheduler import CacheCopy, EngineStep, Scheduler


class Rows:
    """``Rows(model, rows=12, length=1024).compute(step, scheduler)``"""

    tokens = None  # each row has room for the longest sequence
    held = None

    def __init__(self, model: Qwen3, *, rows: int, length: int):
        self.model = model
        self._cache = KVCache(model.config, rows, length)
        self.token_bytes = sum(item[0, :, 0].nbytes for item in (*self._cache.keys, *self._cache.values))

    def copy(self, copies: Iterable[CacheCopy], scheduler: Scheduler) -> None:
        for copy in copies:
            self._cache.copy(copy.source, copy.target, copy.length)

    def forget(self) -> None:
        """What is computed again is written over what was there."""

    def wipe(self, row: int) -> None:
        """What it holds is not finite: who gets the row must not see it behind a mask."""
        for layer in (*self._cache.keys, *self._cache.values):
            layer[row] = 0

    def compute(self, step: EngineStep, scheduler: Scheduler) -> Tensor:
        """Logits [., V] after each decoded sequence's newest token, then after the end of each piece."""
        result = []
        if step.decode:
            # Rows that are still being prefilled take part with a token of no meaning, written to the position that
            # their own prefill or decode overwrites: cheaper than gathering the ready rows.
            chosen = [sequence.row for sequence in step.decode]
            running = scheduler.running[: max(chosen) + 1]
            tokens = torch.tensor([sequence.tokens[sequence.computed] for sequence in running])
            positions = torch.tensor([sequence.computed for sequence in running])
            result.append(self.model.decode(tokens, positions, self._cache)[chosen])
        if step.prefill:
            pieces = [(piece.sequence.row, piece.start, piece.end) for piece in step.prefill]
            read = [token for piece in step.prefill for token in piece.sequence.tokens[piece.start : piece.end]]
            result.append(self.model.prefill(torch.tensor(read), pieces, self._cache))
        return torch.cat(result)
