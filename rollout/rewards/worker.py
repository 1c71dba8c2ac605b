"""A process that runs reward functions, one at a time: ``python -m rollout.rewards.worker FD``."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from rollout.rewards import wire
from rollout.rewards.messages import Final, ForkCall, ForkReply, RewardMessage, ScorerFailed, ScoringRequest, TooSlow
from rollout.rewards.registry import find
from sandbox.errors import from_body
from sandbox.messages import ExecResult

PR_SET_PDEATHSIG = 1
MAX_ERROR = 2000  # characters of an error that are passed on


class ForkHandle:
    """What a function sees of the fork: `exec` and `files`, as the SDK has them."""

    def __init__(self, link: PoolConnection):
        self.link = link
        self.files = ForkFiles(link)

    async def exec(self, command: str | list[str], *, timeout: float | None = 60.0, **options: Any) -> ExecResult:
        if unknown := set(options) - {"cwd", "env", "user", "stdin"}:
            raise TypeError(f"exec of a scorer has no {', '.join(sorted(unknown))}")
        reported = await self.link.call(ForkCall(what="exec", command=command, timeout=timeout, **options))
        if reported.result is None:
            raise ScorerFailed("the pool did not say what the command did")
        return reported.result


class ForkFiles:
    def __init__(self, link: PoolConnection):
        self.link = link

    async def read(self, path: str) -> bytes:
        return (await self.link.call(ForkCall(what="read", path=path))).data

    async def write(self, path: str, data: bytes | str) -> None:
        raw = data.encode() if isinstance(data, str) else data
        await self.link.call(ForkCall(what="write", path=path, data=raw))


class PoolConnection:
    """The connection to the pool."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self._turn = asyncio.Lock()  # one call at a time

    async def call(self, call: ForkCall) -> ForkReply:
        async with self._turn:
            await wire.write(self.writer, RewardMessage(call=call))
            answered = (await wire.read(self.reader)).answer
        if answered is None:
            raise ScorerFailed("the pool said nothing")
        if answered.error is not None:
            raise from_body(answered.error)
        return answered


Answer = Callable[[PoolConnection, ScoringRequest], Awaitable[RewardMessage]]


async def serve(link: PoolConnection, answer: Answer | None = None) -> None:
    """Score what is requested until the pool is gone. `answer`: else by the functions that are named."""
    await wire.write(link.writer, RewardMessage(ready=True))
    while True:
        try:
            request = (await wire.read(link.reader)).request
        except ScorerFailed:
            return
        if request is not None:
            await wire.write(link.writer, await (answer or score)(link, request))


async def begin(link: PoolConnection, request: ScoringRequest) -> None:
    """From here on the time of the try counts."""
    await wire.write(link.writer, RewardMessage(id=request.id, begun=True))


async def score(link: PoolConnection, request: ScoringRequest) -> RewardMessage:
    try:
        function = await asyncio.to_thread(find, request.scoring)
        await begin(link, request)
        final = Final(request, ForkHandle(link) if request.scoring.forks else None)
        return RewardMessage(id=request.id, score=await function.run(final))
    except TooSlow as error:
        return RewardMessage(id=request.id, slow=True, error=str(error))
    except Exception as error:  # noqa: BLE001 - a user's function: whatever it raises is reported
        return RewardMessage(id=request.id, error=f"{type(error).__name__}: {error}"[:MAX_ERROR])


async def connected(descriptor: int, answer: Answer | None = None) -> None:
    link = PoolConnection(*await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=wire.MAX_FRAME))
    await serve(link, answer)


def main(descriptor: int, answer: Answer | None = None) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(descriptor, False)  # what a function starts does not get it
    asyncio.run(connected(descriptor, answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
