"""The turns of a run that shares its machines: its rollout and its trainer ask before they work there.

Guarantee: `begin` returns when the machines are this run's, however often the coordinator dies; a phase that runs
notices nothing of that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from pathlib import Path

import msgspec

from rollout.plan import SharePlan
from rollout.store import stages
from sandbox.errors import PagurusError
from sandbox.messages.cluster import JobShape, PhaseAnswer, PhaseKind, PhaseLeave, PhaseRequest
from sandbox.sdk.transport import Transport

WAIT = 5.0  # seconds of one call
ROLES: dict[PhaseKind, str] = {"rollout": "rollout", "train": "trainer"}  # who asks
BEAT = 5.0  # seconds between two messages that a phase continues
log = logging.getLogger("pagurus.rollout.phases")


class PhaseClient(Transport):
    """``await phases.begin("rollout", version)``: ends the run's phase before, and waits for its turn."""

    def __init__(self, plan: SharePlan, run: Path):
        existing = os.environ
        token, ca = (existing.get(f"PAGURUS_{name}") or None for name in ("TOKEN", "CA"))
        super().__init__(plan.at or existing.get("PAGURUS_HOST") or None, token=token, ca=ca, timeout=math.inf)
        self._met = True  # there is one: whose address would it be else?
        self._job, self._roles = str(run), run / "roles"
        self._shape = msgspec.convert(plan, JobShape, from_attributes=True)
        self._beat: asyncio.Task[None] | None = None
        self.waits = ""  # for what, as long as it waits

    async def begin(self, kind: PhaseKind, number: int) -> None:
        """Returns at once when a later phase was requested since: then nothing is left to do in this one."""
        await self._still()
        request = PhaseRequest(job=self._job, kind=kind, number=number, shape=self._shape, wait=WAIT)
        self.waits = "the coordinator"
        stages.note(self._roles, ROLES[kind], stages.REQUESTS)
        while (answer := await self._request(request)).state == "waiting":
            self.waits = f"its turn: {answer.reason}"
        self.waits = ""
        stages.note(self._roles, ROLES[kind], stages.TURN)
        if answer.state == "begun":
            request.wait = 0.0
            self._beat = asyncio.create_task(self._go_on(request), name=f"{kind} {number} goes on")

    async def leave(self) -> None:
        """The run is over."""
        await self._still()
        await self.call("POST", "/v1/phases/leave", dict, PhaseLeave(job=self._job), keyed=True)

    async def close(self) -> None:
        await self._still()
        await super().close()

    async def _request(self, request: PhaseRequest) -> PhaseAnswer:
        return await self.call("POST", "/v1/phases", PhaseAnswer, request, keyed=True)

    async def _go_on(self, request: PhaseRequest) -> None:
        """Says so until the run's next phase is requested."""
        while True:
            await asyncio.sleep(BEAT)
            try:
                if (await self._request(request)).state == "past":
                    return
            except PagurusError as error:  # of a coordinator that is being replaced by another: the phase continues
                log.warning("the coordinator could not be notified that a phase continues: %s", error)

    async def _still(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.wait([self._beat])
            self._beat = None
