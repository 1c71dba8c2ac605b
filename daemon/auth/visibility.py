"""Whose sandboxes a call sees, and whether its token may have more of them.

Guarantee: every look-up of a sandbox or checkpoint on behalf of a request goes through here, so a route cannot forget
it; what the daemon does of its own accord sees everything.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from daemon.auth import budget
from daemon.auth.access import CALLER, sees
from daemon.auth.quota import excess, usage
from daemon.catalogue import CheckpointRow, SandboxRow
from sandbox.container.cgroup import parse_bytes, process_budget
from sandbox.errors import Conflict, Invalid, TooMany

MIN_MEMORY = 1 << 20  # bytes; pid 1 and a first command fit in
LIKE_ID = re.compile(r"[sc]-[0-9a-f]*")  # what is an id or the beginning of one, and no name
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
    """The sandbox of this id; or the caller's own of this name, or whose id alone of all its own begins so.

    What other owners name, or how their ids begin, decides nothing for a caller that sees all.
    """
    result = live_sandboxes.get(sandbox) or live_sandboxes.get(dashed(sandbox))
    if result is not None and visible(result.row.owner):
        return result
    own = {id: live for id, live in live_sandboxes.items() if is_own(live.row.owner)}
    if not polls_like_id(sandbox):
        return next((live for live in own.values() if live.row.name == sandbox), None)
    return _only({id: live for id, live in own.items() if begins(id, sandbox)}, f"begin with {sandbox}")


def dashed(sandbox: str) -> str:
    """The id that is spelled without its dash, as in the names of E2B's hosts.

    >>> dashed("s4f1c00aa12")
    's-4f1c00aa12'
    """
    return f"s-{sandbox[1:]}" if sandbox[:1] == "s" and sandbox[1:2] != "-" else sandbox


def find_checkpoint(rows: Iterable[CheckpointRow], checkpoint: str, *, anyones: bool = False) -> CheckpointRow | None:
    """Of these, the caller's own checkpoint whose id alone begins so, or that alone has this label.

    `anyones`: the rows are of one sandbox, which the caller named: whose it is does not matter.
    """
    observed = {row.id: row for row in rows if (visible(row.owner) if anyones else is_own(row.owner))}
    if polls_like_id(checkpoint):
        return _only({id: row for id, row in observed.items() if begins(id, checkpoint)}, f"begin with {checkpoint}")
    labelled = {id: row for id, row in observed.items() if row.label == checkpoint}
    return _only(labelled, f"have the label {checkpoint!r}")


def is_own(owner: str) -> bool:
    """Whether something of `owner` is the caller's own. Administrators share what the host owns."""
    return owner == caller_owner() and visible(owner)


def caller_owner() -> str:
    """Whose the call under way makes what it makes."""
    caller = CALLER.get()
    return "" if caller.everything else caller.owner


def polls_like_id(word: str) -> bool:
    """Whether this is to be an id, or the beginning of one, of a sandbox or checkpoint.

    >>> looks_like_id("s-5a11"), looks_like_id("c-0"), looks_like_id("s-web"), looks_like_id("release")
    (True, True, False, False)
    """
    return LIKE_ID.fullmatch(word) is not None


def begins(full: str, start: str) -> bool:
    """Whether `start` is the beginning of this id, with a part that distinguishes it from others.

    >>> begins("s-4f1c00aa12", "s-4f"), begins("s-4f1c00aa12", "s-"), begins("s-4f1c00aa12", "4f")
    (True, False, False)
    """
    return len(start) > len("s-") and full.startswith(start)


def _only(result: Mapping[str, Any], alike: str) -> Any | None:
    """The one that there is, by its id; None without any. Raises Conflict, which names them, where there are more."""
    if len(result) > 1:
        more = f" and {len(result) - NAMED} more" if len(result) > NAMED else ""
        names = ", ".join(sorted(result)[:NAMED])
        raise Conflict(f"{len(result)} {alike}: {names}{more}", hint="use more of the id of the one you mean")
    return next(iter(result.values()), None)


class Making:
    """Sandboxes that are being made: they have names and count against quotas before they are published."""

    def __init__(
        self, live_sandboxes: Mapping[str, OwnedRow], need_open: Callable[[str, Mapping[str, str]], None]
    ) -> None:
        self._live_sandboxes = live_sandboxes
        self._need_open = need_open  # raises for the owner and the labels of a run that has ended
        self._rows: dict[str, SandboxRow] = {}

    def rows(self) -> list[SandboxRow]:
        """Those that are being made."""
        return list(self._rows.values())

    @contextlib.contextmanager
    def admitted(self, row: SandboxRow) -> Iterator[None]:
        """`row` is made within. Its owner is the caller's, where the caller is no administrator."""
        caller = CALLER.get()
        if row.limits.memory is not None and parse_bytes(row.limits.memory) < MIN_MEMORY:
            raise Invalid(
                f"a sandbox needs {MIN_MEMORY >> 20} MiB of memory at least", hint="raise `memory`, or leave it out"
            )
        if not caller.everything:
            row.owner = caller.owner
        row.made_by = KEY.get()
        self._need_open(row.owner, row.labels)
        rows = {**{live.row.id: live.row for live in self._live_sandboxes.values()}, **self._rows}.values()
        mine = [other for other in rows if other.owner == row.owner]
        if row.name and any(other.name == row.name for other in mine):
            raise Conflict(f"there is a sandbox named {row.name} already", hint="choose another name")
        counted = [row, *mine]
        used = usage([item.limits for item in counted], sum(item.inherited for item in counted))
        if why := excess(caller.quota, used):
            raise TooMany(f"the quota of this token would be exceeded: {why}", hint="remove some, or ask for less")
        if why := budget.excess(row.limits, [other.limits for other in rows], process_budget()):
            raise TooMany(why, hint="lower Limits.processes, or remove sandboxes with many")
        self._rows[row.id] = row
        try:
            yield
        finally:
            del self._rows[row.id]
