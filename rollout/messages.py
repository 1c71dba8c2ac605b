"""What the rollout hands to the trainer, and writes to disk: trajectories, turns, groups, batches.

Guarantee (I8): `tokens`, `mask`, `logprobs` and `versions` of a trajectory have one length; token i was either put in
(mask 0) or sampled (mask 1) with ``logprobs[i]`` under weights ``versions[i]``; no text was tokenised twice.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import msgspec

from rollout.decide.blame import TrajectoryFailure
from rollout.engine.client import Generation
from rollout.experts import RoutedExperts, extend, within
from rollout.rewards.messages import Score, Scoring

Status = Literal["completed", "truncated", "failed", "aborted"]


class TurnRecord(msgspec.Struct, kw_only=True):
    """One turn of one trajectory. Times are seconds since the epoch; 0.0 is "did not happen"."""

    index: int
    action: str = ""
    observation: str = ""
    gen_start: float = 0.0
    gen_end: float = 0.0
    exec_start: float = 0.0
    exec_end: float = 0.0
    verdict: str = "none"
    checkpoint: str | None = None
    checkpoint_started: float = 0.0
    checkpoint_captured: float = 0.0
    waited_s: float = 0.0  # time the agent stood still for this turn's checkpoint
    frozen_ms: float = 0.0
    stored_bytes: int = 0
    full_bytes: int = 0
    verdict_ms: float = 0.0
    tokens: int = 0  # sampled
    restored: int = 0  # times that the sandbox was brought back in this turn
    finish: str = ""  # why the engine stopped: stop, length
    version: int = -1  # newest policy version that sampled the action
    effects: list[str] = []  # the largest effects on the operating system, for people
    uncaptured: str = ""  # why the turn's checkpoint could not be taken; the next one holds its state too
    reward: float = 0.0  # of this turn alone: the environment's, and what the scorer gave it
    touched: list[str] = []  # paths that the inspector named: hints
    listens: int = 0  # sockets that it made listen
    left: int = 0  # processes that it began and that lived on
    times_set: int = 0  # time stamps of files that it set on purpose
    unseen: bool = False  # it did more than the inspector could list one by one
    back_to: int | None = None  # the turn took the sandbox back to the state before that turn
    results: list[str] = []  # of each call of a tool, where the action had several that were carried out


class Recovery(msgspec.Struct, kw_only=True):
    """One death of a sandbox and its restore. What is executed again must say what the agent has already read."""

    turn: int
    checkpoint: str
    equal: bool
    differences: list[str] = []
    replayed: int = 0  # commands executed again, the interrupted one excluded
    milliseconds: float = 0.0
    attempts: int = 1  # restores until one was equal


class FinalState(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode left to be scored."""

    scoring: Scoring
    seed: int  # that the environment was reset with
    checkpoint: str  # of the sandbox
    state: bytes | None = None  # of the environment, as its `snapshot` returned it
    row: dict[str, Any] | None = None


class Ancestor(msgspec.Struct, frozen=True, array_like=True):
    """Turns below `turn` that no older ancestor has are those of this member of the group, in this attempt at it."""

    member: int
    start: int
    turn: int


