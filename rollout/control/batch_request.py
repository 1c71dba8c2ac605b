"""The trainer's question for a batch: one at a time, answered once or refused."""

from __future__ import annotations

import asyncio
import time

from rollout.messages import Batch


class NoMorePrompts(Exception):
    """Every prompt was trained or given up."""


class PendingBatch:
    """``await requested.request()`` by the trainer; ``requested.give(batch)`` or ``requested.refuse(error)`` when there
    is an answer."""

    def __init__(self) -> None:
        self._question: asyncio.Future[Batch] | None = None
        self.since: float | None = None  # seconds since the epoch; None: no request

    @property
    def open(self) -> bool:
        return self._question is not None and not self._question.done()

    def request(self) -> asyncio.Future[Batch]:
        """A request from now on. An earlier requester was replaced, and has been refused."""
        question = self._question = asyncio.get_running_loop().create_future()
        self.since = time.time()
        question.add_done_callback(self._ended)
        return question

    def give(self, batch: Batch) -> None:
        if self._question is not None and self.open:
            self._question.set_result(batch)

    def refuse(self, error: BaseException) -> None:
        if self._question is not None and self.open:
            self._question.set_exception(error)

    def cancel(self) -> None:
        if self._question is not None:
            self._question.cancel()

    def _ended(self, question: asyncio.Future[Batch]) -> None:
        if self._question is question:
            self._question = self.since = None
