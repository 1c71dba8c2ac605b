"""`RolloutClient`: a rollout as the trainer sees it, in this process's words, wherever it runs.

Guarantee: each call is carried out once, however often its connection broke; a batch arrives with the samples that the
store has. A trainer that was replaced gets `Conflict` from every call.
"""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from rollout.engine import tls
from rollout.engine.client import Sampling
from rollout.messages import Batch, Group, Trajectory
from rollout.service import protocol as wire
from rollout.store.samples import Fence, unpacked
from sandbox.errors import Closed, NoDaemon, NotFound
from sandbox.sdk.transport import Transport

T = TypeVar("T")
TIMEOUT = 300.0  # seconds for which a rollout may be away


class RolloutClient(Transport):
    """``async with RolloutClient.of(run) as rollout: await rollout.open(step=0)``; a URL with token for other hosts."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        ca: str | Path | ssl.SSLContext | None = None,
        timeout: float = TIMEOUT,
        directory: int | None = None,
    ):
        super().__init__(address, token=token, ca=ca, timeout=timeout)
        self._met = True  # it is started together with us: the first call waits for it like any other
        self._directory = directory
        self._reported: Path | None = None  # a file that says where it is
        self._fence: Fence | None = None
        self.step = 0
        self.last: wire.BatchReference | None = None  # the batch that `next_batch` gave

    @classmethod
    def of(cls, run: Path, **options: float) -> RolloutClient:
        """The rollout of a run directory on this host. A Unix socket's name may have 107 bytes; a run directory's
        more."""
        roles = run / "roles"
        roles.mkdir(exist_ok=True)
        directory = os.open(roles, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return cls(f"/proc/self/fd/{directory}/{wire.SOCKET}", directory=directory, **options)  # type: ignore[arg-type]

    @classmethod
    def elsewhere(cls, run: Path) -> RolloutClient:
        """The rollout of a run directory on whichever machine it is. Each call goes to where it is by then."""
        made = cls("https://rollout", ca=tls.calling(tls.directory_of(run)))
        made._reported = run / "roles" / wire.ADDRESS
        return made

    def _where(self) -> str:
        if self._reported is None:
            return super()._where()
        try:
            return self._reported.read_text()
        except FileNotFoundError:
            raise self._unreached(OSError(errno.ENOENT, "it has not begun")) from None

    async def close(self) -> None:
        await super().close()
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    @property
    def fence(self) -> Fence:
        if self._fence is None:
            raise Closed("this trainer was not opened", hint="call open(step=...) first")
        return self._fence

    async def open(self, step: int) -> None:
        """Become the trainer, after so many saved steps."""
        self._fence = await self._request(wire.OpenTrainer(step=step), Fence)
        self.step = step

    async def publish(self, ref: wire.PublishedVersion) -> None:
        """Have the engines serve this version, when they can. Returns as soon as that is written down."""
        await self._request(wire.Publish(fence=self.fence, ref=ref), wire.Done)

    async def next_batch(self) -> Batch:
        """The batch of the next step, as it was first handed out."""
        self.last = await self._request(wire.Take(fence=self.fence, step=self.step), wire.BatchReference)
        return await self._fetched(self.last)

    async def complete(self, without: Collection[str] = ()) -> Batch:
        """Groups that wait for the next batch, but `without`."""
        return await self._fetched(
            await self._request(wire.Complete(fence=self.fence, without=list(without)), wire.BatchReference)
        )

    async def consumed(self, batch: Batch, *, ess: float | None = None) -> None:
        """The step on this batch is saved. `ess`: effective sample size, as a share, where it is known."""
        await self._request(wire.Ack(fence=self.fence, step=batch.step, ess=ess), wire.Done)
        self.step = batch.step + 1

    async def evaluate(
        self, seeds: Sequence[int], *, last: bool = False, sampling: Sampling | None = None, samples: int = 1
    ) -> list[Trajectory]:
        """Held-out episodes. One that a rollout's death ended is played from the beginning."""
        request = wire.Evaluate(fence=self.fence, seeds=list(seeds), last=last, sampling=sampling, samples=samples)
        return (await self._request(request, wire.EvaluationResult)).trajectories

    async def finish(self) -> wire.RolloutCounters:
        """End all, remove all sandboxes."""
        return await self._request(wire.FinishRun(fence=self.fence), wire.RolloutCounters)

    async def counts(self) -> wire.RolloutCounters:
        return await self._request(wire.Count(), wire.RolloutCounters)

    async def _fetched(self, taken: wire.BatchReference) -> Batch:
        groups = []
        for named in taken.groups:
            payloads = (await self._request(named, wire.Payloads)).samples
            samples = [unpacked(payload) for payload in payloads]
            if [sample.index for sample in samples] != named.members:
                raise NotFound(f"samples of {named.prompt} are missing", hint="`pagurus rollouts show RUN` lists them")
            groups.append(Group(prompt=named.prompt, seed=named.seed, trajectories=samples))
        return Batch(version=taken.version, groups=groups, step=taken.step, oldest=taken.oldest)

    async def _request(self, body: msgspec.Struct, answer: type[T]) -> T:
        return await self.call("POST", f"/{wire.method(type(body))}", answer, body, keyed=True)

    def _unreached(self, error: OSError) -> NoDaemon:
        why = "nothing is there" if error.errno == errno.ENOENT else error.strerror or str(error)
        return NoDaemon(f"the rollout of this run does not answer: {why}", hint="`pagurus roles RUN` shows it")
