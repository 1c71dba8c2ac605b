"""The way of a running command's output to one reader, as it comes.

Guarantee: while as much as `limit` bytes waits, nothing more is read from the command, so that it waits itself; beyond
that there can only be what lay in its pipes when it ended. A reader that leaves ends the command as a deadline does.

::

    command ══ pipe ══▶ put ─▶ [ parts ] ─▶ get ─▶ reader          full: the pipe is not read, and the command waits
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from sandbox.errors import Closed

MAX_BUFFERED = 4 << 20  # bytes
PART = 4096  # bytes up to which a part is joined with the next one
Name = Literal["stdout", "stderr"]


class Outlet:
    """Output on its way from a command to one reader. From one event loop."""

    def __init__(self, limit: int = MAX_BUFFERED) -> None:
        self.left = False  # the reader has
        self._limit = limit
        self._parts: deque[tuple[Name, bytes]] = deque()
        self._size = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._deadline: asyncio.Timeout | None = None
        self._pace: Callable[[bool], None] | None = None

    # ----------------------------------------------------------------- the command's side

    def put(self, stream: Name, data: bytes) -> None:
        """A part of an output. Never refused: who reads the command stops when it is full."""
        if self.left:
            return
        if self._parts and self._parts[-1][0] == stream and len(self._parts[-1][1]) < PART:
            data_before = self._parts.pop()[1]  # single bytes would take many times their size
            self._parts.append((stream, data_before + data))
        else:
            self._parts.append((stream, data))
        self._size += len(data)
        self._report()
        if self.full and self._pace is not None:
            self._pace(False)

    @property
    def full(self) -> bool:
        return self._size >= self._limit

    async def capacity(self) -> None:
        """Returns when it is not full."""
        while self.full:
            await self._changed.wait()

    @contextlib.contextmanager
    def paced(self, pace: Callable[[bool], None]) -> Iterator[None]:
        """Within it `pace` is called with whether to read on (True) or to stop."""
        self._pace = pace
        try:
            pace(not self.full)
            yield
        finally:
            self._pace = None

    @contextlib.contextmanager
    def ending(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Within it `deadline` is over as soon as the reader has left."""
        self._deadline = deadline
        try:
            self._hurry()
            yield
        finally:
            self._deadline = None

    def need_reader(self) -> None:
        """Before the command begins: raises Closed where no caller waits for it any more."""
        if self.left:
            raise Closed(
                "the caller left before the command began",
                hint="send it again, and keep the connection open until it has ended",
            )

    def open(self) -> None:
        """Take all that follows, which is little, whatever the reader does."""
        was_full, self._limit = self.full, sys.maxsize
        self._make_room(was_full)

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._report()

    # ----------------------------------------------------------------- the reader's side

    async def get(self) -> tuple[Name, bytes] | None:
        """The next part; None when nothing follows."""
        while not self._parts:
            if self._ended:
                return None
            await self._changed.wait()
        stream, data = self._parts.popleft()
        was_full = self.full
        self._size -= len(data)
        self._make_room(was_full)
        return stream, data

    def leave(self) -> None:
        """The reader takes no more: what comes is dropped, and the command is to end."""
        self.left, was_full = True, self.full
        self._parts.clear()
        self._size = 0
        self._make_room(was_full)
        self._hurry()

    # ----------------------------------------------------------------- both

    def _make_room(self, was_full: bool) -> None:
        if was_full and not self.full:
            self._report()
            if self._pace is not None:
                self._pace(True)

    def _hurry(self) -> None:
        if self.left and self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(0)

    def _report(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
