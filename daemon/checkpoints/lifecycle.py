"""The life of a checkpoint: its states, and what may happen in each.

Pure. Guarantee: every pair of state and event is in the table or raises Conflict.

========  ========  =======  ========  ========  ======
state     capture   store    retry     repack    fail
========  ========  =======  ========  ========  ======
pending   captured  .        .         .         failed
captured  .         durable  captured  .         failed
durable   .         durable  .         captured  failed
failed    .         .        .         .         failed
========  ========  =======  ========  ========  ======

``capture``: its raw images and its snapshot are complete. ``store``: its content is on the disk, and so is its row.
``retry``: storing failed, for want of room or by a bug, and is tried again. ``repack``: its packed images are gone and
the raw ones are there. ``fail``: it was not captured, or its content is lost; nothing leads back from there.
"""

from __future__ import annotations

import enum

from sandbox.errors import Conflict
from sandbox.messages import CheckpointState as S


class CheckpointEvent(enum.StrEnum):
    CAPTURE = "capture"
    STORE = "store"
    RETRY = "retry"
    REPACK = "repack"
    FAIL = "fail"


TRANSITIONS: dict[tuple[S, CheckpointEvent], S] = {
    (S.PENDING, CheckpointEvent.CAPTURE): S.CAPTURED,
    (S.PENDING, CheckpointEvent.FAIL): S.FAILED,
    (S.CAPTURED, CheckpointEvent.STORE): S.DURABLE,
    (S.CAPTURED, CheckpointEvent.RETRY): S.CAPTURED,
    (S.CAPTURED, CheckpointEvent.FAIL): S.FAILED,
    (S.DURABLE, CheckpointEvent.STORE): S.DURABLE,
    (S.DURABLE, CheckpointEvent.REPACK): S.CAPTURED,
    (S.DURABLE, CheckpointEvent.FAIL): S.FAILED,
    (S.FAILED, CheckpointEvent.FAIL): S.FAILED,
}


def after(state: S, event: CheckpointEvent) -> S:
    """The state that follows. Raises Conflict for an event that is not possible now: a bug."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise Conflict(
            f"cannot {event.value} a checkpoint that is {state.value}", hint="report it with the daemon's log"
        ) from None
