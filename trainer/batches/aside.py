"""Samples that were not trained on: ``put_aside.jsonl`` of a run directory, a line each, with the reason. No torch.

Guarantee (I7): a step's save names what it put aside, and a trainer that continues from it brings the file up to it, so
that of every batch that was consumed each sample is trained on or named here, once, also across a crash.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sandbox import durable
from trainer.batches.sample import Sample

FILE = "put_aside.jsonl"


class PutAside(msgspec.Struct, kw_only=True, frozen=True):
    """A sample that was not trained on."""

    step: int  # that is taken with its batch, counted from 1
    name: str
    reason: str
    tokens: int = 0


def name_of(sample: Sample) -> str:
    return sample.name or sample.group or "a sample without a name"


def described(step: int, samples: Sequence[Sample], reasons: Mapping[str, str]) -> list[PutAside]:
    """Of these samples, those that have a reason."""
    sizes = {name_of(item): len(item.tokens) for item in samples}
    return [PutAside(step=step, name=name, reason=why, tokens=sizes.get(name, 0)) for name, why in reasons.items()]


def read(run: Path) -> list[PutAside]:
    """A line that a crash has torn is none."""
    try:
        lines = (run / FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [made for line in lines if line and (made := _parsed(line)) is not None]


def _parsed(line: bytes) -> PutAside | None:
    try:
        return msgspec.json.decode(line, type=PutAside)
    except msgspec.MsgspecError:
        return None


def recover(run: Path, step: int, put_aside: Sequence[PutAside]) -> None:
    """Makes the file agree with a save: lines of steps before it, and what its own step put aside."""
    existing = read(run)
    right = [*(line for line in existing if line.step < step), *put_aside]
    if right != existing or _torn(run):
        durable.publish(run / FILE, _lines(right))


def note(run: Path, put_aside: Sequence[PutAside]) -> None:
    """Appends what a step put aside, which its save names already."""
    if put_aside:
        with (run / FILE).open("ab") as file:
            file.write(_lines(put_aside))
            file.flush()
            os.fsync(file.fileno())


def reasons(run: Path) -> dict[str, int]:
    """How many, by their reason, the most frequent first."""
    return dict(Counter(line.reason for line in read(run)).most_common())


def _lines(put_aside: Sequence[PutAside]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in put_aside)


def _torn(run: Path) -> bool:
    path = run / FILE
    return path.exists() and not path.read_bytes().endswith(b"\n")
