"""What an answer costs the server that gives it, measured where requests are routed. Pure: who routes tells the time.

Owns: the times and tokens of one answer on one server, and what the server is busy with meanwhile. Does not own: what
is learned of it (rollout.decide.engines.affinity).
"""

from __future__ import annotations

from typing import Protocol

from rollout.decide.engines.affinity import Answered


class Busy(Protocol):
    """A server, as whoever routes requests to it keeps its books."""

    @property
    def hardware(self) -> str: ...

    load: int  # requests
    readers: int  # of these, that have not got a token yet
    reading: int  # tokens of their prompts that it did not hold


class Measured:
    """``each = Measured(server, "calculator", new=9, read=99, now=now)``; `piece` with each piece; `leave` at last."""

    def __init__(self, server: Busy, kind: str, *, new: int, read: int, now: float):
        """`read`: tokens of its prompt that the server does not hold; `new`: that no server holds."""
        self.server, self.kind, self.new, self.read = server, kind, new, read
        self._asked, self._ahead, self._beside = now, server.reading, server.load - 1
        self._first_at = self._last = now
        self._first = self._sampled = 0
        self._reads = True
        server.readers += 1
        server.reading += read

    def piece(self, tokens: int, now: float) -> None:
        """So many tokens came; 0: it begins to sample."""
        self._last = now
        if self._reads:
            self._first, self._first_at, self._beside = tokens, now, self.server.load - 1
            self._was_read()
        self._sampled += tokens

    def leave(self) -> None:
        """The server is not busy with it any more."""
        if self._reads:
            self._was_read()

    @property
    def answered(self) -> Answered:
        """Of a whole answer."""
        return Answered(
            kind=self.kind,
            hardware=self.server.hardware,
            new=self.new,
            read=self.read,
            ahead=self._ahead,
            read_s=self._first_at - self._asked,
            first=self._first,
            sampled=self._sampled,
            sampled_s=self._last - self._first_at,
            beside=(self._beside + self.server.load - 1) / 2,
        )

    def _was_read(self) -> None:
        self._reads = False
        self.server.readers -= 1
        self.server.reading -= self.read
