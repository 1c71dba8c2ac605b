"""Whose turn it is on machines that jobs share: round robin. Pure.

Guarantee: a machine works for one job at a time; no job overtakes one whose turn comes first, also while that job makes
no request yet; one of those present can always continue.

The same order on every machine is what makes a cycle as short as a group promises: who asks first, as it happens, may
make others wait for two phases of each job. The order is by round, then by seat, over all machines of a kind, so that
no two jobs wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec


class MachineSlot(msgspec.Struct, frozen=True, array_like=True):
    """The next turn of a job on machines of one kind. Two jobs of a group have different seats."""

    job: str
    round: int  # turns that it had
    slot: int
    machines: tuple[int, ...]
    requests: bool  # it could begin now


class TurnsView(msgspec.Struct, frozen=True, kw_only=True):
    """Of the machines of one kind that a group has."""

    turns: list[MachineSlot]
    busy: list[int]  # machines that work


def due(turns: Iterable[MachineSlot], busy: Collection[int]) -> list[str]:
    """The jobs that begin now.

    >>> due([MachineSlot("a", 1, 0, (0,), True), MachineSlot("b", 0, 1, (0,), False)], ())
    []
    """
    taken, begin = set(busy), []
    for turn in sorted(turns, key=lambda turn: (turn.round, turn.slot)):
        if turn.requests and taken.isdisjoint(turn.machines):
            begin.append(turn.job)
        taken.update(turn.machines)  # it works there from now on, or they are kept for it
    return begin
