"""Which exchange a request belongs to, without any record."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.replay import Act, Do, ReplayExchange, act, head_of, inside, outside, path_to, scripted, undone

A, B, C = b"a", b"b", b"c"
NOW, BEFORE = "now", "before"


def step(number: int, key: bytes, **fields: object) -> ReplayExchange:
    return ReplayExchange(id=number, key=key, **{"answered": True, "parent": number - 1 or None, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "key", "retry", "do", "which"),
    [
        ([], A, False, Do.FRESH, None),
        # Restored while the last request was under way: it is asked again and answered from the record.
        ([step(1, A), step(2, B, last_seen=BEFORE)], B, False, Do.RECORD, 2),
        ([step(1, A), step(2, B)], B, False, Do.RECORD, 2),
        # An older question is of a state that is no more.
        ([step(1, A, last_seen=BEFORE), step(2, B, last_seen=BEFORE)], A, False, Do.FRESH, None),
        # It has heard the answer in this life: it wants another sample, unless it says that it asks again.
        ([step(1, A, last_seen=NOW)], A, False, Do.FRESH, None),
        ([step(1, A, last_seen=NOW)], A, True, Do.RECORD, 1),
        # Under way: with nobody waiting the one who asks is the one who lost his connection.
        ([step(1, A, answered=False, asking=True)], A, False, Do.JOIN, 1),
        ([step(1, A, answered=False, asking=True, waiting=True)], A, False, Do.FRESH, None),
        ([step(1, A, answered=False, asking=True, waiting=True)], A, True, Do.JOIN, 1),
        # The upstream failed, or the daemon died before it answered.
        ([step(1, A, answered=False)], A, False, Do.AGAIN, 1),
        # Two at once: both were open in the state that the second one ended.
        ([step(1, A), step(2, B, open=(1,))], A, False, Do.RECORD, 1),
        ([step(1, A, last_seen=NOW), step(2, B, open=(1,))], A, False, Do.FRESH, None),
        # The same question twice at once: each is given once, the later first.
        ([step(1, A), step(2, A, open=(1,))], A, False, Do.RECORD, 2),
        ([step(1, A), step(2, A, open=(1,), last_seen=NOW)], A, False, Do.RECORD, 1),
        ([step(1, A), step(2, A, open=(1,), waiting=True)], A, False, Do.RECORD, 1),
        ([step(1, A)], C, True, Do.FRESH, None),
    ],
)
def test_an_agent_inside(path: list[ReplayExchange], key: bytes, retry: bool, do: Do, which: int | None) -> None:
    choice = inside(path, key, life=NOW, retry=retry)
    assert (choice.do, choice.step and choice.step.id) == (do, which)


PATH = [step(1, A, last_seen=NOW), step(2, B, last_seen=NOW), step(3, C, answered=False, asking=True)]


@pytest.mark.parametrize(
    ("cursor", "key", "do", "which", "after"),
    [
        (2, b"d", Do.FRESH, None, 3),  # it goes on
        (2, A, Do.RECORD, 1, 0),  # it starts over
        (0, B, Do.RECORD, 2, 1),  # and comes along
        (1, C, Do.JOIN, 3, 2),
        (1, b"d", Do.LEFT, 2, 1),  # it does not
        (0, b"d", Do.LEFT, 1, 0),
        (-1, b"d", Do.LEFT, None, -1),
        (-1, A, Do.RECORD, 1, 0),
    ],
)
def test_an_agent_outside(cursor: int, key: bytes, do: Do, which: int | None, after: int) -> None:
    choice = outside(PATH, cursor, key)
    assert (choice.do, choice.step and choice.step.id, choice.cursor) == (do, which, after)


def test_an_agent_outside_begins() -> None:
    assert outside([], -1, A).do is Do.FRESH


@given(st.lists(st.sampled_from([A, B, C]), max_size=8), st.sampled_from([A, B, C, b"d"]), st.booleans())
def test_nobody_is_given_what_another_waits_for(keys: list[bytes], key: bytes, answered: bool) -> None:
    path = [step(n + 1, k, answered=answered, waiting=True, open=tuple(range(1, n + 1))) for n, k in enumerate(keys)]
    assert inside(path, key, life=NOW).do is Do.FRESH
    for cursor in range(-1, len(path)):
        assert outside(path, cursor, key).do in (Do.FRESH, Do.LEFT)


@given(st.lists(st.sampled_from([A, B, C]), unique=True, max_size=3), st.integers(-1, 3))
def test_an_agent_that_starts_over_hears_everything_in_order(keys: list[bytes], cursor: int) -> None:
    path = [step(number + 1, key) for number, key in enumerate(keys)]
    cursor = min(cursor, len(path) - 1)
    for index, key in enumerate(keys):
        choice = outside(path, cursor if index == 0 else index - 1, key)
        assert (choice.do, choice.cursor) == (Do.RECORD, index)
    if path:
        assert outside(path, len(path) - 1, b"d").do is Do.FRESH


def test_a_script_is_followed_in_order() -> None:
    script = [step(1, A), step(2, B, answered=False)]
    assert scripted(script, A) is script[0]
    assert scripted(script, B) is None
    assert scripted(script[1:], B) is None
    assert scripted([], A) is None


def test_where_a_checkpoint_stands() -> None:
    steps = {1: step(1, A, turn=1), 2: step(2, B, turn=2), 3: step(3, C, turn=3), 4: step(4, C, parent=2, turn=3)}
    of = {"c1": [1], "c2": [2], "c3": [3], "c4": [4]}
    parents = {"c0": None, "c1": "c0", "c2": "c1", "label": "c2", "c3": "label", "c4": "c2", "lost": "gone"}
    path = path_to(steps, 3)
    assert [entry.id for entry in path] == [1, 2, 3]

    def head(checkpoint: str, turn: int = 0) -> int | None:
        return head_of(of, parents.__getitem__, checkpoint, turn, path)

    assert [head(name) for name in ("c0", "c1", "c2", "label", "c3", "c4")] == [None, 1, 2, 2, 3, 4]
    assert head("lost", 2) == 2  # an ancestor was removed: the turn decides
    assert head("lost", 0) is None


def test_turns_that_change_nothing_share_a_checkpoint() -> None:
    path = [step(1, A, turn=1), step(2, B, turn=2)]
    assert head_of({"c1": [1, 2, 9]}, {"c1": None}.__getitem__, "c1", 1, path) == 2
    assert head_of({"c1": [1, 2, 9]}, {"c1": None}.__getitem__, "c1", 1, []) == 9


@dataclass
class Ran:
    key: bytes
    tree: str
    ended: bool = True


@pytest.mark.parametrize(
    ("commands", "position", "expected"),
    [
        ([], 0, Act.RUN),
        ([Ran(A, NOW)], 1, Act.RUN),
        ([Ran(A, NOW)], 0, Act.RECORD),  # the agent started over, its effects are there
        ([Ran(B, NOW)], 0, Act.LEFT),  # it runs something else than before
        ([Ran(A, BEFORE)], 0, Act.RUN),  # a restore undid it
        ([Ran(B, BEFORE)], 0, Act.RUN),
        ([Ran(B, BEFORE)], 1, Act.REDO),  # the agent goes on: what it believes must be true
        ([Ran(B, NOW), Ran(C, BEFORE)], 2, Act.REDO),
        ([Ran(A, NOW, ended=False)], 0, Act.UNSURE),  # the daemon died under it
        ([Ran(B, NOW, ended=False)], 0, Act.UNSURE),
        ([Ran(A, BEFORE, ended=False)], 0, Act.RUN),
    ],
)
def test_commands_of_the_turn_under_way(commands: list[Ran], position: int, expected: Act) -> None:
    assert act(commands, position, A, NOW) is expected


def test_what_a_restore_undid() -> None:
    assert undone([Ran(A, NOW), Ran(B, BEFORE), Ran(C, BEFORE)], NOW) == [1, 2]
