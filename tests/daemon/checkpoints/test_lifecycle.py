"""Every state of a checkpoint and every event: the table says what follows, or the event is refused."""

from __future__ import annotations

import ast
import re

import pytest

from daemon.checkpoints import lifecycle
from daemon.checkpoints.lifecycle import TRANSITIONS, CheckpointEvent, after
from sandbox.errors import Conflict
from sandbox.messages import CheckpointState
from scripts.rooms import modules

PAIRS = [(state, event) for state in CheckpointState for event in CheckpointEvent]


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: value.value)
def test_each_pair_leads_somewhere_or_is_refused(state: CheckpointState, event: CheckpointEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
        return
    with pytest.raises(Conflict, match=f"cannot {event.value} a checkpoint that is {state.value}"):
        after(state, event)


def test_the_docstring_has_the_table() -> None:
    rows = re.findall(r"^(pending|captured|durable|failed) +(.*)$", lifecycle.__doc__ or "", re.MULTILINE)
    shown = {
        (CheckpointState(state), event): CheckpointState(cell)
        for state, cells in rows
        for event, cell in zip(CheckpointEvent, cells.split(), strict=True)
        if cell != "."
    }
    assert shown == TRANSITIONS


def test_nothing_leads_back_from_failed() -> None:
    assert {to for (state, _), to in TRANSITIONS.items() if state is CheckpointState.FAILED} == {CheckpointState.FAILED}


def test_the_daemon_sets_no_state_past_the_table() -> None:
    """Where a checkpoint begins its state stands; from there on `after` says it."""
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        if module.path.startswith("daemon/")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assign) and "CheckpointState." in ast.unparse(node.value)
        if any(re.search(r"\.state\b", ast.unparse(target)) for target in node.targets)
    ]
    assert found == []
