"""One trajectory as the trainer sees it, and why it may be refused.

Guarantee: a sample that passes `refusal` has finite numbers and lists of one length, so no loss made from it can be
infinite by its own fault; a batch that was written is read back equal, or the read fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zstandard

from rollout.experts import RoutedExperts
from sandbox import durable
from sandbox.errors import NotFound


class Sample(msgspec.Struct, kw_only=True, frozen=True):
    """Lists have one entry per token. Example: tokens [5, 6, 9], mask [0, 0, 1], logprobs [0, 0, -0.3]."""

    tokens: list[int]
    mask: list[int]  # 1 where the policy sampled the token
    logprobs: list[float]  # of the engine; 0 where the mask is 0
    reward: float = 0.0
    group: str = ""  # trajectories of one prompt; whole groups come together
    temperature: float = 1.0  # that it was sampled at; 0 is greedy, of which engines report logprobs at 1
    truncated: bool = False
    version: int = 0  # of the oldest weights in it
    name: str = ""
    complete: bool = True  # any token could be sampled; else the log-probabilities are of the likeliest ones alone
    episode: str = ""  # pieces of one episode have its name and come one after the other; "": it is one piece
    advantages: list[float] = []  # per token, where the group is a tree: its segments' own; else none
    broken: str = ""  # why nothing can be made of it
    turns: list[int] = []  # per token, its turn in the episode, where credit is by turns; else none
    turn_rewards: list[float] = []  # of all turns of the episode; what was earned at the end is the last one's
    experts: list[RoutedExperts] = []  # that sampled it, of a mixture whose router is replayed

    @property
    def sampled(self) -> int:
        return sum(self.mask)


def episodes(samples: Sequence[Sample]) -> list[int]:
    """Number of each sample's episode, counted from 0. Example: episodes "a", "a", "", "" are [0, 0, 1, 2]."""
    result: list[int] = []
    for at, sample in enumerate(samples):
        goes_on = at > 0 and bool(sample.episode) and _same(samples[at - 1], sample)
        result.append((result[-1] if result else -1) + (not goes_on))
    return result


def _same(one: Sample, other: Sample) -> bool:
    return (one.episode, one.group) == (other.episode, other.group)


def refusal(sample: Sample, vocabulary: int, positions: int | None = None, *, experts: bool = False) -> str | None:
    """Why this sample must not be trained on, or None. One number that is not finite would spoil every weight.

    `experts`: its engine must have reported them.
    """
    if sample.broken:
        return sample.broken
    if not len(sample.tokens) == len(sample.mask) == len(sample.logprobs):
        return "lists of different lengths"
    if sample.advantages and len(sample.advantages) != len(sample.tokens):
        return "advantages of another length"
    if sample.turns and not _fitting(sample):
        return "turns that its rewards do not fit"
    if not all(map(math.isfinite, sample.turn_rewards)):
        return "reward of a turn not finite"
    if not all(map(math.isfinite, sample.advantages)):
        return "advantage not finite"
    if not sample.tokens:
        return "no tokens"
    if positions is not None and len(sample.tokens) > positions:
        return "more tokens than the model has positions"
    if any(bit not in (0, 1) for bit in sample.mask):
        return "mask of other values than 0 and 1"
    if sample.mask and sample.mask[0]:
        return "first token sampled from nothing"
    if any(not 0 <= token < vocabulary for token in sample.tokens):
        return "token outside the vocabulary"
    if any(bit and not math.isfinite(value) for bit, value in zip(sample.mask, sample.logprobs, strict=True)):
        return "logprob not finite"
    if any(bit and value > 1e-3 for bit, value in zip(sample.mask, sample.logprobs, strict=True)):
        return "logprob above 0"
    if not math.isfinite(sample.reward):
        return "reward not finite"
    if not (math.isfinite(sample.temperature) and sample.temperature >= 0):
        return "temperature not a number from 0 up"
    if experts and not sample.experts:
        return "its engine reported no experts: start it with --enable-return-routed-experts"
    if not sample.complete:
        return "sampled with top_p or top_k: its logprobs are of another distribution than the policy's"
    return None


def _fitting(sample: Sample) -> bool:
    """Each sampled token is of a turn that has a reward."""
    pairs = zip(sample.turns, sample.mask, strict=False)
    return len(sample.turns) == len(sample.tokens) and all(
        0 <= turn < len(sample.turn_rewards) for turn, bit in pairs if bit
    )


def accepted(
    samples: Sequence[Sample], vocabulary: int, positions: int | None = None, *, experts: bool = False
) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Those that may be trained on, and of each other one its name and the reason."""
    retained: list[Sample] = []
    refused: list[tuple[str, str]] = []
    for sample in samples:
        reason = refusal(sample, vocabulary, positions, experts=experts)
        if reason is None:
            retained.append(sample)
        else:
            refused.append((sample.name or sample.group, reason))
    return retained, refused


class Probe(msgspec.Struct, kw_only=True, frozen=True):
    """The sender of batches -> ranks: can a gradient be made of these samples of the batch of `step`?"""

    number: int
    step: int
    samples: list[Sample]


class SampleLog:
    """The batches of a run, one file per step: what a trainer that was killed reads again.

    ``log.write(3, samples)``, then ``log.read(3)``. A file is there whole or not at all.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"batch-{step:06d}.zst"

    def write(self, step: int, samples: Sequence[Sample]) -> Path:
        return self._write(self.path(step), samples)

    def read(self, step: int) -> list[Sample]:
        result = self._read(self.path(step))
        if result is None:
            raise NotFound(f"no batch of step {step} in {self.directory}", hint="it is written before a step")
        return result

    def write_part(self, step: int, number: int, samples: Sequence[Sample]) -> None:
        """Groups of a batch that is not complete yet. All parts are written before the batch."""
        self._write(self._part(step, number), samples)

    def read_part(self, step: int, number: int) -> list[Sample] | None:
        """None if there is none, or none yet."""
        return self._read(self._part(step, number))

    def forget(self, step: int) -> None:
        """The batch of this step and its parts."""
        for path in (self.path(step), *self.directory.glob(f"part-{step:06d}-*.zst")):
            path.unlink(missing_ok=True)

    def _part(self, step: int, number: int) -> Path:
        return self.directory / f"part-{step:06d}-{number:04d}.zst"

    def _write(self, path: Path, samples: Sequence[Sample]) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        return durable.publish(path, zstandard.compress(msgspec.msgpack.encode(list(samples)), 3))

    def _read(self, path: Path) -> list[Sample] | None:
        try:
            content = zstandard.decompress(path.read_bytes())
        except FileNotFoundError:
            return None
        return msgspec.msgpack.decode(content, type=list[Sample])

    def write_probe(self, probe: Probe) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        durable.publish(self._probe, zstandard.compress(msgspec.msgpack.encode(probe), 3))

    def read_probe(self) -> Probe | None:
        try:
            return msgspec.msgpack.decode(zstandard.decompress(self._probe.read_bytes()), type=Probe)
        except FileNotFoundError:
            return None

    def forget_probe(self) -> None:
        self._probe.unlink(missing_ok=True)

    @property
    def _probe(self) -> Path:
        return self.directory / "probe.zst"

    def steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("batch-")) for path in self.directory.glob("batch-*.zst"))
