"""What a dumping CRIU is told about pages that were not written, and what it answers (native/tracked.h).

Owns: the two files in the directory of images. Does not own: what is asked for, and what follows from the answers
(:mod:`sandbox.criu.tracking.tracker`).
"""

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
    """What was found of one process: numbers of `unwritten` pages, sorted; whether the others are `protected` now."""

    unwritten: np.ndarray  # [n] int64
    protected: bool


@dataclass
class Answers:
    """By the host's pid."""

    descriptors: dict[int, int] = field(default_factory=dict)  # of userfaultfds in CRIU
    processes: dict[int, ProcessAnswer] = field(default_factory=dict)
    brief: set[int] = field(default_factory=set)  # whose mappings were told without counting pages


def write(directory: Path, orders: Mapping[int, Order], letters: bytes = b"") -> None:
    """`letters`: see :mod:`sandbox.criu.tracking.mapping_flags`; without them CRIU reads smaps as it is."""
    if letters:
        (directory / mapping_flags.FILE).write_bytes(letters)
    records = np.array([(pid, int(what)) for pid, what in orders.items()], dtype=_ORDER)
    (directory / ORDERS).write_bytes(records.tobytes())


def read(directory: Path) -> Answers:
    """What has been answered so far; nothing where CRIU was not asked, or did not come to it."""
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
            answers.processes[pid] = ProcessAnswer(_pages(own[own["what"] == _Answer.UNWRITTEN]), protected)
    return answers


def remove(directory: Path) -> None:
    """All of these files: they are no images."""
    for name in (ORDERS, ANSWERS, mapping_flags.FILE):
        (directory / name).unlink(missing_ok=True)


def _pages(regions: np.ndarray) -> np.ndarray:
    """Numbers of the pages in these regions, sorted, each once."""
    starts = (regions["start"] // PAGE).astype(np.int64)
    counts = (regions["end"] // PAGE).astype(np.int64) - starts
    first = np.cumsum(counts) - counts
    pages = np.repeat(starts, counts) + np.arange(int(counts.sum())) - np.repeat(first, counts)
    return np.unique(pages)
