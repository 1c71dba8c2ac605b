"""Which exchange a request belongs to: a new one, one under way, or one of the record.

Pure.

The record of a sandbox is a path through a tree of exchanges: a restore to an older checkpoint goes back along it, and
what comes then grows a branch of its own. What lies on an abandoned branch answers nothing.

An agent *inside* is taken back together with the sandbox. It can only ask again what was under way in the state that
it was restored to: the last request on the path, or one that was open when that one came. The same question from an
agent that has got the answer, with no restore in between, is a new one: it wants another sample.

An agent *outside* is not taken back. It may continue, or start over and ask everything again: each question that
the path knows is answered from the record, and `cursor` says how far it has come. A question that the path does not
know is new at the end of the path; before the end the agent has left the path, and its sandbox must be taken back
before it can continue.

Guarantee: a step with a waiting client is never given to another one, unless that one says that it retries.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daemon.gateway.journal import AgentCommand


@dataclass(eq=False)
class ReplayExchange:
    """One exchange of the main loop, as far as the decision needs it."""

    id: int
    key: bytes
    parent: int | None = None
    checkpoint: str | None = None
    answered: bool = False  # the whole answer is in the record
    turn: int = 0
    open: tuple[int, ...] = ()  # exchanges whose answers were awaited when this one ended its turn
    # Of this life only: since the daemon started, or the last restore.
    asking: bool = False  # the upstream is being called
    waiting: bool = False  # a client waits for the answer
    last_seen: str | None = field(default=None)  # life in which the agent was given the whole answer


class Do(enum.Enum):
    FRESH = "fresh"  # a new exchange: the turn ends
    JOIN = "join"  # wait for the answer that is on its way
    RECORD = "record"  # from the record
    AGAIN = "again"  # the same exchange, but the upstream must be called once more
    LEFT = "left"  # the agent has left the path


@dataclass(frozen=True)
class ReplayChoice:
    do: Do
    step: ReplayExchange | None = None
    cursor: int = -1  # index on the path, for an agent outside


def inside(path: Sequence[ReplayExchange], key: bytes, *, life: str, retry: bool = False) -> ReplayChoice:
    """What to do with a request of an agent inside. `path` from the first to the last exchange."""
    if not path:
        return ReplayChoice(Do.FRESH)
    last = path[-1]
    opened = set(last.open)
    candidates = [last, *(step for step in reversed(path[:-1]) if step.id in opened)]
    for step in candidates:
        if step.key != key or (step.waiting and not retry):
            continue
        if step.last_seen == life and not retry:
            continue
        return ReplayChoice(_how(step), step)
    return ReplayChoice(Do.FRESH)


def outside(path: Sequence[ReplayExchange], cursor: int, key: bytes, *, retry: bool = False) -> ReplayChoice:
    """What to do with a request of an agent outside that has come to `cursor` (-1: it has not begun)."""
    order = [*range(cursor + 1, len(path)), *range(min(cursor, len(path) - 1), -1, -1)]
    for index in order:
        step = path[index]
        if step.key == key and (not step.waiting or retry):
            return ReplayChoice(_how(step), step, index)
    if cursor >= len(path) - 1:
        return ReplayChoice(Do.FRESH, None, len(path))
    return ReplayChoice(Do.LEFT, path[cursor] if cursor >= 0 else None, cursor)


def scripted(script: Sequence[ReplayExchange], key: bytes) -> ReplayExchange | None:
    """The next step of a record that is being acted again in another sandbox, if this is what comes next in it."""
    return script[0] if script and script[0].key == key and script[0].answered else None


def _how(step: ReplayExchange) -> Do:
    return Do.RECORD if step.answered else Do.JOIN if step.asking else Do.AGAIN


# --------------------------------------------------------------------------- commands of an agent outside


class Act(enum.Enum):
    RUN = "run"
    RECORD = "record"  # its effects are there: return the recorded result
    REDO = "redo"  # earlier commands of this turn must run again first: the restore undid them
    UNSURE = "unsure"  # one was begun and its end was not seen: take the sandbox back, then redo
    LEFT = "left"


def act(commands: Sequence[AgentCommand], position: int, key: bytes, tree: str) -> Act:
    """What to do with the command at `position` of the turn under way."""
    if any(command.tree == tree and not command.ended for command in commands[: position + 1]):
        return Act.UNSURE
    if any(command.tree != tree for command in commands[:position]):
        return Act.REDO
    if position >= len(commands) or commands[position].tree != tree:
        return Act.RUN
    return Act.RECORD if commands[position].key == key else Act.LEFT


def undone(commands: Sequence[AgentCommand], tree: str) -> list[int]:
    """Which commands of the turn under way a restore has undone, in order."""
    return [index for index, command in enumerate(commands) if command.tree != tree]


def path_to(steps: dict[int, ReplayExchange], head: int | None) -> list[ReplayExchange]:
    """From the first exchange to `head`."""
    path: list[ReplayExchange] = []
    while head is not None and (step := steps.get(head)) is not None:
        path.append(step)
        head = step.parent
    path.reverse()
    return path


def head_of(
    by_checkpoint: Mapping[str, Sequence[int]],
    parent_of: Callable[[str], str | None],
    checkpoint: str,
    turn: int,
    current: Sequence[ReplayExchange],
) -> int | None:
    """The last exchange that the state of `checkpoint` (of turn `turn`) knows of: its own, or its nearest ancestor's.

    A turn that changed nothing shares its checkpoint with the turn before; then the latest on the current path counts,
    since nothing that it saw was undone. `parent_of` raises KeyError for an ancestor that was removed since; then
    the turn decides.
    """
    here = {step.id for step in current}
    name: str | None = checkpoint
    while name is not None:
        if result := by_checkpoint.get(name):
            return max((number for number in result if number in here), default=max(result))
        try:
            name = parent_of(name)
        except KeyError:
            return max((step.id for step in current if step.turn <= turn), default=None)
    return None
