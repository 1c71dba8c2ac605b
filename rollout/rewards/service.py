"""`RewardService`: the score of an ended episode, from a fork of its final state.

Guarantee: a reward is what the function said of this very state, within its bounds. A scorer that hangs, dies, raises
or says nonsense is tried again and then is a `ScorerFailed`, never a reward. Forks are gone when `score` returns.

::

    trajectory.final ─▶ in the book? ──yes──▶ score
                           │ no
                           └▶ slot ─▶ fork ─▶ worker | address ─▶ believed? ─▶ book ─▶ score
                               ▲                                     │ no
                               └───────────── next limit ◀───────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollout.decide import anchor
from rollout.messages import Trajectory
from rollout.rewards import registry
from rollout.rewards.messages import Score, ScoredTurn, ScorerFailed, Scoring, ScoringRequest, TooSlow
from rollout.rewards.pool import RewardModels, WorkerPool
from rollout.rewards.score_cache import ScoreLedger
from rollout.rewards.web import Functions
from rollout.rewards.weighted import combined
from sandbox import Sandbox
from sandbox.errors import PagurusError

log = logging.getLogger("pagurus.rollout")

PAUSE = 0.5  # seconds before a host that refused is tried again


class Forks(Protocol):
    """What the service needs of a host: `rollout.labels.LabellingClient`."""

    async def fork(self, checkpoint: str) -> Any:
        """One verified child."""


class RewardService:
    """``async with RewardService(host) as rewards: score = await rewards.score(trajectory)``"""

    def __init__(self, host: Forks, *, workers: int = 2, ledger: Path | None = None, log: Path | None = None):
        """`workers`: functions that run at once, each with a fork. `ledger`: where scores are kept."""
        self._host = host
        self._pool, self._web, self._models = WorkerPool(workers, log=log), Functions(), RewardModels(log=log)
        self._ledger = ScoreLedger(ledger) if ledger is not None else None
        self._anchors: dict[tuple[str, int], float] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self.tries = self.failed = self.existing = 0

    async def __aenter__(self) -> RewardService:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._removals:
            await asyncio.wait(self._removals)
        await self._pool.close()
        await self._web.close()
        await self._models.close()
        if self._ledger is not None:
            self._ledger.close()

    async def score(self, trajectory: Trajectory, scoring: Scoring | None = None) -> Score:
        """What the function of its environment, or another one, says of it. Raises ScorerFailed, and PagurusError where
        the host fails."""
        assert trajectory.final is not None, "it has no final state"
        scoring = scoring or trajectory.final.scoring
        if scoring.parts:
            scores = await asyncio.gather(*(self.score(trajectory, part.scoring) for part in scoring.parts))
            return combined(scoring.parts, dict(zip((p.name for p in scoring.parts), scores, strict=True)))
        request = _request(trajectory, scoring)
        digest = await asyncio.to_thread(registry.digest, scoring)
        key = _key(digest, request, trajectory.final.checkpoint if scoring.forks else "")
        if self._ledger is not None and (existing := await asyncio.to_thread(self._ledger.get, key)) is not None:
            self.existing += 1
            return existing
        score, took = await self._tries(request, trajectory.final.checkpoint, digest)
        if score.reward >= scoring.high:
            self._anchors[digest, request.seed] = anchor.raised(self._anchors.get((digest, request.seed)), took)
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.put, key, score)
        return score

    async def _tries(self, request: ScoringRequest, checkpoint: str, digest: str) -> tuple[Score, float]:
        why: Exception | None = None
        for attempt in range(anchor.TRIES):
            self.tries += 1
            try:
                score, took = await self._try(request, attempt, checkpoint, digest)
                if wrong := score.wrong(request.scoring, len(request.turns)):
                    raise ScorerFailed(wrong, raised=True)
                return score, took
            except (ScorerFailed, TooSlow) as error:
                why = error
            except PagurusError as error:  # the host's: it is tried again, and then its own failure
                if attempt + 1 == anchor.TRIES:
                    raise
                why = error
                await asyncio.sleep(PAUSE * 2**attempt)
            self.failed += 1
            log.warning("scoring by %s failed, try %d: %s", request.scoring.name, attempt + 1, why)
        raised = isinstance(why, ScorerFailed) and why.raised
        raise ScorerFailed(f"{request.scoring.name}, {anchor.TRIES} times, last: {why}", raised=raised) from why

    async def _try(self, request: ScoringRequest, attempt: int, checkpoint: str, digest: str) -> tuple[Score, float]:
        async with self._pool.slot(), self._fork(request.scoring, checkpoint) as fork:
            limit = anchor.limits(self._anchors.get((digest, request.seed)), request.scoring.longest)[
                attempt
            ]  # as known now
            request = msgspec.structs.replace(request, id=secrets.token_hex(8), limit=limit, attempt=attempt)
            if request.scoring.url:
                return await self._web.run(request, fork)
            if request.scoring.model:
                return await self._models.run(request)
            return await self._pool.run(request, fork)

    @contextlib.asynccontextmanager
    async def _fork(self, scoring: Scoring, checkpoint: str) -> AsyncIterator[Any]:
        if not scoring.forks:
            yield None
            return
        fork = await self._host.fork(checkpoint)
        try:
            yield fork
        finally:
            removal = asyncio.get_running_loop().create_task(_remove(fork), name=f"remove {fork.id}")
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)


def apply(trajectory: Trajectory, score: Score) -> None:
    """Add a score to what the environment gave while the episode ran."""
    trajectory.reward += score.total
    for record, value in zip(trajectory.turns, score.turns, strict=False):
        record.reward += value
    trajectory.score, trajectory.scored_at = score, time.time()


def _request(trajectory: Trajectory, scoring: Scoring) -> ScoringRequest:
    final = trajectory.final
    assert final is not None
    return ScoringRequest(
        id="",
        scoring=scoring,
        seed=final.seed,
        opening=trajectory.opening,
        turns=[ScoredTurn(action=turn.action, observation=turn.observation) for turn in trajectory.turns],
        row=final.row,
        state=_plain(final.state),
        cause=None if trajectory.failure is None else trajectory.failure.cause.value,
    )


def _plain(state: bytes | None) -> Any:
    """What the default of `Environment.snapshot` wrote; None where the environment has its own form."""
    try:
        value = msgspec.msgpack.decode(state or b"")
        return value if isinstance(value, dict) else None
    except msgspec.MsgspecError:
        return None


def _key(digest: str, request: ScoringRequest, checkpoint: str) -> str:
    """Of everything that is scored. A checkpoint never changes, so its name stands for the state."""
    said = msgspec.json.encode(
        (digest, request.seed, request.opening, request.turns, request.row, request.state, request.cause, checkpoint)
    )
    return hashlib.blake2b(said, digest_size=16).hexdigest()


async def _remove(sandbox: Sandbox) -> None:
    try:
        await sandbox.remove()
    except PagurusError as error:  # the run's sweep finds it by its label
        log.warning("%s was not removed: %s", sandbox.id, error)
