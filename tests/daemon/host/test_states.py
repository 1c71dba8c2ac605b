"""The life of a sandbox: every pair of state and event, legal and illegal."""

from __future__ import annotations

import itertools

import pytest

from daemon import states
from daemon.states import Event
from sandbox.errors import Closed, Conflict, SandboxDead
from sandbox.messages import SandboxState as S

EXPECTED = {
    S.CREATING: {Event.START: S.RUNNING, Event.FAIL: S.REMOVED, Event.DIE: S.DEAD},
    S.RUNNING: {Event.USE: S.RUNNING, Event.DIE: S.DEAD, Event.RESTORE: S.RESTORING, Event.REMOVE: S.REMOVED},
    S.RESTORING: {Event.DIE: S.RESTORING, Event.RESTORED: S.RUNNING, Event.RESTORE_FAILED: S.DEAD},
    S.DEAD: {Event.DIE: S.DEAD, Event.RESTORE: S.RESTORING, Event.REMOVE: S.REMOVED},
    S.REMOVED: {Event.DIE: S.REMOVED, Event.REMOVE: S.REMOVED},
}
PAIRS = list(itertools.product(S, Event))


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: value.value)
def test_every_pair(state: S, event: Event) -> None:
    if event in EXPECTED[state]:
        assert states.after(state, event) is EXPECTED[state][event]
        return
    target = Closed if state is S.REMOVED else SandboxDead if (state, event) == (S.DEAD, Event.USE) else Conflict
    with pytest.raises(target) as caught:
        states.after(state, event, sandbox="s-1", turn=3)
    assert (caught.value.sandbox, caught.value.turn) == ("s-1", 3)
    assert caught.value.hint


def test_a_dead_sandbox_says_how_to_bring_it_back() -> None:
    with pytest.raises(SandboxDead, match="pagurus restore s-1"):
        states.after(S.DEAD, Event.USE, sandbox="s-1")


def test_nothing_leaves_removed() -> None:
    for event in Event:
        if event in EXPECTED[S.REMOVED]:
            assert states.after(S.REMOVED, event) is S.REMOVED
