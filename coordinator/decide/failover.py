"""Which sandboxes go on elsewhere when hosts are lost: each at the host that holds its newest copy."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Lost:
    """A sandbox whose host's lease is over, and its newest copy."""

    sandbox: str
    host: str
    checkpoint: str
    holder: str


@dataclass(frozen=True)
class Revive:
    """Let the sandbox go on from this checkpoint there."""

    sandbox: str
    checkpoint: str
    source: str
    target: str


def decide(lost: Iterable[Lost], alive: Set[str], over: Set[str]) -> list[Revive]:
    """`over`: hosts that surely act no more. A copy on a host that does not answer waits for it."""
    return [
        Revive(each.sandbox, each.checkpoint, each.host, each.holder)
        for each in sorted(lost, key=lambda each: each.sandbox)
        if each.host in over and each.host not in alive and each.holder in alive and each.holder != each.host
    ]
