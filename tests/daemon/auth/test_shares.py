"""What the calls of one owner hold: counted, bounded, free again."""

from __future__ import annotations

import pytest

from daemon.auth.access import LOCAL, Caller
from daemon.auth.shares import Shares
from sandbox.errors import TooMany

MINE = Caller(token="a", owner="me", scope="exec", everything=False)
THEIRS = Caller(token="b", owner="them", scope="exec", everything=False)


def test_one_owners_calls_have_one_part() -> None:
    shares = Shares("in memory", 100)
    with shares.call(MINE) as one, shares.call(MINE) as other, shares.call(THEIRS) as neighbour:
        one.add(60)
        neighbour.add(100)
        with pytest.raises(TooMany, match="in memory"):
            other.add(50)
        other.add(40)
        one.count(500)  # what is there already is counted, not refused
        assert shares.held == {"me": 600, "them": 100}
    assert not shares.held


def test_what_a_call_held_is_free_however_it_ends() -> None:
    shares = Shares("in memory", 100)
    for _ in range(3):
        with pytest.raises(KeyError), shares.call(MINE) as held:
            held.add(100)
            raise KeyError
    assert not shares.held


def test_the_host_itself_is_not_counted() -> None:
    shares = Shares("in memory", 100)
    with shares.call(LOCAL) as held:
        held.add(1 << 40)
        assert not shares.held
