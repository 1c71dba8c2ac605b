"""Any causal model of transformers over a paged cache: blocks of keys and values, those of a common prefix held once.

Guarantee: a token sees exactly the positions before it of its own row, whatever is computed with it.

The model's own code does all but attention, which is registered with transformers under `NAME`. Rows that decode are
gathered by similar length, each group into one product; each piece of a prompt is attended to by itself. The code is
the same on every device.

Shapes: N tokens of a step, n rows decoded together, H heads, G key/value heads, D head size, L gathered positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollout.engine.embedded.blocks import SIZE, BlockTables
from rollout.engine.embedded.routers import ExpertRecord
from rollout.engine.embedded.scheduler import CacheCopy, EngineStep, Scheduler, Sequence
from sandbox.errors import EngineFailed

NAME = "pagurus_paged"
FILLED = 0.8  # of a GPU's free memory, at most, is cache


@dataclass(frozen=True)
class Heads:
    """What a layer keeps of a token."""

    count: int  # G
    key: int  # D
    value: int  # D
    window: int | None  # a token sees so many back, itself included


@dataclass(eq=False)
class AttentionRows:
    """Rows that are attended to in one product: several with a token each, or one with a piece of its prompt."""

    at: Tensor  # [n or piece]: where their tokens lie among the N
    blocks: Tensor  # [rows, L / SIZE]
    positions: Tensor  # [n, 1] or [1, piece]
    complete: bool  # a prompt from its beginning: no mask is needed
    existing: dict[Any, Tensor] = field(default_factory=dict)  # what all layers have in common

    def chosen(self, groups: int, blocks: int) -> Tensor:
        """Where the blocks lie in a layer's tensor, for each of its heads."""
        if groups not in self.existing:
            heads = torch.arange(groups, device=self.blocks.device)[:, None]
            self.existing[groups] = (heads * blocks + self.blocks.view(-1)).view(-1)
        return self.existing[groups]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[rows, positions, L]: what is added to scores."""
        name = ("mask", window)
        if name not in self.existing:
            observed = torch.arange(self.blocks.shape[1] * SIZE, device=self.blocks.device)
            hidden = observed > self.positions[:, :, None]
            if window is not None:
                hidden |= observed <= self.positions[:, :, None] - window
            self.existing[name] = torch.zeros(hidden.shape, dtype=dtype, device=observed.device).masked_fill_(
                hidden, float("-inf")
            )
        return self.existing[name]


class PagedModel:
    """``PagedModel(model, layers, rows=12, slots=4, length=1024, cache=4096).compute(step, scheduler)``"""

    def __init__(
        self,
        model: nn.Module,
        layers: Many[Heads],
        *,
        rows: int,
        slots: int,
        length: int,
        cache: int,
        record: ExpertRecord | None = None,
    ):
        """`cache`: tokens of all that run together. Each may have begun a block, and have a copy of one besides.
        `record`: has the experts of each token, which are kept as long as its keys and values."""
        self.model, self.layers = model, layers
        weights = next(model.parameters())
        self._device = weights.device
        self.token_bytes = sum(item.count * (item.key + item.value) for item in layers) * weights.element_size()
        if self._device.type == "cuda":
            cache = min(cache, int(FILLED * torch.cuda.mem_get_info(self._device)[0]) // self.token_bytes)
        self.tokens = max(length, cache)
        self._blocks = -(-self.tokens // SIZE) + 2 * slots
        self._tables = BlockTables(rows, self._blocks)
        try:
            self._keys, self._values = (
                [_zeros(item.count * self._blocks, SIZE * getattr(item, kind), weights) for item in layers]
                for kind in ("key", "value")
            )
        except (RuntimeError, MemoryError) as error:
            target = f"{self._blocks * SIZE * self.token_bytes / 2**30:.1f} GiB"
            raise EngineFailed(f"a cache of {target} does not fit: {error}", hint="give a smaller --cache") from None
        self._gathered = [weights.new_empty(0), weights.new_empty(0)]
        self._record = record
        shape = (0, 0) if record is None else (record.layers, record.top_k)
        self._experts = torch.zeros(self._blocks, SIZE, *shape, dtype=torch.int16, device=self._device)
        self._parts: list[AttentionRows] = []
        self._places: Tensor  # [N] where the step's keys and values are kept

    def held(self, rows: int) -> int:
        """Positions of the blocks of so many rows; common ones count once."""
        return self._tables.held(rows)

    def copy(self, copies: Iterable[CacheCopy], scheduler: Scheduler) -> None:
        """Copied rows have their blocks in common; rows in which nothing runs any more release theirs."""
        for copy in copies:
            self._tables.share(copy.source, copy.target, copy.length)
        self._tables.release(range(len(scheduler.running), scheduler.slots))

    def forget(self) -> None:
        """Nothing that is kept is valid."""
        self._tables.release(range(len(self._tables.tables)))

    def wipe(self, row: int) -> None:
        """What this row alone holds is not finite: the next user of these blocks must not see it behind a mask."""
        for retained, heads in self._retained():
            retained.view(heads.count, self._blocks, -1)[:, self._tables.own(row)] = 0

    @torch.inference_mode()
    def compute(self, step: EngineStep, scheduler: Scheduler) -> Tensor:
        """Logits [., V] after each decoded sequence's newest token, then after the end of each piece. One pass."""
        spans = [(item, item.computed, item.computed + 1) for item in step.decode]
        spans += [(piece.sequence, piece.start, piece.end) for piece in step.prefill]
        for sequence, start, end in spans:
            copied = self._tables.extend(sequence.row, start, end, scheduler.evict)
            if copied is not None:
                for retained, heads in self._retained():
                    blocks = retained.view(heads.count, self._blocks, -1)
                    blocks[:, copied[1]] = blocks[:, copied[0]]
                self._experts[copied[1]] = self._experts[copied[0]]
        tokens = self._tensor([token for item, start, end in spans for token in item.tokens[start:end]])
        positions = self._plan(spans)
        last = self._tensor([end - start for _, start, end in spans]).cumsum(0) - 1
        logits: Tensor = self.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=last, pages=self
        ).logits[0]
        if self._record is not None:
            self._experts.flatten(0, 1)[self._places] = self._record.taken()
        return logits if len(logits) == len(spans) else logits[last]

    def experts(self, row: int, count: int) -> Tensor:
        """[count, layers, top_k] of the first tokens of a row, where they are recorded."""
        return self._experts[self._tables.tables[row]].flatten(0, 1)[:count]

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """q [H, N, D], k and v [G, N, D] of one layer -> [N, H, D]. Keeps k and v."""
        layer, scale = module.layer_idx, options.get("scaling")
        heads, retained = self.layers[layer], (self._keys[layer], self._values[layer])
        for tensor, new in zip(retained, (k, v), strict=True):
            tensor.view(heads.count, -1, new.shape[-1]).index_copy_(1, self._places, new.to(tensor.dtype))
        out = q.new_empty(q.shape[1], q.shape[0], v.shape[-1])
        for part in self._parts:
            chosen, rows = part.chosen(heads.count, self._blocks), len(part.blocks)
            keys, values = (
                self._gather(side, retained[side], chosen).view(heads.count, rows, -1, retained[side].shape[1] // SIZE)
                for side in (0, 1)
            )
            out[part.at] = _attention(q[:, part.at].to(keys.dtype), keys, values, part, heads.window, scale).to(q.dtype)
        return out

    def _gather(self, side: int, retained: Tensor, chosen: Tensor) -> Tensor:
        """Blocks, one after the other. The memory is used again: fresh memory costs more than what is written to it."""
        size = len(chosen) * retained.shape[1]
        if self._gathered[side].numel() < size:
            self._gathered[side] = retained.new_empty(size)
        out = self._gathered[side][:size].view(len(chosen), -1)
        return torch.index_select(retained, 0, chosen, out=out)

    def _plan(self, spans: list[tuple[Sequence, int, int]]) -> Tensor:
        """Which tokens are attended to together; the positions [N] of all."""
        places, positions, at = list[int](), list[int](), 0
        single, parts = dict[int, list[tuple[int, list[int], int]]](), []
        for sequence, start, end in spans:
            table = self._tables.tables[sequence.row]
            places += [table[item // SIZE] * SIZE + item % SIZE for item in range(start, end)]
            positions += range(start, end)
            if end - start == 1:  # by length: what is gathered is at most twice what is needed
                single.setdefault(len(table).bit_length(), []).append((at, table, start))
            else:
                where = torch.arange(at, at + end - start, device=self._device)
                rows = torch.arange(start, end, device=self._device)[None]
                parts.append(AttentionRows(where, self._tensor([table]), rows, complete=start == 0))
            at += end - start
        for some in single.values():
            wide = max(len(table) for _, table, _ in some)
            blocks = [[*table, *[table[0]] * (wide - len(table))] for _, table, _ in some]
            where, rows = self._tensor([item[0] for item in some]), self._tensor([item[2] for item in some])
            parts.append(AttentionRows(where, self._tensor(blocks), rows[:, None], complete=False))
        self._parts, self._places = parts, self._tensor(places)
        return self._tensor(positions)

    def _tensor(self, numbers: list[Any]) -> Tensor:
        return torch.tensor(numbers, device=self._device)

    def _retained(self) -> Iterable[tuple[Tensor, Heads]]:
        return zip((*self._keys, *self._values), (*self.layers, *self.layers), strict=True)


def _zeros(rows: int, width: int, like: Tensor) -> Tensor:
    """On a CPU, memory that is not taken before it is written to."""
    if not like.is_cpu:
        return like.new_zeros(rows, width)
    return torch.from_numpy(np.zeros((rows, width * like.element_size()), np.uint8)).view(like.dtype)


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, part: AttentionRows, window: int | None, scale: float | None
) -> Tensor:
    """q [H, n or piece, D] over keys and values [G, rows, L, D] -> [n or piece, H, D]."""
    groups, rows, length, _ = keys.shape
    if rows > 1 or q.shape[1] == 1:  # a row's heads of one group are its queries
        q = q.unflatten(0, (groups, -1)).transpose(1, 2)
        mask = part.mask(window, q.dtype)[None].expand(groups, -1, q.shape[2], -1)
        result = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        return result.permute(1, 0, 2, 3).flatten(1, 2)
    plain = part.complete and (window is None or window >= q.shape[1])
    end = q.shape[1] if plain else length
    result = F.scaled_dot_product_attention(
        q[None],
        keys.transpose(0, 1)[:, :, :end],
        values.transpose(0, 1)[:, :, :end],
        attn_mask=None if plain else part.mask(window, q.dtype)[None],
        is_causal=plain,
        scale=scale,
        enable_gqa=groups != len(q),
    )
    return result[0].transpose(0, 1)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: query [1, H, N, D], key and value [1, G, N, D] -> [1, N, H, D]."""
    result: Tensor = options["pages"].attend(module, query[0], key[0], value[0], options)
    return result[None], None
