"""The one thread in which the embedded engine computes, and what the event loop asks of it.

Guarantee: the event loop never computes and the engine thread never waits for the network; commands (add, abort, pause,
apply) take effect between two steps. An error inside a step is passed to `fatal`, and ends the thread.

::

    handler ──call(fn)──▶ queue ──▶ engine thread: run commands, then one step ──▶ finished requests ──▶ handler
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec

from rollout.engine import protocol as wire
from rollout.engine.embedded.core import Core, SamplingSequence
from sandbox.errors import PagurusError

T = TypeVar("T")


class Progress(msgspec.Struct):
    """What is new of a request, and all its spans."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[wire.VersionSpan]
    finish: str | None

    @classmethod
    def of(cls, request: SamplingSequence) -> Progress:
        spans = [wire.VersionSpan(span.version, span.start, span.end) for span in request.spans]
        reported = request.reported
        return cls(request.tokens[request.prompt + reported :], request.logprobs[reported:], spans, request.finish)


class EngineThread:
    """Runs `Core` in one thread. `await call(fn)` runs fn(core) there, between steps."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop, fatal: Callable[[BaseException], None]):
        self.core = core
        self.paused = False
        self._loop = loop
        self._fatal = fatal
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finished: dict[str, asyncio.Future[SamplingSequence]] = {}
        self._streams: dict[SamplingSequence, asyncio.Queue[Progress]] = {}  # changed by the engine thread alone
        self._idle: list[asyncio.Future[None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[Core], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            try:
                result = function(self.core)
            except (ValueError, OSError, PagurusError) as error:
                self._loop.call_soon_threadsafe(fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_resolve, future, result)

        self._commands.put(command)
        return await future

    async def run(self, request: SamplingSequence) -> SamplingSequence:
        """The request when it has finished. Cancelling this aborts it."""
        future: asyncio.Future[SamplingSequence] = self._loop.create_future()
        self._finished[request.id] = future
        try:
            await self.call(lambda core: core.add(request))
            return await future
        finally:
            self._finished.pop(request.id, None)
            if request.finish is None:  # the client went away, or the request was refused
                self._commands.put(lambda: self._abort_silently(request))

    async def stream(self, request: SamplingSequence) -> AsyncGenerator[Progress, None]:
        """The request as it grows, to its end. Closing this aborts it."""
        progress: asyncio.Queue[Progress] = asyncio.Queue()

        def begin(core: Core) -> None:
            core.add(request)
            self._streams[request] = progress

        try:
            await self.call(begin)
            while True:
                grown = await progress.get()
                yield grown
                if grown.finish is not None:
                    return
        finally:
            if request.finish is None:
                self._commands.put(lambda: self._abort_silently(request))
            self._commands.put(lambda: self._forget(request))

    async def abort(self, ids: list[str]) -> int:
        aborted = await self.call(lambda core: core.abort(ids))
        self._deliver(aborted)
        return len(aborted)

    async def pause(self, mode: wire.PauseMode) -> None:
        if mode == "abort":
            await self.abort([])
        if mode == "wait":
            idle: asyncio.Future[None] = self._loop.create_future()
            await self.call(lambda core: self._wait_idle(core, idle))
            await idle
        await self.call(lambda core: setattr(self, "paused", True))

    async def resume(self) -> None:
        await self.call(lambda core: setattr(self, "paused", False))

    def close(self) -> None:
        self._closing = True
        self._commands.put(lambda: None)
        self._thread.join()

    def _wait_idle(self, core: Core, idle: asyncio.Future[None]) -> None:
        if core.scheduler.idle or self.paused:
            self._loop.call_soon_threadsafe(_resolve, idle, None)
        else:
            self._idle.append(idle)

    def _abort_silently(self, request: SamplingSequence) -> None:
        if self.core.requests.get(request.id) is request:
            self.core.abort([request.id])

    def _run(self) -> None:
        core = self.core
        try:
            while not self._closing:
                must_wait = self.paused or core.broken is not None or core.scheduler.idle
                self._drain(block=must_wait)
                if self.paused or core.broken is not None or core.scheduler.idle:
                    continue
                started = time.monotonic()
                finished = core.step()
                core.statistics.busy_s += time.monotonic() - started
                self._progress()  # who watches an answer grow is notified first
                if finished:
                    self._loop.call_soon_threadsafe(self._deliver, finished)
                if core.scheduler.idle:
                    for idle in self._idle:
                        self._loop.call_soon_threadsafe(_resolve, idle, None)
                    self._idle.clear()
        except BaseException as error:  # noqa: BLE001 - whatever broke the core must end the process, not the thread
            self._loop.call_soon_threadsafe(self._fatal, error)

    def _drain(self, *, block: bool) -> None:
        try:
            self._commands.get(block=block)()
            while True:
                self._commands.get(block=False)()
        except queue.Empty:
            pass
        if any(request.finish is not None for request in self._streams):
            self._progress()  # what a command ended

    def _forget(self, request: SamplingSequence) -> None:
        self._streams.pop(request, None)

    def _progress(self) -> None:
        """Sends the streams what is new."""
        news = []
        for request, progress in list(self._streams.items()):
            if len(request.logprobs) > request.reported or request.finish is not None:
                news.append((progress, Progress.of(request)))
                request.reported = len(request.logprobs)
            if request.finish is not None:
                del self._streams[request]
        if news:
            self._loop.call_soon_threadsafe(_report, news)

    def _deliver(self, requests: list[SamplingSequence]) -> None:
        for request in requests:
            future = self._finished.get(request.id)
            if future is not None:
                _resolve(future, request)


def _report(news: list[tuple[asyncio.Queue[Progress], Progress]]) -> None:
    for progress, grown in news:
        progress.put_nowait(grown)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
