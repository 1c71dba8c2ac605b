"""Whose sandboxes a call sees, and whether its token may have more of them.

Owns: applying :mod:`daemon.auth.access` and :mod:`daemon.auth.quota` to the sandboxes of a host, those that are
being made included. Does not own: either decision.
Guarantee: every look-up of a sandbox or checkpoint on behalf of a request goes through here, so a route
cannot forget it; what the daemon does of its own accord sees everything.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from daemon.auth import budget
from daemon.auth.access import CALLER, sees
from daemon.auth.quota import excess, usage
from daemon.catalogue import CheckpointRow, SandboxRow
from sandbox.container.cgroup import parse_bytes, process_budget
from sandbox.errors import Conflict, Invalid, TooMany

MIN_MEMORY = 1 << 20  # bytes; pid 1 and a first command fit in
NAMED = 5  # of those that are meant by the same word, in a message
KEY: contextvars.ContextVar[str] = contextvars.ContextVar("key", default="")  # of the call under way; "": it has none


class OwnedRow(Protocol):
    """A sandbox, as far as it matters here."""

    row: SandboxRow


T = TypeVar("T", bound=OwnedRow)


def visible(owner: str) -> bool:
    """Whether something of `owner` exists for the call under way."""
    return sees(CALLER.get(), owner)


def find(live_sandboxes: Mapping[str, T], sandbox: str) -> T | None:
    """The sandbox of this id or name, or whose id alone begins so, that the call under way sees.

    Names are unique for each owner only.
    """
    found = live_sandboxes.get(sandbox)
    if found is not None and visible(found.row.owner):
        return found
    named = [live for live in live_sandboxes.values() if live.row.name == sandbox and visible(live.row.owner)]
    own = [live for live in named if live.row.owner == CALLER.get().owner]
    if len(own or named) > 1:
        raise Conflict(f"several owners have a sandbox named {sandbox}", remedy="use its id")
    if named:
        return (own or named)[0]
    begun = {id: live for id, live in live_sandboxes.items() if begins(id, sandbox) and visible(live.row.owner)}
    return _only(begun, f"begin with {sandbox}")


def find_checkpoint(rows: Iterable[CheckpointRow], checkpoint: str) -> CheckpointRow | None:
    """Of these, the checkpoint whose id alone begins so, or that alone has this label, if the call sees it."""
    seen = {row.id: row for row in rows if visible(row.owner)}
    begun = {id: row for id, row in seen.items() if begins(id, checkpoint)}
    labelled = {id: row for id, row in seen.items() if row.label == checkpoint}
    return _only(begun, f"begin with {checkpoint}") or _only(labelled, f"have the label {checkpoint!r}")


def begins(full: str, start: str) -> bool:
    """Whether `start` is the beginning of this id, with a part that tells it from others.

    >>> begins("s-4f1c00aa12", "s-4f"), begins("s-4f1c00aa12", "s-"), begins("s-4f1c00aa12", "4f")
    (True, False, False)
    """
    return len(start) > len("s-") and full.startswith(start)


def _only(found: Mapping[str, Any], alike: str) -> Any | None:
    """The one that there is, by its id; None without any. Raises Conflict, which names them, where there are more."""
    if len(found) > 1:
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        names = ", ".join(sorted(found)[:NAMED])
        raise Conflict(f"{len(found)} {alike}: {names}{more}", remedy="use more of the id of the one you mean")
    return next(iter(found.values()), None)


class Making:
    """Sandboxes that are being made: they have names and count against quotas before they are published."""

    def __init__(self, live_sandboxes: Mapping[str, OwnedRow]) -> None:
        self._live_sandboxes = live_sandboxes
        self._rows: dict[str, SandboxRow] = {}

    def rows(self) -> list[SandboxRow]:
        """Those that are being made."""
        return list(self._rows.values())

    @contextlib.contextmanager
    def admitted(self, row: SandboxRow) -> Iterator[None]:
        """`row` is made within. Its owner is the caller's, where the caller is no administrator."""
        caller = CALLER.get()
        if row.limits.memory is not None and parse_bytes(row.limits.memory) < MIN_MEMORY:
            raise Invalid(f"a sandbox needs {MIN_MEMORY >> 20} MiB of memory at least")
        if not caller.everything:
            row.owner = caller.owner
        row.made_by = KEY.get()
        rows = {**{live.row.id: live.row for live in self._live_sandboxes.values()}, **self._rows}.values()
        mine = [other for other in rows if other.owner == row.owner]
        if row.name and any(other.name == row.name for other in mine):
            raise Conflict(f"there is a sandbox named {row.name} already", remedy="choose another name")
        counted = [row, *mine]
        used = usage([each.limits for each in counted], sum(each.inherited for each in counted))
        if why := excess(caller.quota, used):
            raise TooMany(f"the quota of this token would be exceeded: {why}", remedy="remove some, or ask for less")
        if why := budget.excess(row.limits, [other.limits for other in rows], process_budget()):
            raise TooMany(why, remedy="lower Limits.processes, or remove sandboxes with many")
        self._rows[row.id] = row
        try:
            yield
        finally:
            del self._rows[row.id]
