"""`Mirror`: a Hugging Face directory of weights on the engine's host, brought from version to version in place.

Guarantee: `version` is set only while every piece has the digest that its manifest names. Killed at any instant, the
mirror either has its version or says that it has none and what it was about to become: changes name values, not
differences, so the same steps can be written again. Only this engine rank's part of each tensor is held.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from rollout.weights import adapter
from rollout.weights.codec import Positions, SegmentDelta, Words
from rollout.weights.layout import EVERYBODY, Layout, TensorBlock, TensorSpec, slot_box
from rollout.weights.versions import PIECE_DIGEST, Content, piece_digest
from sandbox import durable
from sandbox.errors import NotEqual

STATE = "mirror.json"
WEIGHTS = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Table = npt.NDArray[np.uint16]  # [rows, words]


class MirrorState(msgspec.Struct, kw_only=True):
    version: int | None = None  # None: the bytes are of no version
    digest: str | None = None  # of its manifest
    since: str | None = None  # where `version` is None: the manifest from which the steps below were begun
    towards: str | None = None  # and the one that they lead to


class Write(msgspec.Struct, frozen=True):
    """Elements of one tensor of the mirror: ``tensor.flat_words[positions] = values``; None: all of `values`."""

    name: str
    positions: Positions | None
    values: Words


class Mirror:
    """``begin(...)``; ``write(segment, changes)`` for each; ``finish(version, digest, digests)``."""

    def __init__(self, directory: Path | str, *, part: int = 0, parts: int = 1, untie: bool = False):
        """`untie` writes the embedding as a head of its own too, for an engine that does not follow a tied head."""
        self.directory, self.part, self.parts, self.untie = Path(directory), part, parts, untie
        self.directory.mkdir(parents=True, exist_ok=True)
        self._layout: Layout | None = None
        self._tables: dict[str, Table] = {}
        self._boxes: list[tuple[int, int]] = []  # row and column at which this rank's part of each tensor begins
        path = self.directory / STATE
        self.state = msgspec.json.decode(path.read_bytes(), type=MirrorState) if path.exists() else MirrorState()

    @property
    def version(self) -> int | None:
        return self.state.version

    def begin(self, layout: Layout, since: str | None, towards: str) -> None:
        """From here until `finish` the mirror has no version. Makes a new file where it is of another layout."""
        if since is None or not self._open(layout):
            self._create(layout)
        self._save(MirrorState(since=since, towards=towards))

    def write(self, number: int, changes: SegmentDelta) -> list[Write]:
        """Put the changes of segment `number` in place; the same by tensor, for an engine that has them in memory."""
        layout = self._need()
        segment = layout.segments[number]
        writes: list[Write] = []
        offset = first = 0
        for piece in segment.pieces:
            if changes.positions is None:
                write = self._complete(piece, changes.values[offset : offset + piece.words])
            else:
                last = int(np.searchsorted(changes.positions, offset + piece.words))
                if first == last:
                    offset += piece.words
                    continue
                inside = changes.positions[first:last] - offset
                write = self._some(piece, inside, changes.values[first:last])
                first = last
            writes += self._applied(write)
            offset += piece.words
        return writes

    def finish(self, version: int, manifest: str, digests: bytes) -> None:
        """Check every piece that this rank holds against its digest, then have this version. Raises NotEqual."""
        wrong = self.wrong(digests)
        if wrong is not None:
            self._save(MirrorState())
            raise NotEqual(
                f"{wrong} differs from version {version} after its changes were written",
                hint="fetch the whole image of this version",
            )
        durable.sync(self._path)
        self._save(MirrorState(version=version, digest=manifest))

    def poll(self, layout: Layout, digests: bytes) -> None:
        """Check what is there, as `finish` does. Raises NotEqual, and has no version then."""
        wrong = self.wrong(digests) if self._open(layout) else WEIGHTS
        if wrong is not None:
            self._save(MirrorState())
            raise NotEqual(f"{wrong} in {self.directory} was damaged", hint="fetch the whole image of this version")

    def wrong(self, digests: bytes) -> str | None:
        """The first tensor of which a piece differs from its digest; None: all that this rank holds is as published."""
        layout = self._need()
        target = set(layout.needed(self.part, self.parts))
        at = 0
        for number, segment in enumerate(layout.segments):
            for piece in segment.pieces:
                if number in target and piece_digest(self._bytes(piece)) != digests[at : at + PIECE_DIGEST]:
                    return layout.tensors[piece.tensor].name
                at += PIECE_DIGEST
        return None

    def put_files(self, files: Iterable[tuple[str, Content]]) -> None:
        """What lies next to the weights: config.json, the tokenizer. Names are plain names: they come from
        elsewhere."""
        for name, content in files:
            if "/" in name or name.startswith(".") or name in (STATE, WEIGHTS, adapter.WEIGHTS):
                continue
            if name == "config.json" and self.untie:
                content = json.dumps({**json.loads(content), "tie_word_embeddings": False}, indent=2).encode()
            (self.directory / name).write_bytes(content)

    def tables(self) -> dict[str, Table]:
        """Every tensor as 16-bit words [rows, columns], mapped from the file. Only to be read by others."""
        if not self._tables:
            self._map(*self._header())
        return self._tables

    def dtypes(self) -> dict[str, str]:
        """Of every tensor, as safetensors spells it."""
        return {spec.name: spec.dtype for spec in self._header()[0]}

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor, as safetensors spells them."""
        return {spec.name: (spec.dtype, spec.shape) for spec in self._header()[0]}

    # ------------------------------------------------------------------ pieces in tables

    def _applied(self, write: Write) -> Iterator[Write]:
        yield write
        if self.untie and write.name == EMBEDDING and HEAD not in {spec.name for spec in self._need().tensors}:
            target = self._tables[HEAD].reshape(-1)
            if write.positions is None:
                target[:] = write.values
            else:
                target[write.positions] = write.values
            yield Write(HEAD, write.positions, write.values)

    def _view(self, piece: TensorBlock) -> tuple[str, Table, int, int]:
        """The tensor's name, this piece as a rectangle of its table, and the rectangle's first row and column."""
        spec = self._need().tensors[piece.tensor]
        top, left = self._boxes[piece.tensor]
        table = self._tables[spec.name]
        rectangle = table[piece.top - top : piece.bottom - top, piece.left - left : piece.right - left]
        return spec.name, rectangle, piece.top - top, piece.left - left

    def _bytes(self, piece: TensorBlock) -> bytes | memoryview:
        _, rectangle, _, _ = self._view(piece)
        return np.ascontiguousarray(rectangle).data.cast("B")

    def _complete(self, piece: TensorBlock, values: Words) -> Write:
        name, rectangle, top, left = self._view(piece)
        rectangle[:] = values.reshape(rectangle.shape)
        width = self._tables[name].shape[1]
        if rectangle.shape == self._tables[name].shape:
            return Write(name, None, values)
        rows = (np.arange(top, top + rectangle.shape[0], dtype=np.int64) * width + left)[:, None]
        return Write(name, (rows + np.arange(rectangle.shape[1])).reshape(-1), values)

    def _some(self, piece: TensorBlock, inside: Positions, values: Words) -> Write:
        name, rectangle, top, left = self._view(piece)
        table = self._tables[name]
        rows, columns = np.divmod(inside, rectangle.shape[1])
        positions = (rows + top) * table.shape[1] + columns + left
        table.reshape(-1)[positions] = values
        return Write(name, positions, values)

    # ------------------------------------------------------------------ the file

    @property
    def _path(self) -> Path:
        """The weights; an adapter's lie where engines look for one."""
        alongside = self.directory / adapter.WEIGHTS
        return alongside if alongside.exists() else self.directory / WEIGHTS

    def _specs(self, layout: Layout) -> list[TensorSpec]:
        """This rank's part of every tensor, as the file has it; `_boxes` says where each part begins."""
        self._boxes = []
        specs = []
        for spec in layout.tensors:
            top, bottom, left, right = self._box(layout, spec)
            self._boxes.append((top, left))
            shape = spec.shape
            if (top, bottom, left, right) != (0, spec.rows, 0, spec.columns):
                shape = (bottom - top, (right - left) * spec.shape[1] // spec.columns)
            specs.append(TensorSpec(spec.name, spec.dtype, shape))
        names = {spec.name: spec for spec in specs}
        if self.untie and HEAD not in names and EMBEDDING in names:
            specs.append(TensorSpec(HEAD, names[EMBEDDING].dtype, names[EMBEDDING].shape))
        return specs

    def _box(self, layout: Layout, spec: TensorSpec) -> tuple[int, int, int, int]:
        complete = slot_box(spec, EVERYBODY, layout.slots)
        if complete is not None:
            return complete
        item = layout.slots // self.parts
        first = slot_box(spec, self.part * item, layout.slots)
        last = slot_box(spec, (self.part + 1) * item - 1, layout.slots)
        assert first is not None and last is not None
        return first[0], last[1], first[2], last[3]

    def _create(self, layout: Layout) -> None:
        specs = self._specs(layout)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for spec in specs:
            size = spec.rows * spec.columns * 2
            header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + size]}
            at += size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 64)
        aside = self.directory / f".{WEIGHTS}.new"
        name, other = WEIGHTS, adapter.WEIGHTS
        if adapter.is_adapter(spec.name for spec in specs):
            name, other = other, name
        with aside.open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            os.posix_fallocate(file.fileno(), 0, 8 + len(raw) + at)
        self._save(MirrorState())
        self._tables = {}
        (self.directory / other).unlink(missing_ok=True)
        os.replace(aside, self.directory / name)
        self._map(specs, 8 + len(raw))
        self._layout = layout

    def _open(self, layout: Layout) -> bool:
        """Map the file that is there, if it is of this layout."""
        if self._layout == layout and self._tables:
            return True
        if not self._path.exists():
            return False
        specs = self._specs(layout)
        result, start = self._header()
        if result != specs:
            return False
        self._map(specs, start)
        self._layout = layout
        return True

    def _header(self) -> tuple[list[TensorSpec], int]:
        """What the file says of itself, and where its words begin."""
        with self._path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        specs = [TensorSpec(name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()]
        return specs, 8 + length

    def _map(self, specs: list[TensorSpec], start: int) -> None:
        words = np.memmap(self._path, dtype=np.uint16, mode="r+", offset=start)
        at = 0
        for spec in specs:
            size = spec.rows * spec.columns
            self._tables[spec.name] = words[at : at + size].reshape(spec.rows, spec.columns)
            at += size

    def _need(self) -> Layout:
        assert self._layout is not None, "begin() comes first"
        return self._layout

    def _save(self, state: MirrorState) -> None:
        durable.publish(self.directory / STATE, msgspec.json.encode(state))
        self.state = state
