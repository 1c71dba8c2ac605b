"""One attempt at a trajectory, from its start to the books that its end changes.

Guarantee: a scored trajectory is in the store before its member counts as ended; a failure is booked with its blame
(I10); an attempt that is cut off by its decision leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from rollout.chaos import Faults
from rollout.config import RolloutConfig
from rollout.control.groups import GroupCounts, OpenGroup, Slot
from rollout.control.refusals import Refusals
from rollout.control.trees import BranchTrees, gone
from rollout.decide.blame import Blame, Cause, EpisodePhase, TrajectoryFailure, blame
from rollout.decide.effects import judged
from rollout.episode.manager import EpisodeManager
from rollout.episode.spec import EpisodeSpec
from rollout.messages import Trajectory
from rollout.store.disk import DiskThread
from rollout.store.journal import Key, TurnJournal
from rollout.store.samples import Fence, SampleStore
from sandbox.errors import NotFound, PagurusError

log = logging.getLogger("pagurus.rollout")


@dataclass(kw_only=True)
class Attempts:
    """``task = create_task(attempts.play(group, member))``"""

    episodes: EpisodeManager
    store: SampleStore
    journal: TurnJournal
    fence: Fence
    disk: DiskThread
    trees: BranchTrees
    refusals: Refusals
    counts: GroupCounts
    config: RolloutConfig
    faults: Faults | None
    changed: asyncio.Event  # a member is another than before: there is something to decide

    async def play(self, group: OpenGroup, member: Slot) -> None:
        """One attempt at a trajectory, and its books."""
        prompt, since = group.lease.prompt, member.since
        spec = EpisodeSpec(prompt=prompt, seed=group.lease.seed, index=member.index, start=member.start)
        inject = None
        if self.faults is not None and not since:
            inject = self.faults.choose(prompt, member.index, member.start)
        self.counts.continued += bool(since)
        try:
            origin = None if member.at is None or since else await self.trees.origin(prompt, member.at)
            trajectory = await self.episodes.run(
                spec, self.config.sampling, since=since, origin=origin, inject=inject, into=member.trajectory
            )
            if trajectory.final is not None:
                member.scoring = True  # its place is free
                self.changed.set()
                await self.episodes.score(trajectory)
        except NotFound as error:  # the state that it should begin in: another is chosen
            await self._lose_origin(group, member, str(error))
            return
        except asyncio.CancelledError:
            if not self.episodes.leaving and spec.key not in self.episodes.parked:
                await asyncio.shield(self.disk.do(self.journal.forget, spec.key))
            if not member.why:
                raise
            self._finalize(member, trajectory=None)
            return
        await asyncio.shield(self._ended(group, member, trajectory, spec.key))

    async def forget(self, group: OpenGroup) -> None:
        """It ends here: those that were to continue and have not begun will not. Those that run forget themselves."""
        for member in group.members:
            if member.since and not member.ended and member.task is None:
                await self.disk.do(self.journal.forget, Key(group.lease.prompt, member.index, member.start))
                with contextlib.suppress(PagurusError):  # the run's sweep finds it by its label
                    await self.episodes.host.remove([member.since[-1].sandbox])

    async def _lose_origin(self, group: OpenGroup, member: Slot, why: str) -> None:
        """Its branches begin elsewhere from now on, and it too."""
        assert member.at is not None
        log.warning("no branch of %s/%d can begin: %s", group.lease.prompt, member.at.member, why)
        await self.trees.lost(group, member.at)
        self._finalize(member, None)

    async def _ended(self, group: OpenGroup, member: Slot, trajectory: Trajectory, key: Key) -> None:
        if trajectory.scored:
            trajectory.penalty, trajectory.masked = judged(trajectory, self.config.effects)
            trajectory.reward -= trajectory.penalty
            self.refusals.over("host")
            if trajectory.score is not None:
                self.refusals.over("scorer")
            try:
                await self.disk.do(self.store.put, trajectory, self.fence)
            except ValueError as error:  # a log-probability that is no number must never be learned from
                trajectory.status = "failed"
                trajectory.failure = TrajectoryFailure(
                    phase=EpisodePhase.GENERATE, cause=Cause.ENGINE, message=str(error)
                )
        self.counts.ledger(trajectory)
        await self.disk.do(self.journal.forget, key)
        failure = trajectory.failure
        if not trajectory.scored and failure is not None:
            group.reason = str(failure)
            log.warning("trajectory %s/%d failed: %s", key.prompt, key.member, failure)
            if blame(failure) is Blame.ENVIRONMENT:
                group.failures += 1
                await self.disk.do(self.store.failed, key.prompt, self.fence)
            else:
                self.counts.retried += 1
                if member.at is not None and gone(trajectory):
                    await self._lose_origin(group, member, str(failure))
                    return
                self.refusals.note(failure)
                member.starts += failure.phase not in (EpisodePhase.CREATE, EpisodePhase.GENERATE)
        await self.trees.ended(member, trajectory)
        self._finalize(member, trajectory)

    def _finalize(self, member: Slot, trajectory: Trajectory | None) -> None:
        member.ended = trajectory is not None and trajectory.scored
        member.oldest = trajectory.oldest if member.ended and trajectory is not None else None
        member.task, member.since, member.scoring = None, [], False
        member.start += 1
        self.changed.set()
