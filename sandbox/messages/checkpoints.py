"""SDK <-> daemon: checkpoints, restores, forks."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

from sandbox.errors import ErrorBody, Invalid
from sandbox.messages.brief import Brief
from sandbox.messages.sandboxes import SandboxInfo
from sandbox.messages.verdict import Verdict

MAX_FORKS = 1024  # of one call
Label = Annotated[str, msgspec.Meta(max_length=4096)]  # of a checkpoint, as requested


class CheckpointState(enum.StrEnum):
    PENDING = "pending"  # queued or being taken; not restorable yet
    CAPTURED = "captured"  # restorable on this host until it loses power
    DURABLE = "durable"  # survives power loss
    FAILED = "failed"


class CheckpointInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: an immutable, restorable state of a sandbox."""

    id: str
    sandbox: str
    state: CheckpointState
    verdict: Verdict  # what this checkpoint newly captured
    parent: str | None = None
    label: str | None = None
    turn: int = 0
    created_at: float = 0.0
    started_at: float | None = None  # when the engine began, seconds since the epoch
    captured_at: float | None = None
    durable_at: float | None = None
    frozen_ms: float = 0.0
    total_ms: float = 0.0  # from start to captured
    stored_bytes: int = 0  # bytes that this checkpoint added to the disk
    full_bytes: int = 0  # bytes that a full dump at this turn would have added
    error: str | None = None
    proved_at: float | None = None  # when it was last restored separately and compared, and was equal
    refuted: str | None = None  # why not, when it was last tried


class CheckpointRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/checkpoints"""

    label: Label | None = None
    wait: Literal["captured", "durable"] = "captured"


class RestoreRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/restore. None restores the latest checkpoint."""

    checkpoint: str | None = None
    verify: bool = False  # compare the restored state with the checkpoint before it runs


class RestoreResult(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK"""

    sandbox: str
    checkpoint: str
    total_ms: float
    verified: bool = False
    differences: list[str] = []  # empty when equal


class ForkRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/checkpoints/{id}/fork"""

    count: int = 1
    verify: bool = False  # compare each child with the checkpoint before it runs; one that differs has failed
    labels: dict[str, str] | None = None  # of the children; none: those of the sandbox they come from

    def need_count(self) -> None:
        """Raises Invalid for too few or too many."""
        if not 1 <= self.count <= MAX_FORKS:
            raise Invalid(
                f"count must lie between 1 and {MAX_FORKS}, not {self.count}", hint="fork several times for more"
            )


class ForkEntry(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one child of a fork; each succeeds or fails alone."""

    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None
