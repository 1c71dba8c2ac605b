"""`Publisher`: what this rank holds of the model, as the next version of the weights; `ModelPublisher`: with the files
that make an engine's directory of them.

Guarantee: no rank holds or writes another one's shard, and what several hold is written once. A version is visible when
every rank's part of it is on disk and `wait` was called, and not before; weights that are no numbers are never
published; encoding runs in a thread, on a copy: the trainer may save and step during it.

::

    start(): cast and copy ─▶ [thread: compare ▸ encode ▸ hash ▸ put ▸ gather] ─▶ wait(): manifest ─▶ VersionRef
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollout.weights.adapter import CONFIG
from rollout.weights.codec import Positions, Words, changed, encode_changes, encode_complete, pays
from rollout.weights.layout import WORDS, Box, Layout, LayoutSegment, TensorSpec, cut, rows_box
from rollout.weights.store import VersionStore
from rollout.weights.versions import PIECE_DIGEST, Ref, VersionManifest, VersionRef, piece_digest, ref_of
from sandbox.errors import Invalid
from trainer.distributed.blocks import box
from trainer.distributed.ranks import ALONE, Ranks
from trainer.distributed.shard import local
from trainer.models.load import Lora, published

T = TypeVar("T")
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class Seconds(msgspec.Struct, kw_only=True):
    """Of the last publication, on rank 0 of all ranks."""

    copy_s: float = 0.0  # what the step waits for
    encode_s: float = 0.0  # in the thread
    bytes: int = 0  # of changes
    total_bytes: int = 0
    changed: int = 0  # words
    words: int = 0


class EncodedRankVersion(msgspec.Struct):
    """One rank's part of a version: by number of the segment."""

    steps: dict[int, Ref | None]
    complete: dict[int, Ref]
    digests: dict[int, bytes]
    seconds: Seconds


@dataclass(frozen=True)
class RankBlocks:
    """Copies of what this rank holds, with the shapes of the complete tensors and its place in each."""

    tensors: dict[str, Tensor]
    specs: list[TensorSpec]
    boxes: dict[str, Box]


@dataclass
class StagedVersion:
    """A version that only has to be listed."""

    copies: RankBlocks
    complete: bool
    manifest: VersionManifest | None  # on rank 0
    own: set[str]  # digests of what this rank wrote
    held: ExitStack  # its content is not collected until then


