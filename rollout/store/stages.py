"""How far each process of a run came after it was started, with times: what a restart waited for.

Guarantee: lines of several processes do not mix. A line that a full disk has no room for is missing; nothing fails.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

NAME = "stages.jsonl"
NOTICED = "noticed"  # its death, by who starts it again
BEGUN = "begun"  # the process exists
IMPORTED = "imported"  # its code is loaded
READY = "ready"  # it does what it is for, as far as others let it
REQUESTS = "asks"  # for its turn on machines that jobs share
TURN = "turn"  # it is
WORKED = "worked"  # it has done so once: a turn was played, a step was saved, an answer was given


class RoleStage(msgspec.Struct, frozen=True):
    """One line: a process of a role reached a stage."""

    at: float  # seconds since the epoch
    role: str
    pid: int
    stage: str


def note(roles: Path, role: str, stage: str, pid: int | None = None) -> None:
    """Append a line. `pid`: None is this process."""
    line = msgspec.json.encode(RoleStage(time.time(), role, os.getpid() if pid is None else pid, stage)) + b"\n"
    with contextlib.suppress(OSError):  # a full disk: its writer continues, and says so where it matters
        roles.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(roles / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read(roles: Path, *, role: str = "", pid: int = 0, since: float = 0.0) -> list[RoleStage]:
    """Lines in the order of their writing: of one role and process, or of all."""
    try:
        lines = (roles / NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    result = []
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):  # cut short by a full disk
            result.append(msgspec.json.decode(line, type=RoleStage))
    return [item for item in result if item.at >= since and role in ("", item.role) and pid in (0, item.pid)]
