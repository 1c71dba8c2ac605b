"""The log of an engine that is co-located with rollouts: what it saw and decided before each step, and what that step
took.

Also loaded inside vLLM. Guarantee: the whole lines of a killed engine's file can be read; the newest may be missing.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout.decide.engines.colocation import Event
from rollout.decide.engines.headroom import Budget

PATTERN = "steps-*.jsonl"


class StepLog:
    """``Colocation(budget, log=StepLog(directory, budget).append)``. The first line is the promise.

    A thread writes: where a disk is busy that takes seconds, for which no step waits.
    """

    def __init__(self, directory: Path, budget: Budget):
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / PATTERN.replace("*", str(os.getpid()))).open("wb")
        self._events: queue.SimpleQueue[msgspec.Struct | None] = queue.SimpleQueue()
        self._events.put(budget)
        self._thread = threading.Thread(target=self._write, name="step log", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> None:
        self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def _write(self) -> None:
        encoder = msgspec.json.Encoder()
        with self._file:
            while (item := self._events.get()) is not None:
                self._file.write(encoder.encode(item) + b"\n")
                if self._events.empty():
                    self._file.flush()


def read(path: Path) -> tuple[Budget, Iterator[Event]]:
    """The promise, and what came after."""
    budget, *events = path.read_bytes().split(b"\n")[:-1]
    return msgspec.json.decode(budget, type=Budget), map(msgspec.json.Decoder(Event).decode, events)