class Publisher:
    """``publisher.start(3, tensors, files)``, continue training, ``ref = publisher.wait()``. All ranks call the
    same."""

    def __init__(
        self,
        store: VersionStore,
        *,
        ranks: Ranks = ALONE,
        slots: int = 1,
        complete_every: int = 20,
        keep: int = 3,
        dtype: torch.dtype | None = torch.bfloat16,
        generation: int = 0,
        parts: Ranks | None = None,
        apart: bool = False,
        first: bool = True,
    ):
        """`slots`: the largest tensor parallelism of engines that read by slices. `dtype` None: as the weights are.

        `apart`: each host has a store of its own, whose server readers get in addition to the first rank's; `first`:
        this is the first rank there.
        `complete_every`: how many versions share one whole image; `keep`: versions that stay for late readers.
        """
        self.store, self.ranks, self.slots, self.keep = store, parts or ranks, slots, keep
        self.complete_every, self.dtype, self.generation = complete_every, dtype, generation
        self.apart, self.collects = apart and not self.ranks.alone, first
        self.seconds = Seconds()
        self._group = dist.new_group(backend="gloo") if not self.ranks.alone and parts is None else None
        self._base = RankBlocks({}, [], {})  # what the newest version has of this rank's shards
        self._base_ref: VersionRef | None = None
        self._since_complete = 0
        self._layout: tuple[Layout, Ref] | None = None
        self._hand = ThreadPoolExecutor(1, "publisher")
        self._pending: Future[StagedVersion] | None = None

    def start(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        files: Mapping[str, bytes],
        *,
        shapes: Mapping[str, torch.Size] | None = None,
    ) -> None:
        """Copy this rank's shard of every tensor; the rest happens in a thread.

        Tensors are DTensors, or complete; or, with the `shapes` of the complete ones, rows as FSDP2 gives them out.
        """
        self.wait()
        need_finite({name: local(tensor) for name, tensor in tensors.items()})
        started = time.monotonic()
        copies = self._copies(tensors, shapes)
        self.seconds = Seconds(copy_s=time.monotonic() - started)
        self._pending = self._hand.submit(self._prepare, version, copies, dict(files))

    def wait(self) -> VersionRef | None:
        """Make the version that was started visible. Without one: the newest of this publisher."""
        if self._pending is None:
            return self._base_ref
        pending, self._pending = self._pending, None
        ready = pending.result()
        with ready.held:
            ref = self._list(ready)
        if self.apart:
            dist.barrier(group=self._group)  # ranks of one host share its store, and hold what they put until here
        if self.ranks.rank == 0 or (self.apart and self.collects):
            self.store.collect(keep=self.keep)  # before the others encode again, for whose content it would wait
        if self.apart:
            dist.barrier(group=self._group)
        self._base, self._base_ref = ready.copies, self._report(ref)
        self._since_complete = 0 if ready.complete else self._since_complete + 1
        return self._base_ref

    def _list(self, ready: StagedVersion) -> VersionRef | None:
        """On rank 0: the version, listed. Stores that are apart list it before rank 0's does, which readers ask."""
        if not self.apart:
            return None if ready.manifest is None else self.store.publish(ready.manifest)
        manifest = self._report(ready.manifest)
        assert manifest is not None, "rank 0 has it"
        if self.ranks.rank != 0:
            self.store.publish(manifest, own=ready.own)
        dist.barrier(group=self._group)
        return self.store.publish(manifest, own=ready.own) if self.ranks.rank == 0 else None

    def publish(self, version: int, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> VersionRef:
        """One rank, at once: `tensors` are whole."""
        self.start(version, tensors, files)
        ref = self.wait()
        assert ref is not None
        return ref

    def first(self, step: int, last: int) -> int:
        """The first version to publish where training continues after `step` and takes those up to `last` again: the
        newest that is visible, if it is one of these."""
        newest = self.store.newest()
        result = self._report(step if newest is None or not step < newest.version <= last else newest.version)
        assert result is not None, "rank 0 knows"
        return result

    def close(self) -> None:
        """What was started and not waited for is not published."""
        self._hand.shutdown()
        if self._pending is not None and self._pending.exception() is None:
            self._pending.result().held.close()

    def _copies(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size] | None) -> RankBlocks:
        """Copies of our own, in the published dtype, where the tensors lie (on a GPU they stay there)."""
        copies, boxes, specs = {}, {}, []
        for name, tensor in tensors.items():
            floating = self.dtype is not None and tensor.is_floating_point()
            copy = local(tensor.detach()).to(self.dtype if floating else tensor.dtype, copy=True).contiguous()
            if copy.dtype not in DTYPES:
                raise Invalid(f"{name} is of {copy.dtype}, which is not published", hint="publish it as bfloat16")
            shape = tensor.shape if shapes is None else shapes[name]
            spec = TensorSpec(name, DTYPES[copy.dtype], tuple(shape))
            by_rows = shapes is not None
            boxes[name] = (
                rows_box(spec, self.ranks.rank, self.ranks.size) if by_rows else box(tensor, WORDS[spec.dtype])
            )
            copies[name] = copy
            specs.append(spec)
        return RankBlocks(copies, sorted(specs, key=lambda spec: spec.name), boxes)

    def _prepare(self, version: int, copies: RankBlocks, files: dict[str, bytes]) -> StagedVersion:
        started = time.monotonic()
        with ExitStack() as held:
            held.enter_context(self.store.publishing())
            layout, layout_ref = self._cut(copies)
            base = self._matching(copies)
            complete = base is None or self._since_complete + 1 >= self.complete_every
            encoded = self._encode(layout, copies, against=self._base if base is not None else None, complete=complete)
            self.seconds.encode_s = time.monotonic() - started
            parts = self._gather(encoded)
            manifest = None
            if parts is not None:
                manifest = VersionManifest(
                    version=version,
                    layout=layout_ref,
                    base=base.manifest.digest if base is not None else None,
                    steps=_ordered(layout, [part.steps for part in parts]) if base is not None else None,
                    complete=_ordered(layout, [part.complete for part in parts]) if complete else None,
                    digests=b"".join(_ordered(layout, [part.digests for part in parts])),
                    files={name: self.store.put(content) for name, content in files.items()},
                    generation=self.generation,
                    created=time.time(),
                )
            refs = [*encoded.steps.values(), *encoded.complete.values()]
            return StagedVersion(
                copies, complete, manifest, {ref.digest for ref in refs if ref is not None}, held.pop_all()
            )

    def _cut(self, copies: RankBlocks) -> tuple[Layout, Ref]:
        if self._layout is None or self._layout[0].tensors != copies.specs:
            boxes: list[dict[str, Box]] = [copies.boxes] * self.ranks.size
            if not self.ranks.alone:
                dist.all_gather_object(boxes, copies.boxes, group=self._group)
            layout = cut(copies.specs, slots=self.slots, boxes=boxes)
            self._layout = layout, self.store.put(msgspec.msgpack.encode(layout))
        return self._layout

    def _matching(self, copies: RankBlocks) -> VersionRef | None:
        """The version that `_base` is, if changes can build on it; rank 0 looks whether it still is the newest."""
        ours = self._base_ref
        if self._base.specs != copies.specs:
            ours = None
        if ours is not None and self.ranks.rank == 0:
            newest = self.store.newest()
            ours = ours if newest is not None and newest.manifest == ours.manifest else None
        return self._report(ours)

    def resume(
        self,
        tensors: Mapping[str, Tensor],
        shapes: Mapping[str, torch.Size] | None = None,
        version: int | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
    ) -> bool:
        """After a restart: whether the newest version is these very weights, so that changes build on it.

        `version`: its number, if it is. What is published above that comes from steps that were lost: withdrawn.
        `files`: those that it must have next to them.
        """
        if version is not None and (self.ranks.rank == 0 or self.apart):
            self.store.withdraw(version)
        reported = self._report(self.store.newest())
        newest = next(
            (ref for ref in self.store.versions() if reported is not None and ref.manifest == reported.manifest), None
        )
        copies = self._copies(tensors, shapes)
        equal = False
        layout, ref = self._cut(copies)
        if newest is not None and version in (None, newest.version):
            manifest = self.store.manifest(newest)
            if manifest.layout == ref and (files is None or _refs(files) == manifest.files):
                own = b"".join(
                    self._digests(segment, layout, copies) for segment in layout.segments if self._own(segment)
                )
                equal = own == _own_digests(layout, manifest.digests, self.ranks.rank)
        if not self.ranks.alone:
            votes: list[bool] = [False] * self.ranks.size
            dist.all_gather_object(votes, equal, group=self._group)
            equal = all(votes)
        if equal:
            self._base, self._base_ref = copies, newest
        return equal

    def _own(self, segment: LayoutSegment) -> bool:
        return segment.rank == self.ranks.rank

    def _encode(
        self, layout: Layout, copies: RankBlocks, *, against: RankBlocks | None, complete: bool
    ) -> EncodedRankVersion:
        result = EncodedRankVersion({}, {}, {}, self.seconds)
        for number, segment in enumerate(layout.segments):
            if not self._own(segment):
                continue
            new = self._words(segment, layout, copies)
            self.seconds.words += new.numel()
            if against is not None:
                content = self._step(new, self._words(segment, layout, against))
                result.steps[number] = None if content is None else self.store.put(content)
                self.seconds.bytes += 0 if content is None else len(content)
            if complete:
                content = encode_complete(_host(new))
                result.complete[number] = self.store.put(content)
                self.seconds.total_bytes += len(content)
            result.digests[number] = self._digests(segment, layout, copies)
        return result

    def _step(self, new: Tensor, old: Tensor) -> bytes | None:
        """Changes from `old` to `new`, or all of it, whatever is shorter; None when nothing changed."""
        where, values = picked_out(new, old)
        count = len(where)
        self.seconds.changed += count
        if not count:
            return None
        return encode_changes(where, values, new.numel()) if pays(count, new.numel()) else encode_complete(_host(new))

    def _words(self, segment: LayoutSegment, layout: Layout, blocks: RankBlocks) -> Tensor:
        """The segment's pieces, one after another, as int16."""
        pieces = [self._piece(segment, index, layout, blocks).reshape(-1) for index in range(len(segment.pieces))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _piece(self, segment: LayoutSegment, index: int, layout: Layout, blocks: RankBlocks) -> Tensor:
        piece = segment.pieces[index]
        name = layout.tensors[piece.tensor].name
        top, bottom, left, right = blocks.boxes[name]
        table = blocks.tensors[name].reshape(-1).view(torch.int16).reshape(bottom - top, right - left)
        return table[piece.top - top : piece.bottom - top, piece.left - left : piece.right - left]

    def _digests(self, segment: LayoutSegment, layout: Layout, blocks: RankBlocks) -> bytes:
        """Of each piece."""
        return b"".join(
            piece_digest(_host(self._piece(segment, index, layout, blocks).reshape(-1)).data.cast("B"))
            for index in range(len(segment.pieces))
        )

    def _gather(self, encoded: EncodedRankVersion) -> list[EncodedRankVersion] | None:
        """Every rank's part, on rank 0; elsewhere None."""
        if self.ranks.alone:
            return [encoded]
        parts: list[EncodedRankVersion | None] | None = [None] * self.ranks.size if self.ranks.rank == 0 else None
        dist.gather_object(encoded, parts, group=self._group)
        if parts is None:
            return None
        result = [part for part in parts if part is not None]
        self.seconds = _summed([part.seconds for part in result])
        return result

    def _report(self, what: T | None) -> T | None:
        """What rank 0 has, on every rank."""
        if self.ranks.alone:
            return what
        reported = [what]
        dist.broadcast_object_list(reported, group=self._group)
        return reported[0]


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


def picked_out(new: Tensor, old: Tensor) -> tuple[Positions, Words]:
    """Positions at which words differ and the new ones there, found where the weights lie: a GPU hands these over."""
    new, old = new.view(torch.int16).view(-1), old.view(torch.int16).view(-1)
    if new.is_cuda:
        positions = torch.nonzero(new != old).squeeze(1)
        return positions.cpu().numpy(), _host(new[positions])
    where = changed(_host(new), _host(old))
    return where, _host(new)[where]


def need_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise Invalid, naming the first, if a weight is no number: such weights are neither saved nor published."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise Invalid(
                f"weight {name} is not finite after this step",
                hint="continue from the last saved step with a lower learning rate",
            )


def _summed(seconds: list[Seconds]) -> Seconds:
    """Ranks work at the same time, on parts of their own."""
    names = ("bytes", "total_bytes", "changed", "words")
    return Seconds(
        copy_s=max(item.copy_s for item in seconds),
        encode_s=max(item.encode_s for item in seconds),
        **{name: sum(getattr(item, name) for item in seconds) for name in names},
    )


def _refs(files: Mapping[str, bytes]) -> dict[str, Ref]:
    return {name: ref_of(content) for name, content in files.items()}


def _host(words: Tensor) -> Words:
    return words.contiguous().cpu().numpy().view(np.uint16)


def _ordered(layout: Layout, parts: list) -> list:  # type: ignore[type-arg]
    merged = {number: entry for part in parts for number, entry in part.items()}
    return [merged[number] for number in range(len(layout.segments))]


def _own_digests(layout: Layout, digests: bytes, rank: int) -> bytes:
    own, at = [], 0
    for segment in layout.segments:
        size = len(segment.pieces) * PIECE_DIGEST
        if segment.rank == rank:
            own.append(digests[at : at + size])
        at += size
    return b"".join(own)
