"""What is scored, by what, and what came out: the structs of the reward service.

Fields are append-only with defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout.decide.anchor import LONGEST
from sandbox.errors import ErrorBody
from sandbox.messages import ExecResult


def as_number(value: object, name: str) -> float:
    """Any kind of number: Python's, NumPy's, a tensor of one element. Raises TypeError, ValueError."""
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} is {value!r:.100}, which is no number")
    return float(value)  # type: ignore[arg-type]


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """Which function scores, with which options. Made by calling what `rollout.reward` made of a function."""

    function: str = ""  # module:name
    code: str = ""  # the file or package that defines it, where it is no installed module
    url: str = ""  # or where it is called by HTTP
    options: dict[str, Any] = {}
    forks: bool = True  # it looks into a sandbox
    low: float = 0.0  # rewards lie between these two; any other is a failure of the scorer
    high: float = 1.0
    longest: float = LONGEST  # seconds of one try, whatever the anchor
    parts: list[ScoringPart] = []  # or the weighted sum of these, each scored by itself
    model: str = ""  # or what a reward model in this directory says

    @property
    def name(self) -> str:
        return self.function or self.url or self.model or ", ".join(part.name for part in self.parts)


class ScoringPart(msgspec.Struct, frozen=True, kw_only=True):
    """One of several rewards."""

    name: str
    scoring: Scoring
    weight: float = 1.0


class ScoredTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, as it was read and written."""

    action: str
    observation: str


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a function says. `turns` are rewards of single turns, in addition to `reward`, which is of the end."""

    reward: float
    turns: list[float] = []
    reason: str = ""  # for people
    parts: dict[str, float] = {}  # of several rewards, what each said, not weighted

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reward", as_number(self.reward, "Score.reward"))
        msgspec.structs.force_setattr(self, "turns", [as_number(value, "one of Score.turns") for value in self.turns])

    @property
    def total(self) -> float:
        return self.reward + sum(self.turns)

    def wrong(self, scoring: Scoring, turns: int) -> str:
        """Why this cannot be meant; nothing if it may be so."""
        if len(self.turns) > turns:
            return f"it rewards {len(self.turns)} turns of {turns}"
        for value in (self.reward, *self.turns):
            if not math.isfinite(value) or not scoring.low <= value <= scoring.high:
                return f"{value!r} is not between {scoring.low:g} and {scoring.high:g}"
        return ""


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """service -> scorer: one try at one scoring."""

    id: str
    scoring: Scoring
    seed: int
    opening: str = ""
    turns: list[ScoredTurn] = []
    row: dict[str, Any] | None = None
    state: Any = None  # what the environment keeps, where that are plain values
    cause: str | None = None  # why the episode ended without `done`: rollout.decide.blame.Cause
    limit: float = LONGEST  # seconds for this try
    attempt: int = 0


@dataclass(frozen=True)
class Final:
    """What a reward function is handed: how the episode went, and a fork of the sandbox as it was at the end."""

    request: ScoringRequest
    sandbox: Any = None  # has `exec` and `files`; None where the function does not look into one

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def turns(self) -> list[ScoredTurn]:
        return self.request.turns

    @property
    def opening(self) -> str:
        return self.request.opening

    @property
    def row(self) -> dict[str, Any] | None:
        return self.request.row

    @property
    def state(self) -> Any:
        """Attributes of the environment at the end, as its `snapshot` returns them."""
        return self.request.state

    @property
    def cause(self) -> str | None:
        """None: the environment ended the episode. Else what did, such as "turns" or "late"."""
        return self.request.cause

    @property
    def limit(self) -> float:
        """Seconds that a command which runs the policy's work gets."""
        return self.request.limit


class TooSlow(Exception):
    """A command of the policy's was cut off: try again with more time."""


class ScorerFailed(Exception):
    """One try failed, by the scorer's doing. Says how. `raised`: by what the function itself raised or said, so that
    it will again; else its process failed."""

    def __init__(self, message: str, *, raised: bool = False):
        super().__init__(message)
        self.raised = raised


class RewardMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """worker <-> pool. One of: ready, an ask, begun, a call with its answer, the end of a try."""

    id: str = ""
    ready: bool = False
    begun: bool = False
    request: ScoringRequest | None = None
    call: ForkCall | None = None
    answer: ForkReply | None = None
    score: Score | None = None
    slow: bool = False
    error: str = ""


class ForkCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """worker -> pool: do this in the fork. Closed: exec, read, write."""

    what: str
    command: str | list[str] = ""
    path: str = ""
    data: bytes = b""
    timeout: float | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: int | str | None = None
    stdin: bytes = b""


class ForkReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """pool -> worker: what the fork answered, or the error with its code."""

    result: ExecResult | None = None
    data: bytes = b""
    error: ErrorBody | None = None
