"""The orders to a dumping CRIU about pages that were not written, and what it answers (native/tracked.h)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from pathlib import Path

import numpy as np

from sandbox.criu.tracking import mapping_flags

ORDERS, ANSWERS = "tracked-orders.log", "tracked-answers.log"
PAGE = 4096
_ORDER = np.dtype([("pid", "<i4"), ("what", "<u4")])
_ANSWER = np.dtype([("pid", "<i4"), ("what", "<u4"), ("start", "<u8"), ("end", "<u8")])


class Order(IntFlag):
    """What is done with a process."""

    ATTACH = 1
    PROTECT = 2
    SKIP = 4


class _Answer(IntEnum):
    DESCRIPTOR = 1
    UNWRITTEN = 2
    READ = 3
    FAILED = 4
    BRIEF = 5


@dataclass
class ProcessAnswer:
    """Of one process: the `unwritten` pages, each from here to there; whether the others are `protected` now."""

    unwritten: np.ndarray  # [n, 2] int64: numbers of pages, in order, apart from each other
    protected: bool

    def within(self, spans: np.ndarray) -> bool:
        """Whether all unwritten pages lie in these spans, which are of the same form."""
        if not len(self.unwritten):
            return True
        at = np.searchsorted(spans[:, 0], self.unwritten[:, 0], side="right") - 1
        return bool((at >= 0).all() and (self.unwritten[:, 1] <= spans[at, 1]).all())


@dataclass
class Answers:
    """By the host's pid."""

    descriptors: dict[int, int] = field(default_factory=dict)  # of userfaultfds in CRIU
    processes: dict[int, ProcessAnswer] = field(default_factory=dict)
    brief: set[int] = field(default_factory=set)  # whose mappings were reported without counting pages


def write(directory: Path, orders: Mapping[int, Order], letters: bytes = b"") -> None:
    """`letters`: see :mod:`sandbox.criu.tracking.mapping_flags`; without them CRIU reads smaps as it is."""
    if letters:
        (directory / mapping_flags.FILE).write_bytes(letters)
    records = np.array([(pid, int(what)) for pid, what in orders.items()], dtype=_ORDER)
    (directory / ORDERS).write_bytes(records.tobytes())


def read(directory: Path) -> Answers:
    """What has been answered so far; nothing where CRIU had no orders, or did not come to it."""
    answers = Answers()
    path = directory / ANSWERS
    if not path.exists():
        return answers
    records = np.frombuffer(path.read_bytes(), dtype=_ANSWER)
    for record in records[records["what"] == _Answer.DESCRIPTOR]:
        answers.descriptors[int(record["pid"])] = int(record["start"])
    answers.brief = set(records["pid"][records["what"] == _Answer.BRIEF].tolist())
    for pid in np.unique(records["pid"]).tolist():
        own = records[records["pid"] == pid]
        if (own["what"] != _Answer.DESCRIPTOR).any():
            protected = bool((own["what"] == _Answer.READ).any() and not (own["what"] == _Answer.FAILED).any())
            answers.processes[pid] = ProcessAnswer(_regions(own[own["what"] == _Answer.UNWRITTEN]), protected)
    return answers


def remove(directory: Path) -> None:
    """All of these files: they are no images."""
    for name in (ORDERS, ANSWERS, mapping_flags.FILE):
        (directory / name).unlink(missing_ok=True)


def merged(regions: np.ndarray) -> np.ndarray:
    """Regions of pages, [n, 2], in order and joined where they touch: CRIU asks for some pages twice."""
    regions = regions[np.argsort(regions[:, 0], kind="stable")]
    if not len(regions):
        return regions
    reached = np.maximum.accumulate(regions[:, 1])
    begins = np.concatenate([[True], regions[1:, 0] > reached[:-1]])
    starts = np.flatnonzero(begins)
    ends = np.concatenate([starts[1:], [len(regions)]]) - 1
    return np.stack([regions[starts, 0], reached[ends]], axis=1)


def _regions(records: np.ndarray) -> np.ndarray:
    return merged(np.stack([records["start"] // PAGE, records["end"] // PAGE], axis=1).astype(np.int64))
