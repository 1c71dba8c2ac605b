"""What the rollout's decisions see, and what they may answer. Both are logged; a log can be replayed."""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout.decide.ranges import Count, Natural

OverStale = Literal["wait", "mask", "drop"]


class Branching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``[branching]`` of a run: see rollout.decide.branching. Example: ``Branching(by="entropy")``"""

    roots: Count = 2  # trajectories of a group that begin at the beginning
    by: Literal["turns", "entropy", "spread"] = "turns"
    every: Count = 2  # turns, where `by` is "turns"


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run that say what a batch is made of. Those of the run, of the rollout and of its decisions begin
    with these."""

    groups: Count = 8  # prompts of a batch
    size: Count = 8  # trajectories of a group
    extra: Natural = 0  # trajectories beyond `size`; the last to finish are ended
    tail: float = 0.0  # tail batching, for example 1.25
    tail_resumes: bool = False  # deferred trajectories resume instead of restarting
    over_stale: OverStale = "wait"  # for trajectories that the trainer overtakes
    attempts: Count = 3  # failures of its environment until a prompt is given up
    starts: Count = 8  # of one trajectory, those that the host ended not counted
    branching: Branching | None = None  # groups as trees


class SchedulingRules(BatchSettings, frozen=True, kw_only=True):
    """What does not change while a process runs."""

    concurrency: int = 64  # trajectories at once
    staleness: int = 1  # trainer version minus oldest policy version of a token that bears gradient, at most
    timeout: float = 900.0  # seconds for which a part of the platform may refuse everything until the run stops


class At(msgspec.Struct, frozen=True, array_like=True):
    """The state before a turn of a member, in an attempt at it."""

    member: int
    start: int
    turn: int


class ForkableState(msgspec.Struct, frozen=True, array_like=True):
    """A state of a trajectory that can be forked."""

    turn: int  # that followed
    surprise: float  # mean of -log p of that turn's tokens


class EndedTrajectory(msgspec.Struct, frozen=True, array_like=True):
    """What branches need to know of an ended trajectory."""

    start: int  # the attempt
    turns: int
    reward: float
    lineage: list[At] = []
    states: list[ForkableState] = []


class TrajectoryView(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory of a group on its way."""

    index: int
    state: Literal["waiting", "running", "scoring", "ended"]
    oldest: int | None = None  # policy version of its oldest token
    starts: int = 0  # so far, but for those that a refusing host or engine ended
    coming: int | None = None  # as `oldest`, of tokens that it will have: a dead process's, those being sampled
    at: At | None = None  # where it began, if it is a branch
    played: EndedTrajectory | None = None  # of an ended one, where there are branches


class GroupView(msgspec.Struct, frozen=True, array_like=True):
    prompt: str
    number: int
    members: list[TrajectoryView]
    failures: int = 0  # of its environment
    reason: str = ""  # the last failure
    deferred: bool = False  # it was put off once, and is waited for now


class BufferedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A whole group that waits for its batch. Of each member the oldest version."""

    prompt: str
    number: int
    oldest: list[int | None]
    starts: list[int] = []


class PartView(msgspec.Struct, frozen=True, array_like=True):
    """A part of the platform that has failed and not worked since."""

    part: str  # create, engine, scorer, host
    rounds: int  # failures in a row; those within one pause count once
    since: float
    last: float
    reason: str


class FleetView(msgspec.Struct, frozen=True, array_like=True):
    """The engines of a run whose machines its trainer shares. Times as they were measured."""

    engines: int  # that serve
    slots: int  # of each
    base: float = 0.0  # seconds of a decoding step without any answer
    item: float = 0.0  # that each answer adds to it; both 0: not known yet
    rested: bool = False  # some do, until the next version


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    version: int  # of the trainer
    requested: bool  # the trainer waits for a batch
    training: bool  # it works on one
    running: list[GroupView]
    buffered: list[BufferedGroup]
    queued: int  # prompts that wait
    more: bool  # further prompts can be issued
    parts: list[PartView] = []
    draining: bool = False  # nothing new starts
    deferred: int = 0  # prompts that were put off and wait; not among `queued`
    bound: int | None = None  # versions by which rollouts may run ahead now; None: as the rules say
    fleet: FleetView | None = None  # None: the trainer has machines of its own


# --------------------------------------------------------------------------- answers


class LeasePrompts(msgspec.Struct, frozen=True, tag="lease"):
    """Take so many queued prompts and make groups of them."""

    count: int
    deferred: bool = False  # of those that were put off


class Defer(msgspec.Struct, frozen=True, tag="defer"):
    """A group is ended and its prompt put off: it is played again, in a round that waits for it."""

    prompt: str


class StartTrajectory(msgspec.Struct, frozen=True, tag="start"):
    """`at`: as a branch, in the state of another member."""

    prompt: str
    member: int
    at: At | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a trajectory and play it again, or not (`again`); one that has ended is forgotten."""

    prompt: str
    member: int
    why: str
    again: bool = True


class ReopenGroup(msgspec.Struct, frozen=True, tag="reopen"):
    """A buffered group gets these members again."""

    prompt: str
    members: list[int]
    why: str


class FinishGroup(msgspec.Struct, frozen=True, tag="finish"):
    """The group is whole."""

    prompt: str


class GiveUp(msgspec.Struct, frozen=True, tag="give_up"):
    prompt: str
    reason: str


class HandOut(msgspec.Struct, frozen=True, tag="hand_out"):
    """The next batch. Tokens older than version `oldest` bear no gradient in it."""

    prompts: list[str]
    oldest: int


class Rest(msgspec.Struct, frozen=True, tag="rest"):
    """Until the next version all engines but `stay` rest; their requests continue at these."""

    stay: int


class NoMoreBatches(msgspec.Struct, frozen=True, tag="exhausted"):
    """There will be no further batch."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The run cannot continue."""

    reason: str


class WaitReason(msgspec.Struct, frozen=True, tag="wait"):
    """A wait: who, for what, since when if that is known, and until when at most if there is a limit."""

    who: str
    reason: str
    since: float | None = None
    until: float | None = None


Action = (
    LeasePrompts
    | Defer
    | StartTrajectory
    | Abort
    | ReopenGroup
    | FinishGroup
    | GiveUp
    | HandOut
    | Rest
    | NoMoreBatches
    | Stop
    | WaitReason
)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log."""

    now: float
    view: RolloutView
    actions: list[Action]
