"""Memory of a capture that lies in several files: its own pages, and those of captures before it that still hold.

Guarantee: a capture with BELOW needs no other capture: what its links lead to lives as long as they do and is never
written to. Next to BELOW it is a directory of images in which the processes have only the pages that it holds itself.

::

    CAPTURE/pagemap-7.img  pages-3.img        what this capture read itself
    CAPTURE/below/table                       for each file of pages: its parts, and the runs of pages in them
    CAPTURE/below/pagemap-7.img               the map of all pages
    CAPTURE/below/NAME.pages                  pages that an earlier capture read; NAME is never used again
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import mmap
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sandbox.errors import CheckpointFailed

BELOW = "below"
TABLE = "table"
SUFFIX = ".pages"
PAGE = 4096
VECTORS = 512  # of a system call


class StoredLayers(msgspec.Struct, frozen=True):
    """capture -> restore, store: :class:`Layers` of one file of pages."""

    pagemap: str
    names: list[str]
    runs: bytes  # int64, little endian, [m, 4]


class StoredTable(msgspec.Struct, frozen=True):
    """capture -> restore, store: what TABLE holds, by the name of the file of pages."""

    files: dict[str, StoredLayers]


@dataclass(frozen=True)
class Layers:
    """The pages of one process, in the order of their addresses, and where they lie."""

    pagemap: str  # name of the image that maps them
    names: tuple[str, ...]  # the first one is of the capture's own pages
    pages: np.ndarray  # [n] int64: number of the page in the process
    layer: np.ndarray  # [n] int32: index into `names`
    place: np.ndarray  # [n] int64: number of the page in that file

    @functools.cached_property
    def spans(self) -> np.ndarray:
        """Consecutive pages, from here to there; [n, 2] int64."""
        if not len(self.pages):
            return np.zeros((0, 2), np.int64)
        edges = np.flatnonzero(np.diff(self.pages) != 1) + 1
        starts = self.pages[np.concatenate([[0], edges])]
        ends = self.pages[np.concatenate([edges, [len(self.pages)]]) - 1] + 1
        return np.stack([starts, ends], axis=1)

    def runs(self) -> np.ndarray:
        """Consecutive pages that lie one behind the other: page, how many, layer, place; [m, 4] int64."""
        if not len(self.pages):
            return np.zeros((0, 4), np.int64)
        broken = (np.diff(self.pages) != 1) | (np.diff(self.layer) != 0) | (np.diff(self.place) != 1)
        starts = np.concatenate([[0], np.flatnonzero(broken) + 1])
        counts = np.diff(np.concatenate([starts, [len(self.pages)]]))
        return np.stack([self.pages[starts], counts, self.layer[starts], self.place[starts]], axis=1).astype(np.int64)

    def only(self, pages: np.ndarray) -> Layers:
        """Those of these pages, [n] int64, sorted, that are here."""
        return self._at(self._positions(pages))

    def without(self, pages: np.ndarray) -> Layers:
        """All but these pages, [n] int64, sorted."""
        retained = np.ones(len(self.pages), bool)
        retained[self._positions(pages)] = False
        return self if retained.all() else self._at(retained)

    def within(self, spans: np.ndarray) -> Layers:
        """The pages in these spans, [n, 2] int64, sorted and apart."""
        return self._at(numbers(np.searchsorted(self.pages, spans)))

    def _positions(self, pages: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.pages, pages)
        common = at[at < len(self.pages)]
        present: np.ndarray = common[self.pages[common] == pages[: len(common)]]
        return present

    def _at(self, index: np.ndarray) -> Layers:
        return Layers(self.pagemap, self.names, self.pages[index], self.layer[index], self.place[index])

    @classmethod
    def of(cls, pagemap: str, names: Sequence[str], runs: np.ndarray) -> Layers:
        """The inverse of :meth:`runs`."""
        first = np.cumsum(runs[:, 1]) - runs[:, 1]
        within = np.arange(int(runs[:, 1].sum())) - np.repeat(first, runs[:, 1])
        return cls(
            pagemap,
            tuple(names),
            np.repeat(runs[:, 0], runs[:, 1]) + within,
            np.repeat(runs[:, 2], runs[:, 1]).astype(np.int32),
            np.repeat(runs[:, 3], runs[:, 1]) + within,
        )


def numbers(spans: np.ndarray | Sequence[tuple[int, int]]) -> np.ndarray:
    """Numbers of the pages in spans, [n, 2]: [m] int64, in their order."""
    starts, ends = np.asarray(spans, np.int64).reshape(-1, 2).T
    counts = ends - starts
    first = np.cumsum(counts) - counts
    pages: np.ndarray = np.arange(int(counts.sum())) + np.repeat(starts - first, counts)
    return pages


def new_name() -> str:
    """Of a file of pages in BELOW."""
    return secrets.token_hex(8)


def present(directory: Path) -> bool:
    return (directory / BELOW / TABLE).exists()


def write(directory: Path, files: dict[str, Layers]) -> None:
    """Say where the pages of a capture lie; the files and maps are in BELOW already."""
    stored = {
        name: StoredLayers(item.pagemap, list(item.names), item.runs().astype("<i8").tobytes())
        for name, item in files.items()
    }
    (directory / BELOW / TABLE).write_bytes(msgspec.msgpack.encode(StoredTable(stored)))


def read(directory: Path) -> dict[str, Layers]:
    """By the name of the file of pages; {} where all pages are in the capture's own files."""
    return {
        name: Layers.of(item.pagemap, item.names, _runs(item).astype(np.int64))
        for name, item in _stored(directory).items()
    }


