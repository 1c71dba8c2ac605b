"""Round robin: nobody overtakes, no machine works for two, somebody can always go on."""

from __future__ import annotations

import random

import pytest

from coordinator.decide.turns import MachineSlot, due

BOTH, FIRST, SECOND = (0, 1), (0,), (1,)


@pytest.mark.parametrize(
    ("turns", "busy", "begin"),
    [
        ([MachineSlot("a", 0, 0, FIRST, True), MachineSlot("b", 0, 1, FIRST, True)], [], ["a"]),
        ([MachineSlot("a", 1, 0, FIRST, True), MachineSlot("b", 0, 1, FIRST, True)], [], ["b"]),
        ([MachineSlot("a", 1, 0, FIRST, True), MachineSlot("b", 0, 1, FIRST, False)], [], []),  # it is kept for b
        ([MachineSlot("a", 0, 0, FIRST, True)], [0], []),
        ([MachineSlot("a", 0, 0, FIRST, True), MachineSlot("b", 0, 1, SECOND, True)], [], ["a", "b"]),
        (
            [MachineSlot("a", 0, 0, BOTH, True), MachineSlot("b", 0, 1, SECOND, True)],
            [0],
            [],
        ),  # b would make a wait longer
        ([], [], []),
    ],
)
def test_who_begins(turns: list[MachineSlot], busy: list[int], begin: list[str]) -> None:
    assert due(turns, busy) == begin


@pytest.mark.parametrize("seed", range(20))
def test_all_of_any_group_take_all_their_turns(seed: int) -> None:
    """Jobs on some of four machines each, which ask when they like and take as long as they like."""
    draw = random.Random(seed)
    uses = {f"job-{n}": tuple(sorted(draw.sample(range(4), draw.randint(1, 4)))) for n in range(5)}
    rounds, requests, works = dict.fromkeys(uses, 0), set[str](), set[str]()
    for _ in range(100_000):
        if min(rounds.values()) == 10 and not works:
            break
        job = draw.choice(sorted(uses))
        if job in works:
            works.remove(job)
        else:
            requests.add(job)
        busy = {machine for item in works for machine in uses[item]}
        assert len(busy) == sum(len(uses[item]) for item in works), "a machine works for two"
        turns = [
            MachineSlot(name, rounds[name], n, uses[name], name in requests - works) for n, name in enumerate(uses)
        ]
        for name in due([turn for turn in turns if turn.round < 10], busy):
            works.add(name)
            requests.discard(name)
            rounds[name] += 1
    assert set(rounds.values()) == {10}
