"""Which sandboxes move so that hosts have equal shares, and that it comes to an end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.decide import balance
from coordinator.decide.balance import AT_ONCE, MovableSandbox, Move
from coordinator.decide.place import HostView

IMAGES = frozenset({"i"})
LONG = dict.fromkeys("abcdef", 100.0)


def host(name: str, sandboxes: int, **fields: object) -> HostView:
    existing: dict = {"cpus": 2.0, "memory_bytes": 100.0, "memory_free": 90.0, "images": IMAGES}
    return HostView(name, **{**existing, **fields, "sandboxes": sandboxes})


def residents(name: str, count: int, **fields: object) -> list[MovableSandbox]:
    existing: dict = {"images": IMAGES, "idle": 1.0}
    return [MovableSandbox(f"{name}-{number:02}", name, **{**existing, **fields}) for number in range(count)]


def moved(hosts: list[HostView], here: list[MovableSandbox], steady: dict[str, float] = LONG) -> list[tuple[str, str]]:
    return [(item.source, item.target) for item in balance.decide(hosts, here, [], steady)]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((8, 8, 8, 8), 0),
        ((9, 8, 8, 7), 0),  # small differences stay
        ((9, 9, 8, 6), 1),
        ((11, 11, 10, 0), 2),  # as many as a host takes part in at a time
        ((1, 0, 0, 0), 0),
        ((3, 0, 0, 0), 1),
        ((100, 100, 100, 92), 0),  # less than a tenth
        ((100, 100, 100, 70), 2),
    ],
)
def test_a_full_host_gives_to_an_empty_one(counts: tuple[int, ...], expected: int) -> None:
    hosts = [host(name, count) for name, count in zip("abcd", counts, strict=True)]
    here = [item for one in hosts for item in residents(one.name, one.sandboxes)]
    result = moved(hosts, here)
    assert len(result) == expected
    fullest, emptiest = max(counts), min(counts)
    assert all(counts["abcd".index(source)] == fullest for source, _ in result)
    assert all(counts["abcd".index(target)] == emptiest for _, target in result)


@pytest.mark.parametrize(
    "other",
    [
        {"alive": False},
        {"draining": True},
        {"images": frozenset({"another"})},
        {"memory_free": 1.0},
        {"cpus": 0.1},  # its share would be the larger one
    ],
)
def test_nothing_moves_to_a_host_that_cannot_take_it(other: dict) -> None:
    assert moved([host("a", 9), host("b", 0)], residents("a", 9)) == [("a", "b")] * 2
    assert moved([host("a", 9), host("b", 0, **other)], residents("a", 9)) == []


def test_a_host_that_came_back_gets_some_after_a_while_and_labels_are_kept() -> None:
    hosts = [host("a", 9), host("b", 0)]
    assert moved(hosts, residents("a", 9), {"a": 100.0}) == []
    assert moved(hosts, residents("a", 9), {"a": 100.0, "b": balance.STEADY - 0.1}) == []
    assert moved(hosts, residents("a", 9, labels={"on.zone": "x"})) == []
    hosts[1] = replace(hosts[1], labels={"zone": "x"})
    assert moved(hosts, residents("a", 9, labels={"on.zone": "x"})) == [("a", "b")] * 2


def test_a_host_that_is_to_be_emptied_gives_all_and_first() -> None:
    hosts = [host("a", 9), host("b", 1, draining=True), host("c", 3), host("d", 4)]
    here = [*residents("a", 9), *residents("b", 1)]
    assert moved(hosts, here) == [("b", "c"), ("a", "c"), ("a", "d")]
    assert balance.givers(hosts, [], LONG) == ["b", "a"]
    assert moved([host("b", 1, draining=True), host("c", 50)], residents("b", 1)) == [("b", "c")]


def test_those_with_a_copy_there_move_first_then_those_idle_longest() -> None:
    here = residents("a", 4)
    here = [replace(here[0], idle=5.0), replace(here[1], idle=9.0), replace(here[2], copies=frozenset("b")), here[3]]
    result = balance.decide([host("a", 9), host("b", 0)], here, [], LONG)
    assert [move.sandbox for move in result] == ["a-02", "a-01"]
    many = residents("a", 200)
    assert balance.offered([*many, replace(many[0], sandbox="old", idle=2.0)])[0].sandbox == "old"
    assert len(balance.offered(many)) == balance.OFFERED


counts = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), min_size=1, max_size=6)


@given(counts, st.sets(st.sampled_from("abcdef"), max_size=2), st.sets(st.sampled_from("abcdef"), max_size=2))
def test_moves_make_shares_more_even_until_nothing_moves(
    drawn: list[tuple[int, int]], draining: set[str], away: set[str]
) -> None:
    hosts = {
        name: host(name, count, cpus=float(cpus), draining=name in draining, alive=name not in away)
        for name, (count, cpus) in zip("abcdef", drawn, strict=False)
    }
    here = {item.sandbox: item for one in hosts.values() for item in residents(one.name, one.sandboxes)}
    total, rounds, ever = len(here), 0, Counter[str]()
    while True:
        before = sum(one.sandboxes**2 / one.cpus for one in hosts.values() if not one.draining)
        view = (list(hosts.values()), list(here.values()), [], LONG)
        result = balance.decide(*view)
        again = msgspec.json.decode(
            msgspec.json.encode(view), type=tuple[list[HostView], list[MovableSandbox], list, dict]
        )
        assert balance.decide(*again) == result  # as it is logged, it is decided again
        if not result:
            break
        taking_part = Counter(name for move in result for name in (move.source, move.target))
        assert max(taking_part.values()) <= AT_ONCE
        for move in result:
            source, target = hosts[move.source], hosts[move.target]
            assert source.alive and target.alive and not target.draining and here[move.sandbox].host == source.name
            here[move.sandbox] = replace(here[move.sandbox], host=target.name)
            hosts[move.source] = replace(source, sandboxes=source.sandboxes - 1)
            hosts[move.target] = replace(target, sandboxes=target.sandboxes + 1)
            ever[move.sandbox] += 1
        if not any(move.source in draining for move in result):
            assert sum(one.sandboxes**2 / one.cpus for one in hosts.values() if not one.draining) < before
        rounds += 1
        assert rounds <= 2 * total
    able = [one for one in hosts.values() if one.alive and not one.draining]
    if able:
        assert all(one.sandboxes == 0 for one in hosts.values() if one.draining and one.alive)
        for full in able:
            for other in able:
                minimum = max(1 / max(full.cpus, other.cpus), 0.1 * total / sum(one.cpus for one in able))
                gain = (full.sandboxes - 1) / full.cpus - (other.sandboxes + 1) / other.cpus
                assert full is other or gain < minimum + 1e-9


@given(counts, st.data())
def test_moves_under_way_count_where_they_lead(drawn: list[tuple[int, int]], data: st.DataObject) -> None:
    hosts = [host(name, count, cpus=float(cpus)) for name, (count, cpus) in zip("abcdef", drawn, strict=False)]
    here = [item for one in hosts for item in residents(one.name, one.sandboxes)]
    begun = balance.decide(hosts, here, [], LONG)
    names = {move.sandbox for move in begun}
    left = [item for item in here if item.sandbox not in names]
    assert balance.decide(hosts, left, begun, LONG) == []  # what can begin has begun
    if begun:
        over = data.draw(st.sampled_from(begun))
        under_way = [move for move in begun if move is not over]
        done = [replace(one, sandboxes=one.sandboxes + _change(one.name, over)) for one in hosts]
        assert not any(move.source == over.target for move in balance.decide(done, left, under_way, LONG))


def _change(name: str, move: Move) -> int:
    return (name == move.target) - (name == move.source)
