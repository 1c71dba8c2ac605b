"""Groups as trees, and states that outlive their episodes: what the controller needs of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig
from rollout.control import groups
from rollout.decide.blame import Cause, EpisodePhase
from rollout.decide.view import At
from rollout.episode.origin import Origin
from rollout.episode.retained import RetainedStates
from rollout.messages import Trajectory
from rollout.store.disk import DiskThread
from rollout.store.retained import RetainedLedger
from rollout.store.samples import SampleStore
from sandbox.errors import NotFound


class BranchTrees:
    """``origin = await trees.origin("p000012", At(member=4, start=0, turn=7))``"""

    def __init__(self, host: Any, store: SampleStore, disk: DiskThread, directory: Path, config: RolloutConfig):
        self._store, self._disk, self._on = store, disk, config.branching is not None
        self._ledger = RetainedLedger(directory)
        self.retained = RetainedStates(host, self._ledger, disk, config.visit, branching=self._on)

    @property
    def ledger(self) -> RetainedLedger | None:
        """Of the states that groups branch from; None where they do not."""
        return self._ledger if self._on else None

    def sandboxes(self) -> set[str]:
        """Those that are kept."""
        return {row.sandbox for row in self._ledger.rows()}

    async def origin(self, prompt: str, at: At) -> Origin:
        """The state that a branch begins in. Raises NotFound when it is gone."""

        def read() -> Origin:
            trajectory = self._store.sample(prompt, at.member)
            if trajectory.start != at.start:
                raise NotFound(
                    f"attempt {at.start} of {prompt}/{at.member} was replaced",
                    hint="`pagurus rollouts show RUN` lists the attempts there are",
                )
            return Origin(trajectory, self._ledger.visit(prompt, at.member, at.start, at.turn))

        return await self._disk.do(read)

    async def ended(self, slot: groups.Slot, trajectory: Trajectory | None) -> None:
        """Note what branches of it need to know."""
        if self._on and trajectory is not None and trajectory.scored:
            await self._disk.do(groups.note_played, slot, trajectory, self._ledger)

    async def lost(self, group: groups.OpenGroup, at: At) -> None:
        """No fork of this member's states is possible any more."""
        await self.retained.drop(group.lease.prompt, at.member)
        parent = group.members[at.member]
        if parent.played is not None and parent.played.start == at.start:
            parent.played = groups.without_states(parent.played)

    def close(self) -> None:
        self._ledger.close()


def gone(trajectory: Trajectory) -> bool:
    """Did it end because the state that it should begin in is gone?"""
    failure = trajectory.failure
    return failure is not None and (failure.phase, failure.cause) == (EpisodePhase.CREATE, Cause.DIED)
