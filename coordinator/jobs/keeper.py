"""The jobs of a coordinator: what callers ask of them, and the head that does it, kept alive."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from coordinator.decide.cost import cost, so_far
from coordinator.decide.queue import total
from coordinator.jobs import tied
from coordinator.jobs.shape import parts_of
from coordinator.jobs.store import JobStore
from sandbox.errors import Invalid, NotFound, Unsupported
from sandbox.messages.cluster import JobInfo, JobRequest, Needs

AGAIN = 1.0  # seconds before a head that died is started again
PART = 1 << 20  # bytes of a log in one answer
log = logging.getLogger("pagurus.jobs")

P = ParamSpec("P")
T = TypeVar("T")
Quotas = Mapping[str, Mapping[str, float]]


def parse_quotas(given: list[str]) -> dict[str, dict[str, float]]:
    """``["CPU=8,GPU=1", "alice:GPU=4"]``: what owners may use at once; without a name, each of the others.

    >>> parse_quotas(["CPU=8,GPU=1", "alice:GPU=4"])
    {'': {'CPU': 8.0, 'GPU': 1.0}, 'alice': {'GPU': 4.0}}
    """
    result = {}
    for item in given:
        owner, _, amounts = item.rpartition(":")
        result[owner] = parse_needs(amounts)
    return result


def parse_needs(text: str) -> dict[str, float]:
    """``CPU=2,GPU=1``: amounts of resources, by Ray's names. Raises Invalid."""
    try:
        return {name: float(amount) for name, _, amount in (item.partition("=") for item in text.split(","))}
    except ValueError:
        raise Invalid(f"{text!r} are no amounts", hint="write them like CPU=2,GPU=1") from None


def parse_prices(given: list[str]) -> dict[str, float]:
    """``["GPU=2.5", "CPU=0.05"]``: what one of each costs in an hour. Raises Invalid.

    >>> parse_prices(["GPU=2.5", "CPU=0.05"])
    {'GPU': 2.5, 'CPU': 0.05}
    """
    result: dict[str, float] = {}
    for text in given:
        try:
            prices = msgspec.convert(parse_needs(text), Needs)
        except msgspec.ValidationError as error:
            raise Invalid(f"--price {text}: {error}", hint="write it like GPU=2.5") from None
        if twice := sorted(set(prices) & set(result)):
            raise Invalid(f"--price names {twice[0]} twice", hint="give one price of an hour for each resource")
        result |= prices
    return result


class Jobs:
    """See the module."""

    def __init__(
        self,
        directory: Path,
        *,
        ray: str = "",
        quotas: Quotas | None = None,
        prices: Mapping[str, float] | None = None,
    ) -> None:
        """`prices`: of an hour, by the names of what jobs need."""
        self._directory, self._ray, self._quotas, self._prices = directory, ray, quotas or {}, prices or {}
        self._store = JobStore(directory)
        self._lock = asyncio.Lock()  # one thread at a time
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """For as long as the coordinator lives. The head ends with it; jobs continue, and the next head adopts them."""
        while True:
            left = await self._do(self._store.unfinished)
            if not left:
                await self._wake.wait()
                self._wake.clear()
                continue
            status = await self._head()
            if status:
                log.warning("the head of the jobs ended with %d: it is started again", status)
                await asyncio.sleep(AGAIN)

    async def _head(self) -> int:
        argv = [
            sys.executable,
            "-m",
            "coordinator.jobs.head",
            str(self._directory),
            "--quotas",
            json.dumps(self._quotas),
        ]
        process = tied.begin([*argv, "--ray", self._ray])
        try:
            return await asyncio.to_thread(process.wait)
        finally:  # also when this is cancelled: the thread ends with the process
            process.terminate()

    async def submit(self, request: JobRequest, owner: str) -> JobInfo:
        if importlib.util.find_spec("ray") is None:
            raise Unsupported("jobs need Ray, which is not installed", hint='pip install "pagurus-runtime[cluster]"')
        if not request.run.startswith("/") or not await asyncio.to_thread((Path(request.run) / "plan.json").exists):
            raise NotFound(f"{request.run} is no run directory here", hint="`pagurus submit` makes one; share its disk")
        made = await self._do(self._store.submit, request, owner)
        self._wake.set()
        return self._priced(made)

    async def all(self) -> list[JobInfo]:
        return [self._priced(item) for item in await self._do(self._store.all)]

    async def job(self, id: str) -> JobInfo:
        return self._priced((await self._do(self._store.job, id)).reported())

    async def cancel(self, id: str) -> JobInfo:
        return self._priced(await self._do(self._store.cancel, id))

    async def _do(self, work: Callable[P, T], *values: P.args, **named: P.kwargs) -> T:
        """In a thread, one at a time: also one without a waiting caller ends before anything else is done."""
        async with self._lock:
            done = asyncio.ensure_future(asyncio.to_thread(work, *values, **named))
            try:
                return await asyncio.shield(done)
            finally:
                await asyncio.wait([done])

    def _priced(self, job: JobInfo) -> JobInfo:
        if self._prices:
            held = total(parts_of(job).values())
            job.cost = cost(so_far(job.started_at, job.ended_at, time.time()), held, self._prices)
        return job

    async def said(self, id: str, begin: int) -> bytes:
        """A part of what the run says, from that byte on; nothing at its end."""
        path = Path((await self.job(id)).run) / "run.log"

        def read() -> bytes:
            """What writes the run directory may have put a link, or a pipe without a writer, in its place."""
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
            except OSError as error:
                raise Invalid(
                    f"{path} cannot be read: {error.strerror}", hint="look at it where the job runs"
                ) from None
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise Invalid(f"{path} is no file", hint="look at it where the job runs")
                file.seek(begin)
                return file.read(PART)

        return await asyncio.to_thread(read)

    async def close(self) -> None:
        async with self._lock:
            self._store.close()
