"""One answer of a model, from its first byte to the agent.

::

    upstream ──▶ pump ──▶ Answer ──▶ deliver ──▶ agent
                  │         ▲ whole: the journal has it
                  └─ waits while an agent that takes it as it comes is WINDOW behind

Guarantee: each event of a stream goes to the agent when it comes, up to the first after which the agent may act
(:mod:`daemon.gateway.events`). That one, and what follows, only after the journal has the whole answer, so an answer
that an agent acted upon can be given again. An answer that breaks off never looks whole: its connection is cut.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from daemon.auth.shares import CallShare
from daemon.gateway import wire
from daemon.gateway.events import EventGate
from daemon.gateway.journal import RecordedAnswer
from daemon.gateway.upstream import UpstreamResponse
from sandbox.errors import EngineFailed, PagurusError

WINDOW = 1 << 20  # bytes that an upstream may be ahead of a reader
STALL = 300.0  # seconds for which a reader may take nothing


@dataclass
class _Reader:
    """One who waits for an answer."""

    request: web.BaseRequest
    given: int = 0  # bytes that it has taken


class UpstreamAnswer:
    """An answer as it comes. One pump fills it; of each sandbox that waits for it (forks do) one reader takes it."""

    def __init__(self, memory: CallShare) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []  # that may be given out
        self.size = 0  # of these and of what waits
        self._free = 0  # of a stream's bytes, those that may be given out
        self._gate: EventGate | None = None  # of a stream
        self._memory = memory
        self.error: PagurusError | None = None
        self.complete = False  # all of it is here and journalled
        self._readers: dict[int, _Reader] = {}  # by identity: requests cannot be hashed
        self._changed = asyncio.Event()

    # ----------------------------------------------------------------- filling

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        if self.streams:
            self._gate = EventGate()
        self._report()

    async def add(self, chunk: bytes) -> None:
        """Take a chunk; returns when there is room for the next one."""
        self.size += len(chunk)
        if self.size > wire.MAX_ANSWER:
            raise EngineFailed(
                f"the answer is longer than {wire.MAX_ANSWER} bytes", hint="limit max_tokens of the request"
            )
        self._memory.add(len(chunk))
        free = chunk if self._gate is None else self._gate.feed(chunk)
        if free:
            self.chunks.append(free)
            self._free += len(free)
            self._report()
        while self._ahead() > WINDOW:
            await self._change()

    def end(self) -> None:
        if waiting := self._waiting():
            self.chunks.append(waiting)
        self._gate, self.complete = None, True
        self._changes()

    def fail(self, error: PagurusError) -> None:
        self.error = error
        self._changes()

    @classmethod
    def of(cls, recorded: RecordedAnswer, memory: CallShare) -> UpstreamAnswer:
        """An answer from the record."""
        answer = cls(memory)
        memory.add(len(recorded.body))
        answer.begin(recorded.status, recorded.headers)
        answer.chunks, answer.size = [recorded.body], len(recorded.body)
        answer._gate, answer.complete = None, True
        return answer

    def recorded(self) -> RecordedAnswer:
        return RecordedAnswer(self.status, self.headers, b"".join((*self.chunks, self._waiting())))

    def _waiting(self) -> bytes:
        return b"" if self._gate is None else self._gate.waiting()

    def _ahead(self) -> int:
        """Bytes of a stream that no reader has taken yet, though they may be; 0 without a reader."""
        taken = [reader.given for reader in self._readers.values() if self.streams and is_open(reader.request)]
        return self._free - max(taken) if taken else 0

    @property
    def streams(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def ended(self) -> bool:
        return self.complete or self.error is not None

    # ----------------------------------------------------------------- reading

    async def head(self) -> None:
        """Returns when status and headers are known. Raises why there is no answer."""
        while not self.status:
            if self.error is not None:
                raise self.error
            await self._change()

    async def all(self) -> None:
        """Returns when the answer is whole. Raises why it is not."""
        while not self.complete:
            if self.error is not None:
                raise self.error
            await self._change()

    def join(self, request: web.BaseRequest) -> None:
        """`request` will take it from the beginning."""
        self._readers[id(request)] = _Reader(request)

    def leave(self, request: web.BaseRequest) -> None:
        self._readers.pop(id(request), None)
        self._changes()

    async def chunk(self, index: int, request: web.BaseRequest) -> bytes | None:
        """The chunk `index`, None at the end."""
        while True:
            if self.error is not None:
                raise self.error
            if index < len(self.chunks):
                if (reader := self._readers.get(id(request))) is not None:
                    reader.given += len(self.chunks[index])
                    self._report()
                return self.chunks[index]
            if self.complete:
                return None
            await self._change()

    def _changes(self) -> None:
        """After its end or a reader's. Once it has ended and has no reader, it takes no memory."""
        if self.ended and not self._readers:
            self._memory.free()
        self._report()

    def _report(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        """Something changed, or a second has passed: a reader may have gone silently."""
        try:
            async with asyncio.timeout(1.0):
                await self._changed.wait()
        except TimeoutError:
            return


def is_open(request: web.BaseRequest) -> bool:
    transport = request.transport
    return transport is not None and not transport.is_closing()


def cut(request: web.BaseRequest) -> None:
    """Break the connection, so that a partial answer is not taken for a complete one."""
    if request.transport is not None:
        request.transport.abort()


async def pump(answer: UpstreamAnswer, response: UpstreamResponse) -> None:
    """Fill `answer` from `response`; the caller ends it. Errors of the upstream are the caller's."""
    answer.begin(response.status, response.headers)
    async for chunk in response.chunks():
        await answer.add(chunk)


async def deliver(answer: UpstreamAnswer, request: web.BaseRequest, extra: dict[str, str]) -> web.StreamResponse | None:
    """Give `answer` to the agent. None: its connection broke before it had all of it.

    Raises the answer's error only while nothing has been sent.
    """
    await answer.head()
    if not answer.streams:
        await answer.all()
    response = web.StreamResponse(status=answer.status, headers={**answer.headers, **extra})
    if not answer.streams:
        response.content_length = answer.size
    try:
        await response.prepare(request)
        index = 0
        while (chunk := await answer.chunk(index, request)) is not None:
            index += 1
            async with asyncio.timeout(STALL):
                await response.write(chunk)
        if not is_open(request):
            return None
        await response.write_eof()
    except (ConnectionError, TimeoutError):
        cut(request)
        return None
    except PagurusError:  # the model broke off after its head had been passed on
        cut(request)
        return None
    return response
