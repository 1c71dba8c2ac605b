"""`status.json`: what the rollout does at this moment, for `pagurus rollouts why` and for supervisors."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollout.decide.view import WaitReason
from rollout.messages import Trajectory
from rollout.store.samples import Account
from sandbox import durable
from sandbox.errors import NotFound

NAME = "status.json"


class TrajectoryStatus(msgspec.Struct, kw_only=True):
    """One trajectory on its way."""

    name: str
    turn: int
    tokens: int
    oldest: int | None
    started_at: float
    doing: str  # generate, step, or what it waits for
    since: float
    sandbox: str = ""

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryStatus:
        doing, since = _doing(trajectory)
        return cls(
            name=f"{trajectory.prompt}/{trajectory.index}",
            turn=len(trajectory.turns),
            tokens=len(trajectory.tokens),
            oldest=trajectory.oldest,
            started_at=trajectory.started_at,
            doing=doing,
            since=since,
            sandbox=trajectory.sandbox,
        )


def _doing(trajectory: Trajectory) -> tuple[str, float]:
    """By the times of its last turn."""
    if not trajectory.sandbox:
        return "create", trajectory.started_at
    if not trajectory.turns:
        return "reset", trajectory.started_at
    last = trajectory.turns[-1]
    return ("step", last.gen_end) if last.gen_end else ("generate", last.gen_start)


class Status(msgspec.Struct, kw_only=True):
    at: float  # seconds since the epoch
    version: int
    step: int
    trainer: str  # training, waiting (for a batch), elsewhere
    requested_at: float | None
    waits: list[WaitReason]
    running: list[TrajectoryStatus]
    account: Account
    seconds: dict[str, float]  # trajectory-seconds by phase since the process began


def write_status(directory: Path, status: Status) -> None:
    """Whole or not at all."""
    durable.publish(directory / NAME, msgspec.json.encode(status) + b"\n", durable=False)


def read_status(directory: Path) -> Status:
    try:
        return msgspec.json.decode((directory / NAME).read_bytes(), type=Status)
    except FileNotFoundError:
        raise NotFound(f"no rollout has worked in {directory}", hint="name a run directory") from None
