"""Which prepared states stay when there are too many: those that are used again. Pure.

The rule is 2Q (Johnson and Shasha, 1994). A state that is new waits in a queue, whatever it is used for there: the
members of its group use it all at once, which says nothing of later. It leaves first in, first out, and only its name
is remembered. One that is requested after that is made again and then is a recurring one: of these the one that
was not used for longest goes. So a stream of prompts that are each played once takes a quarter of the room, and the
states of an evaluation stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PreparedStateUse:
    name: str
    made: float  # when
    used: float  # when last
    again: bool  # it was requested after it had been forgotten


def to_forget(states: Sequence[PreparedStateUse], limit: int) -> list[str]:
    """The names that go, so that at most `limit` stay.

    >>> seen = [PreparedStateUse("a", 1, 9, True), PreparedStateUse("b", 2, 2, False), PreparedStateUse("c", 3, 3,
    False)]
    >>> to_forget(seen, 2)
    ['b']
    """
    new = sorted((state for state in states if not state.again), key=lambda state: (state.made, state.name))
    again = sorted((state for state in states if state.again), key=lambda state: (state.used, state.name))
    capacity = max(1, limit // 4)
    gone = []
    for _ in range(len(states) - limit):
        queue = new if len(new) > capacity or not again else again
        gone.append(queue.pop(0).name)
    return gone


def remembered(gone: Sequence[tuple[float, str]], limit: int) -> set[str]:
    """Of the names that went, with when: those that are still remembered, half as many as there may be states."""
    return {name for _, name in sorted(gone)[-max(1, limit // 2) :]}
