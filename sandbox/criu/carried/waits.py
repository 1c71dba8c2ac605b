"""The waits of a dump: which system calls were interrupted, and how each continues.

Guarantee: a file of another form, or with more than a plausible content, contains no wait; the restore then has none.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "waits.img"
PAGE = os.sysconf("SC_PAGE_SIZE")
_MAGIC = 0x31746957
_HEAD = struct.Struct("<II")
_ENTRY = struct.Struct("<4i3Qq6Q")
_MAX_PLACE = 1 << 24  # bytes that one call reads when it is entered
_MAX_ENTRIES = 1 << 20
_INTERRUPTED = frozenset({-4, -512, -513, -514, -516})  # EINTR, ERESTART...
_FUTEX, _EAGAIN = 202, (1 << 64) - errno.EAGAIN
_CALLS = 512  # more than there are
_ARGUMENTS = ("di", "si", "dx", "r10", "r8", "r9")


@dataclass(frozen=True)
class InterruptedWait:
    """A thread in a system call that was interrupted."""

    process: int  # numbers in the sandbox
    thread: int
    result: int
    argument: int  # the one whose register stays changed when the call is taken up again; -1: none
    nr: int
    ip: int  # behind the instruction
    sp: int
    left: int  # nanoseconds; INT64_MAX: for ever
    places: tuple[tuple[int, int], ...]  # (address, size): two that the call reads, and one that is written

    def registers(self, given: dict[str, Any]) -> dict[str, Any]:
        """Registers of an image, without what says how the call is resumed."""
        same: dict[str, Any] = {**given, "ip": self.ip, "ax": _waits(self.nr)}
        if self.argument >= 0:
            same[_ARGUMENTS[self.argument]] = "the rest of its time-out"
        return same

    @property
    def written(self) -> tuple[int, int]:
        """(address, size) of the memory that may differ once the call was taken up again."""
        return self.places[-1]


def returned(given: dict[str, Any]) -> dict[str, Any]:
    """Registers of a thread that waits for nothing, in the form of :meth:`InterruptedWait.registers`.

    Entered again, a wait for a futex ends at once where another thread changed the word and was stopped before it woke
    those that wait.
    """
    ended = given.get("orig_ax") == _FUTEX and given.get("ax") == _EAGAIN
    return {**given, "ax": _waits(_FUTEX)} if ended else given


def _waits(nr: int) -> str:
    return f"waits in system call {nr}"


def read(directory: Path) -> list[InterruptedWait]:
    """The waits of an image directory."""
    try:
        return parse((directory / NAME).read_bytes()) or []
    except FileNotFoundError:  # the dump is older than this
        return []


def parse(content: bytes) -> list[InterruptedWait] | None:
    """The waits in a file; None where it has another form."""
    if len(content) < _HEAD.size:
        return None
    magic, count = _HEAD.unpack_from(content)
    if magic != _MAGIC or count > _MAX_ENTRIES or len(content) != _HEAD.size + count * _ENTRY.size:
        return None
    collected = []
    for process, thread, result, argument, nr, ip, sp, left, *places in _ENTRY.iter_unpack(content[_HEAD.size :]):
        if result not in _INTERRUPTED or nr >= _CALLS or not -1 <= argument < len(_ARGUMENTS) or left < 0:
            return None
        pairs = tuple((at, min(size, _MAX_PLACE)) for at, size in zip(places[::2], places[1::2], strict=True))
        collected.append(InterruptedWait(process, thread, result, argument, nr, ip, sp, left, pairs))
    return collected


def pages(directory: Path, process: int) -> set[int]:
    """Pages of a process that its calls read when they are taken up, or that are written for that."""
    result: set[int] = set()
    for wait in read(directory):
        for at, size in wait.places if wait.process == process else ():
            result.update(range(at // PAGE * PAGE, at + size, PAGE))
    return result