class Trajectory(msgspec.Struct, kw_only=True):
    """One episode. Example: tokens [5, 6, 9, 3], mask [0, 0, 1, 1], versions [-1, -1, 4, 4]."""

    prompt: str = ""
    group: str = ""
    index: int = 0  # in its group
    seed: int = 0
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    experts: list[RoutedExperts] = []  # that sampled them, of a mixture whose router is replayed; no token twice
    reward: float = 0.0
    status: Status = "completed"
    reason: str = ""  # for people; decisions go by `failure`
    turns: list[TurnRecord] = []
    recoveries: list[Recovery] = []
    killed: int = 0  # times that its sandbox died
    injected: int = 0  # of these, on purpose
    sandbox: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    temperature: float = 1.0  # that its tokens were sampled at, of which `logprobs` are
    failure: TrajectoryFailure | None = None  # why it is not `completed`
    start: int = 0  # which attempt at this member of the group it is, counted from 0
    own_s: float = 0.0  # seconds of its own clock
    continued: int = 0  # times that another process went on with it
    opening: str = ""  # what the agent read first
    breaks: list[int] = []  # where a new sample begins: the model saw nothing of what stands before
    complete: bool = True  # any token could be sampled; else `logprobs` are of the likeliest ones alone (top_p, top_k)
    final: FinalState | None = None  # of an episode that is scored when it has ended
    score: Score | None = None  # what the scorer said; `reward` holds it too
    freed_s: float = 0.0  # from the end of the episode until its sandbox ran no more
    scored_at: float = 0.0
    lineage: list[Ancestor] = []  # of a branch: whose its first turns are, oldest first
    base: str | None = None  # the checkpoint that the reset left
    changed: list[str] | None = None  # paths that rules name and that differ from `base` at the end; None: not read
    masked: bool = False  # by a rule about effects: nothing is learned from it, and its group goes without it
    penalty: float = 0.0  # by the same, taken from the reward

    @property
    def recovered_equal(self) -> int:
        return sum(recovery.equal for recovery in self.recoveries)

    @property
    def inherited(self) -> int:
        """Turns that it has from the trajectory that it branches from."""
        return self.lineage[-1].turn if self.lineage else 0

    @property
    def oldest(self) -> int | None:
        """Oldest policy version in it; None before the first sampled token."""
        return min((version for version in self.versions if version >= 0), default=None)

    @property
    def routed(self) -> int:
        """The end of the tokens whose experts are known."""
        return self.experts[-1].end if self.experts else 0

    @property
    def thinking(self) -> int | None:
        """The turn whose answer is being sampled."""
        last = self.turns[-1] if self.turns else None
        return last.index if last is not None and last.gen_start and not last.gen_end else None

    @property
    def scored(self) -> bool:
        """Its reward is the policy's doing: it may be learned from."""
        return self.status in ("completed", "truncated")

    def check(self) -> None:
        """Raise ValueError unless it may be learned from: one length, every log-probability a number (I8)."""
        lengths = {len(self.tokens), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"trajectory {self.prompt}/{self.index}: lists of different lengths {sorted(lengths)}")
        if (self.mask and self.mask[0]) or any(token < 0 for token in self.tokens):
            raise ValueError(f"trajectory {self.prompt}/{self.index}: its first token is sampled, or one is no token")
        if any(value > 1e-3 for value in self.logprobs):
            raise ValueError(f"trajectory {self.prompt}/{self.index}: a log-probability is above 0")
        if not all(map(math.isfinite, self.logprobs)) or not math.isfinite(self.reward):
            raise ValueError(f"trajectory {self.prompt}/{self.index}: a log-probability or reward is not finite")

    def bearing(self, oldest: int) -> list[int]:
        """`mask` without the tokens that were sampled before version `oldest`."""
        return [m if version >= oldest else 0 for m, version in zip(self.mask, self.versions, strict=True)]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Its samples: from where to where. Example: breaks [7] of 12 tokens: [(0, 7), (7, 12)]."""
        edges = [0, *self.breaks, len(self.tokens)]
        return list(itertools.pairwise(edges))

    @property
    def sample(self) -> list[int]:
        """The tokens of its last sample: what the model sees next."""
        return self.tokens[self.breaks[-1] if self.breaks else 0 :]

    def put(self, ids: list[int]) -> None:
        """Tokens that came from outside: prompt, observation."""
        self.tokens += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def append(
        self,
        at: int,
        tokens: list[int],
        mask: list[int],
        logprobs: list[float],
        versions: list[int],
        experts: list[RoutedExperts],
    ) -> None:
        """Tokens of another process, from position `at` on, and the experts that it has learned of since."""
        self.tokens[at:], self.mask[at:] = tokens, mask
        self.logprobs[at:], self.versions[at:] = logprobs, versions
        self.experts = within(self.experts, 0, at) + experts

    def sampled(self, generation: Generation) -> None:
        """Tokens that the policy sampled, as the engine gave them."""
        self.tokens += generation.token_ids
        self.mask += [1] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        for span in generation.spans:
            self.versions += [span.version] * (span.end - span.start)
        extend(self.experts, generation.experts, self.breaks[-1] if self.breaks else 0, len(self.tokens))


class Group(msgspec.Struct, kw_only=True):
    """All trajectories of one prompt, each of which was scored: what the platform lost was played again."""

    prompt: str
    seed: int
    trajectories: list[Trajectory]

    @property
    def oldest(self) -> int | None:
        return min((t.oldest for t in self.trajectories if t.oldest is not None), default=None)


class Batch(msgspec.Struct, kw_only=True):
    """controller -> trainer: complete groups for the step that makes version `version` + 1."""

    version: int
    groups: list[Group]
    step: int = 0  # of the trainer, counted from 0
    oldest: int = 0  # tokens of older versions bear no gradient (`Trajectory.bearing`)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]
