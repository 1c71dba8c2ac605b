"""How the tensors of a model are cut, so that every trainer rank writes its own part and every engine reads its own.

Pure: the same tensors and counts give the same layout everywhere.

A tensor is looked at as a table of 16-bit words: its first dimension gives the rows, the others the columns; an element
of four bytes is two words. A *piece* is a rectangle of one tensor that lies in one trainer rank's rows (as FSDP2 cuts
them) and in one *slot* of the tensor-parallel axis (as Megatron cuts them: rows of query, key, value, gate, up and the
embeddings; columns of the output and down projections). A *segment* is a list of pieces of one rank and one slot, one
after another, of bounded size: what is encoded, stored and fetched as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from sandbox.errors import Invalid

WORDS = {"BF16": 1, "F16": 1, "I16": 1, "U16": 1, "F32": 2, "I32": 2, "U32": 2, "F64": 4, "I64": 4}
EVERYBODY = -1  # the slot of what no engine splits
SEGMENT_WORDS = 1 << 24  # 32 MiB of weights
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")
Box = tuple[int, int, int, int]  # top, bottom, left, right: rows and columns (words) of a tensor's table


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor as a Hugging Face directory names it. `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """In words."""
        return math.prod(self.shape[1:]) * WORDS[self.dtype]


class TensorBlock(msgspec.Struct, frozen=True, array_like=True):
    """Rows top..bottom and columns (words) left..right of tensor number `tensor`."""

    tensor: int
    top: int
    bottom: int
    left: int
    right: int

    @property
    def words(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


class LayoutSegment(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    slot: int
    pieces: list[TensorBlock]

    @property
    def words(self) -> int:
        return sum(piece.words for piece in self.pieces)


class Layout(msgspec.Struct, frozen=True):
    """publisher -> readers. `slots` is the largest tensor parallelism that can read it by slices."""

    tensors: list[TensorSpec]
    segments: list[LayoutSegment]
    slots: int = 1

    def needed(self, part: int = 0, parts: int = 1) -> list[int]:
        """Numbers of the segments that engine rank `part` of `parts` reads; Invalid where the slots do not divide."""
        if parts < 1 or self.slots % parts or not 0 <= part < parts:
            raise Invalid(
                f"rank {part} of {parts} cannot read weights that are cut into {self.slots} slots",
                hint="publish with a number of slots that the tensor parallelism divides",
            )
        item = self.slots // parts
        mine = {EVERYBODY, *range(part * item, (part + 1) * item)}
        return [number for number, segment in enumerate(self.segments) if segment.slot in mine]

    @property
    def words(self) -> int:
        return sum(spec.rows * spec.columns for spec in self.tensors)


def axis(name: str, shape: tuple[int, ...]) -> int | None:
    """The dimension along which tensor-parallel engines split this weight; None: each engine has all of it."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return None
    layer = name.rsplit(".", 2)[-2]
    return 0 if layer in ROWS else 1 if layer in COLUMNS else None


def rank_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows of trainer rank `rank`, as FSDP2 gives them out (`torch.chunk` along dimension 0)."""
    item = -(-rows // ranks)
    return min(rank * item, rows), min((rank + 1) * item, rows)


def slot_box(spec: TensorSpec, slot: int, slots: int) -> Box | None:
    """A slot's part of a tensor; of what is not split, EVERYBODY's part is all of it."""
    along = axis(spec.name, spec.shape)
    complete = (0, spec.rows, 0, spec.columns)
    if slots == 1 or along is None or spec.shape[along] % slots:
        return complete if slot == EVERYBODY else None
    if slot == EVERYBODY:
        return None
    if along == 0:
        item = spec.rows // slots
        return slot * item, (slot + 1) * item, 0, spec.columns
    width = spec.columns // slots
    return 0, spec.rows, slot * width, (slot + 1) * width


def cut(
    tensors: Iterable[TensorSpec],
    *,
    ranks: int = 1,
    slots: int = 1,
    segment_words: int = SEGMENT_WORDS,
    boxes: Sequence[Mapping[str, Box]] | None = None,
) -> Layout:
    """The layout of these tensors, written by `ranks` trainer ranks, for engines of up to `slots` ranks.

    `boxes`: what each rank holds of each tensor, where that is not rows as FSDP2 gives them out. What several ranks
    hold is written by the first of them. Raises Invalid for a dtype whose elements are not whole 16-bit words.
    """
    specs = sorted(tensors, key=lambda spec: spec.name)
    strange = sorted({spec.dtype for spec in specs} - WORDS.keys())
    if strange:
        raise Invalid(f"weights of dtype {strange[0]} cannot be published", hint="publish them as bfloat16")
    if boxes is None:
        boxes = [{spec.name: rows_box(spec, rank, ranks) for spec in specs} for rank in range(ranks)]
    segments = [
        LayoutSegment(rank, slot, pieces)
        for rank, own in enumerate(_once(boxes))
        for slot in (EVERYBODY, *range(slots))
        for pieces in _grouped(_pieces(specs, own, slot, slots, segment_words), segment_words)
    ]
    return Layout(specs, segments, slots)


def rows_box(spec: TensorSpec, rank: int, ranks: int) -> Box:
    """A rank's rows of a tensor."""
    return *rank_rows(spec.rows, rank, ranks), 0, spec.columns


def _once(boxes: Sequence[Mapping[str, Box]]) -> list[dict[str, Box]]:
    """Each box at the first rank that has it."""
    observed: set[tuple[str, Box]] = set()
    result = []
    for held in boxes:
        own = {name: box for name, box in held.items() if (name, box) not in observed}
        observed |= set(own.items())
        result.append(own)
    return result


def _pieces(
    specs: list[TensorSpec], own: Mapping[str, Box], slot: int, slots: int, limit: int
) -> Iterator[TensorBlock]:
    for number, spec in enumerate(specs):
        box, held = slot_box(spec, slot, slots), own.get(spec.name)
        if box is None or held is None:
            continue
        top, bottom, left, right = (
            max(box[0], held[0]),
            min(box[1], held[1]),
            max(box[2], held[2]),
            min(box[3], held[3]),
        )
        if left >= right:
            continue
        step = max(1, limit // (right - left))
        for row in range(top, bottom, step):
            yield TensorBlock(number, row, min(row + step, bottom), left, right)


def _grouped(pieces: Iterator[TensorBlock], limit: int) -> Iterator[list[TensorBlock]]:
    group: list[TensorBlock] = []
    size = 0
    for piece in pieces:
        if group and size + piece.words > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.words
    if group:
        yield group
