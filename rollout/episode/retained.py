"""`RetainedStates`: sandboxes of finished trajectories, kept for their checkpoints.

Guarantee: a state that the book names can be forked until it is dropped, unless its sandbox is removed by hand; then
its users get an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection
from typing import Any, Protocol

from rollout.decide.keeping import KeepPlan, RetainedRow, surplus
from rollout.messages import Trajectory
from rollout.store.disk import DiskThread
from rollout.store.retained import RetainedLedger, Visit
from sandbox import Sandbox
from sandbox.errors import PagurusError, SandboxDead

log = logging.getLogger("pagurus.rollout")


class KeepingHost(Protocol):
    """What kept states need of a host: `rollout.labels.LabellingClient`."""

    async def keep(self, sandbox: Sandbox) -> None:
        """From now on no sweep of the run's own sandboxes removes it."""

    async def get(self, sandbox: str) -> Any: ...

    async def remove(self, left: Collection[str]) -> int: ...


class RetainedStates:
    """``RetainedStates(host, RetainedLedger(directory), disk, KeepPlan(trajectories=16))``"""

    def __init__(
        self, host: KeepingHost, ledger: RetainedLedger, disk: DiskThread, plan: KeepPlan, *, branching: bool = False
    ):
        self._host, self.ledger, self._disk, self._plan = host, ledger, disk, plan
        self._branching = branching  # groups on their way need all of theirs
        self._needed: set[str] = set()
        self._trimming = asyncio.Lock()

    @property
    def target(self) -> bool:
        return self._branching or self._plan.trajectories > 0

    def need(self, prompt: str) -> None:
        """Its group is on its way."""
        if self._branching:
            self._needed.add(prompt)

    async def release(self, prompt: str) -> None:
        """Its group has ended."""
        self._needed.discard(prompt)
        await self.trim()

    async def keep(self, trajectory: Trajectory, sandbox: Sandbox, visits: list[Visit]) -> bool:
        """Whether it is kept. Where the host refuses it is not, and nothing else depends on it."""
        final = trajectory.final is not None and trajectory.final.checkpoint  # it can be scored again
        if not self.target or not trajectory.scored or not (visits or final):
            return False
        try:
            with contextlib.suppress(SandboxDead):  # where it waits to be scored it runs no more
                await sandbox.kill()
            row = RetainedRow(trajectory.prompt, trajectory.index, trajectory.start, sandbox.id, time.time(), 0)
            await self._disk.do(self.ledger.add, row, visits)
            await self._host.keep(sandbox)
        except PagurusError as error:
            log.warning("the states of %s/%d are not kept: %s", trajectory.prompt, trajectory.index, error)
            return False
        await self.trim()
        return True

    async def trim(self) -> None:
        """Removes what is over the plan."""
        async with self._trimming:
            for row in await self._disk.do(self.ledger.rows):
                if not row.bytes:
                    await self._measure(row)
            for row in surplus(await self._disk.do(self.ledger.rows), self._plan, self._needed):
                await self._drop(row)

    async def _measure(self, row: RetainedRow) -> None:
        """What its checkpoints take is known once they are durable, which the end of an episode does not wait for."""
        try:
            tree = await (await self._host.get(row.sandbox)).tree()
        except PagurusError:  # gone by hand, or no host: its visitors get an error
            return
        size = sum(info.stored_bytes for info in tree if info.sandbox == row.sandbox)
        await self._disk.do(self.ledger.measured, row, size)

    async def drop(self, prompt: str, member: int) -> None:
        """The states of one trajectory cannot be forked any more, or shall not."""
        for row in await self._disk.do(self.ledger.rows):
            if (row.prompt, row.member) == (prompt, member):
                await self._drop(row)

    async def _drop(self, row: RetainedRow) -> None:
        try:
            await self._host.remove([row.sandbox])
        except PagurusError as error:  # the daemon removes it when it was not used for long enough
            log.warning("%s of %s/%d was not removed: %s", row.sandbox, row.prompt, row.member, error)
        await self._disk.do(self.ledger.drop, row.prompt, row.member)
