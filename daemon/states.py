"""The life of a sandbox: its states, what may happen in each, and which error says no.

Pure. Guarantee: every pair of state and event is either in the table or raises the one error that fits.

==========  ======  ======  =====  =====  =======  ========  ==============  ======
state       start   fail    use    die    restore  restored  restore_failed  remove
==========  ======  ======  =====  =====  =======  ========  ==============  ======
creating    run     remove  .      dead   .        .         .               .
running     .       .       run    dead   restor.  .         .               remove
restoring   .       .       .      rest.  .        run       dead            .
dead        .       .       .      dead   restor.  .         .               remove
removed     .       .       .      rem.   .        .         .               remove
==========  ======  ======  =====  =====  =======  ========  ==============  ======

``use`` is every act that needs living processes: exec, files, checkpoint, kill. ``die`` in
``restoring`` is expected, since a restore in place kills what runs first. ``remove`` is idempotent.
"""

from __future__ import annotations

import enum

from sandbox.errors import Closed, Conflict, PagurusError, SandboxDead
from sandbox.messages import SandboxState as S


class Event(enum.StrEnum):
    START = "start"
    FAIL = "fail"
    USE = "use"
    DIE = "die"
    RESTORE = "restore"
    RESTORED = "restored"
    RESTORE_FAILED = "restore_failed"
    REMOVE = "remove"


TRANSITIONS: dict[tuple[S, Event], S] = {
    (S.CREATING, Event.START): S.RUNNING,
    (S.CREATING, Event.FAIL): S.REMOVED,
    (S.CREATING, Event.DIE): S.DEAD,
    (S.RUNNING, Event.USE): S.RUNNING,
    (S.RUNNING, Event.DIE): S.DEAD,
    (S.RUNNING, Event.RESTORE): S.RESTORING,
    (S.RUNNING, Event.REMOVE): S.REMOVED,
    (S.RESTORING, Event.DIE): S.RESTORING,
    (S.RESTORING, Event.RESTORED): S.RUNNING,
    (S.RESTORING, Event.RESTORE_FAILED): S.DEAD,
    (S.DEAD, Event.DIE): S.DEAD,
    (S.DEAD, Event.RESTORE): S.RESTORING,
    (S.DEAD, Event.REMOVE): S.REMOVED,
    (S.REMOVED, Event.DIE): S.REMOVED,
    (S.REMOVED, Event.REMOVE): S.REMOVED,
}


def after(state: S, event: Event, *, sandbox: str | None = None, turn: int | None = None) -> S:
    """The state that follows, or the error for an event that is not possible now."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise refusal(state, event, sandbox=sandbox, turn=turn) from None


def refusal(state: S, event: Event, *, sandbox: str | None = None, turn: int | None = None) -> PagurusError:
    """The error that says why `event` is not possible in `state`, and what to do."""
    if state is S.REMOVED:
        return Closed("the sandbox has been removed", hint="create a new one", sandbox=sandbox, turn=turn)
    if state is S.DEAD and event is Event.USE:
        return SandboxDead(
            "all its processes are gone",
            hint=f"bring it back with `pagurus restore {sandbox or 'ID'}` or sandbox.restore()",
            sandbox=sandbox,
            turn=turn,
        )
    hint = "wait until it is running" if state in (S.CREATING, S.RESTORING) else "see its state with `pagurus ls`"
    return Conflict(f"cannot {event.value} while it is {state.value}", hint=hint, sandbox=sandbox, turn=turn)