def sizes(directory: Path) -> dict[str, tuple[str, int]]:
    """By the name of each file of pages that lies in several: the map in BELOW of its pages, and how many there are."""
    return {
        name: (item.pagemap, int(_runs(item)[:, 1].sum()))
        for name, item in _stored(directory).items()
        if len(item.names) > 1
    }


def _stored(directory: Path) -> dict[str, StoredLayers]:
    path = directory / BELOW / TABLE
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=StoredTable).files
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise CheckpointFailed(f"{path} cannot be read: {error}", hint="the checkpoint is damaged") from error


def _runs(item: StoredLayers) -> np.ndarray:
    return np.frombuffer(item.runs, "<i8").reshape(-1, 4)


def file_of(directory: Path, name: str, layers: Layers, index: int) -> Path:
    """The file of a layer of the pages `name`."""
    return directory / name if index == 0 else directory / BELOW / (layers.names[index] + SUFFIX)


def mapped(path: Path) -> memoryview:
    """A file of pages, or nothing where it is empty or there is none."""
    if not path.exists() or not path.stat().st_size:
        return memoryview(b"")
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def copy_pages(sources: Sequence[memoryview], runs: np.ndarray, into: Path) -> None:
    """Write a file of pages from the runs of several. Blocks."""
    total = int(runs[:, 1].sum()) * PAGE
    write_parts([sources[layer][at * PAGE : (at + count) * PAGE] for _, count, layer, at in runs.tolist()], total, into)


def write_parts(parts: Sequence[memoryview], total: int, into: Path) -> None:
    """Write a file of `total` bytes. Raises CheckpointFailed when the parts have fewer. Blocks."""
    descriptor = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.truncate(descriptor, total)  # a tmpfs gives large pages within a size that it knows
        for first in range(0, len(parts), VECTORS):
            _write_all(descriptor, list(parts[first : first + VECTORS]))
        if os.lseek(descriptor, 0, os.SEEK_CUR) != total:
            raise CheckpointFailed(f"{into.name} lacks pages", hint="the checkpoint is damaged")
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(descriptor, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts and written:
            parts[0] = parts[0][written:]


class SpreadPages:
    """A file of pages whose content lies in several: `runs` as of :meth:`Layers.runs`, in the order of the file.

    `files`: the name in BELOW and the place of each of these, as long as the caller holds them.
    """

    def __init__(self, sources: Sequence[memoryview], runs: np.ndarray, files: Sequence[tuple[str, Path]] = ()) -> None:
        self.sources = sources
        self.files = files
        self._runs: list[list[int]] = runs.tolist()
        self._ends: list[int] = (np.cumsum(runs[:, 1]) * PAGE).tolist()

    @classmethod
    def of_file(cls, path: Path) -> SpreadPages:
        """One that is whole."""
        view = mapped(path)
        return cls([view], np.array([[0, len(view) // PAGE, 0, 0]], np.int64), [(new_name(), path)])

    @property
    def in_one(self) -> bool:
        """Whether one file has all of it, in order."""
        return len(self.sources) == 1

    @property
    def size(self) -> int:
        """Bytes."""
        return self._ends[-1] if self._ends else 0

    def pieces(self, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Where `size` bytes from `offset` lie: index of the source, offset in it, size. Pages are never cut up."""
        at, end = offset, offset + size
        number = bisect.bisect_right(self._ends, at)
        while at < end:
            last = self._ends[number]
            _, count, layer, place = self._runs[number]
            length = min(last, end) - at
            yield layer, place * PAGE + at - (last - count * PAGE), length
            at += length
            number += 1

    def parts(self, offset: int, size: int) -> Iterator[memoryview]:
        """The bytes themselves."""
        for layer, at, length in self.pieces(offset, size):
            yield self.sources[layer][at : at + length]

    def write(self, into: Path) -> None:
        """Write the file. Blocks."""
        write_parts(list(self.parts(0, self.size)), self.size, into)

    def close(self) -> None:
        """Let go of the sources, of which no part may be in use. Idempotent."""
        sources, self.sources = self.sources, ()
        for view in sources:
            content = view.obj
            view.release()
            if isinstance(content, mmap.mmap):
                with contextlib.suppress(BufferError):  # an error's frames still hold a part
                    content.close()


def link(source: Path, into: Path) -> None:
    """A file that is never written to again, under a second name; a copy on another file system."""
    try:
        os.link(source, into)
    except OSError:
        shutil.copyfile(source, into)


def complete(source: Path, into: Path, *, later: bool) -> dict[str, SpreadPages]:
    """Give `into`, a private copy of the images of `source` without BELOW, all their pages. Blocks.

    `later`: all files of pages of a table are returned, by name. Those whose content lies in several have their sizes
    only: the caller writes what is needed.
    """
    result = {}
    for name, layers in read(source).items():
        if not (into / layers.pagemap).exists():
            continue  # the process was taken out of the images
        places = [file_of(source, name, layers, index) for index in range(len(layers.names))]
        pages = SpreadPages(list(map(mapped, places)), layers.runs(), list(zip(layers.names, places, strict=True)))
        if later:
            result[name] = pages
        if pages.in_one:
            continue
        for old in (name, layers.pagemap):
            (into / old).unlink(missing_ok=True)
        link(source / BELOW / layers.pagemap, into / layers.pagemap)
        if later:
            with open(into / name, "xb") as file:
                file.truncate(pages.size)
        else:
            pages.write(into / name)
    return result
