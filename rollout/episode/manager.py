"""`EpisodeManager`: one episode, from a sandbox to the reward; also one that another process began.

Guarantee: whatever goes wrong ends as a `Trajectory` with a status, a failure and a reason (I10), only cancellation
propagates.

::

    created and reset, forked from a prepared state, or adopted ─▶ Episode: turn by turn ─▶ scored in a fork ─▶ removed
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout.chaos import Inject
from rollout.decide.blame import Cause, EpisodePhase, TrajectoryFailure, cause_of
from rollout.engine.asking import KIND
from rollout.engine.client import Sampling
from rollout.environments.base import Environment, Observation, Tokenizer
from rollout.episode import nowhere
from rollout.episode.origin import Origin
from rollout.episode.parts import EpisodeEnd, EpisodeParts, Generator, OnTurn
from rollout.episode.prepared import PreparedState, PreparedStates
from rollout.episode.records import fail, label
from rollout.episode.retained import RetainedStates
from rollout.episode.spec import EpisodeLimits, EpisodeSpec
from rollout.episode.turns import Episode
from rollout.messages import Trajectory
from rollout.rewards.messages import Score, ScorerFailed, Scoring
from rollout.rewards.service import RewardService, apply
from rollout.store.journal import Key, TurnEntry
from rollout.store.retained import Visit
from sandbox import Sandbox
from sandbox.errors import Conflict, Invalid, NotFound, PagurusError

Reset = tuple[Any, Observation, bytes | None]  # a sandbox, what its reset showed, what the environment keeps


@dataclass(kw_only=True)
class EpisodeManager(EpisodeParts):
    """Runs episodes on a host. ``await manager.run(EpisodeSpec(prompt="p0", seed=7), sampling)``"""

    environment: Callable[[], Environment]
    host: Any
    prepared: PreparedStates | None = None  # None: every sandbox is reset itself
    rewards: RewardService | None = None  # needed by environments with a `reward`
    on_created: Callable[[], None] = lambda: None
    failed_reward: float | None = None  # of what its reward function raises on; None: the environment has failed
    retained: RetainedStates | None = None  # None: each sandbox goes with its episode
    _visits: dict[str, list[Visit]] = field(default_factory=dict)  # of sandboxes that wait to be scored
    leaving: bool = False  # this process ends, its successor continues: sandboxes stay
    scoring: Callable[[Scoring | None], Scoring | None] = lambda own: own  # by what, given the environment's own
    parked: set[Key] = field(default_factory=set)  # episodes that continue later, once they are cancelled

    async def run(
        self,
        spec: EpisodeSpec,
        sampling: Sampling,
        *,
        since: Sequence[TurnEntry] = (),
        origin: Origin | None = None,
        inject: Inject | None = None,
        into: Trajectory | None = None,
    ) -> Trajectory:
        """Play one episode to its end. `since`: what its journal says, to continue there. `origin`: the state of
        another trajectory, to continue from. `into` shows it while it runs.

        The sandbox is removed or kept at the end, unless the process that runs this is `leaving`. That of an episode
        which is `parked` stays, with nothing that runs in it. Where the
        environment has a `reward`, the sandbox stays, with nothing that runs in it, and `score` must follow.
        """
        trajectory = into if into is not None else Trajectory()
        label(trajectory, spec, sampling)
        drawn = spec
        env, seed = self.environment().of(drawn.seed)
        env.reward = self.scoring(env.reward)
        KIND.set(env.kind or type(env).__name__)
        spec = msgspec.structs.replace(spec, seed=seed)
        sandbox, episode = None, None
        start: PreparedState | Origin | None = origin
        try:
            if since:
                sandbox = await self._adopt(since)
            elif origin is not None:
                sandbox = await self._fork(origin)
            else:
                sandbox, start = await self._begin(env, spec, drawn)
            episode = Episode(self, env, sandbox, trajectory, spec, sampling, inject, since[-1] if since else None)
            await episode.run(since, start)
        except EpisodeEnd as end:
            fail(trajectory, end.failure)
        finally:
            if episode is None or not episode.resumable:
                self.parked.discard(spec.key)
            if sandbox is not None and spec.key in self.parked and trajectory.final is None:
                with contextlib.suppress(PagurusError):  # it is dead already: its checkpoints are what counts
                    await asyncio.shield(sandbox.kill())
            elif sandbox is not None and not self.leaving:
                if trajectory.final is None:
                    await asyncio.shield(self._part_with(sandbox, trajectory, episode.visits if episode else []))
                elif episode is not None:
                    self._visits[sandbox.id] = episode.visits  # until it is scored
        return trajectory

    async def _part_with(self, sandbox: Sandbox, trajectory: Trajectory, visits: list[Visit]) -> None:
        """The episode needs its sandbox no more."""
        ended = trajectory.finished_at > 0
        if self.retained is None or not ended or not await self.retained.keep(trajectory, sandbox, visits):
            await _remove(sandbox)

    async def score(self, trajectory: Trajectory) -> None:
        """Add what its final state is worth, where the environment left one, and remove its sandbox.

        What fails becomes the trajectory's failure. May be cancelled.
        """
        if trajectory.final is None:
            return
        try:
            if trajectory.scored:
                with self.metered(EpisodePhase.SCORE):
                    await self._score(trajectory)
        finally:
            if not self.leaving:
                await asyncio.shield(self._let_go(trajectory))

    async def _score(self, trajectory: Trajectory) -> None:
        if self.rewards is None:
            raise Invalid("this environment has a `reward`", hint="give EpisodeManager(rewards=RewardService(host))")
        try:
            apply(trajectory, await self.rewards.score(trajectory))
        except ScorerFailed as error:
            if error.raised and self.failed_reward is not None:
                apply(trajectory, Score(reward=self.failed_reward, reason=f"as the plan says, because {error}"))
                return
            cause = Cause.RAISED if error.raised else Cause.SCORER
            fail(trajectory, TrajectoryFailure(phase=EpisodePhase.SCORE, cause=cause, message=str(error)))
        except PagurusError as error:
            cause = cause_of(error.code, EpisodePhase.RECOVER, own=False)  # a fork that fails is no command's doing
            fail(trajectory, TrajectoryFailure(phase=EpisodePhase.SCORE, cause=cause, message=f"{error.code}: {error}"))

    async def _let_go(self, trajectory: Trajectory) -> None:
        with contextlib.suppress(PagurusError):  # the run's sweep finds it by its label
            sandbox = await self.host.get(trajectory.sandbox)
            visits = self._visits.pop(trajectory.sandbox, [])
            if self.retained is not None and await self.retained.keep(trajectory, sandbox, visits):
                return
            await sandbox.remove()

    async def play(self, spec: EpisodeSpec, sampling: Sampling) -> Trajectory:
        """Run and score."""
        trajectory = await self.run(spec, sampling)
        await self.score(trajectory)
        return trajectory

    async def _fork(self, origin: Origin) -> Any:
        """A sandbox in the state of another trajectory."""
        with self.metered(EpisodePhase.CREATE):
            try:
                sandbox = await self.host.fork(origin.visit.checkpoint)
                self.on_created()
                return sandbox
            except PagurusError as error:
                cause = Cause.DIED if isinstance(error, NotFound | Conflict) else Cause.REFUSED
                text = f"{error.code}: {error}"
                raise EpisodeEnd(TrajectoryFailure(phase=EpisodePhase.CREATE, cause=cause, message=text)) from error

    async def _begin(self, env: Environment, spec: EpisodeSpec, drawn: EpisodeSpec) -> tuple[Any, PreparedState | None]:
        """A fork of the state that a reset has left; else a new sandbox, still to be reset."""
        if self.prepared is not None:
            try:
                begun = await self.prepared.begin(env, spec.seed, lambda: self.reset(drawn))
            except PagurusError as error:
                text = f"{error.code}: {error}"
                raise EpisodeEnd(
                    TrajectoryFailure(phase=EpisodePhase.CREATE, cause=Cause.REFUSED, message=text)
                ) from error
            if begun is not None:
                self.on_created()
                return begun
        return await self._create(env), None

    async def reset(self, drawn: EpisodeSpec) -> Reset:
        """A sandbox in which an episode can begin. Raises Ended. The caller removes it."""
        env, seed = self.environment().of(drawn.seed)
        spec = msgspec.structs.replace(drawn, seed=seed)
        sandbox = await self._create(env)
        try:
            episode = Episode(self, env, sandbox, Trajectory(), spec, Sampling(), None, None)
            return sandbox, *await episode.reset()
        except BaseException:
            await asyncio.shield(_remove(sandbox))
            raise

    async def _create(self, env: Environment) -> Any:
        if not env.sandboxed:
            return nowhere.Nowhere()
        with self.metered(EpisodePhase.CREATE):
            try:
                async with asyncio.timeout(self.limits.create):
                    if env.compose is not None:
                        sandbox = await self.host.compose(env.compose, network=env.network)
                    else:
                        sandbox = await self.host.create(env.image, limits=env.limits, network=env.network)
                self.on_created()
                return sandbox
            except TimeoutError:
                text = f"no sandbox within {self.limits.create:g} s"
                raise EpisodeEnd(TrajectoryFailure(phase=EpisodePhase.CREATE, cause=Cause.LATE, message=text)) from None
            except PagurusError as error:
                cause = cause_of(error.code, EpisodePhase.CREATE, own=error.sandbox is not None)
                text = f"{error.code}: {error}"
                raise EpisodeEnd(TrajectoryFailure(phase=EpisodePhase.CREATE, cause=cause, message=text)) from error

    async def _adopt(self, since: Sequence[TurnEntry]) -> Any:
        """The sandbox of an episode that another process began."""
        if since[-1].sandbox == nowhere.NAME:
            return nowhere.Nowhere()
        with self.metered(EpisodePhase.RECOVER):
            try:
                return await self.host.get(since[-1].sandbox)
            except PagurusError as error:
                cause = Cause.DIED if isinstance(error, NotFound) else Cause.HOST
                raise EpisodeEnd(
                    TrajectoryFailure(phase=EpisodePhase.RECOVER, cause=cause, message=str(error))
                ) from error


async def run_trajectory(
    env: Environment,
    sandbox: Sandbox,
    engine: Generator,
    tokenizer: Tokenizer,
    *,
    seed: int,
    sampling: Sampling,
    prompt: str = "",
    index: int = 0,
    limits: EpisodeLimits | None = None,
    inject: Inject | None = None,
    on_turn: OnTurn | None = None,
    into: Trajectory | None = None,
) -> Trajectory:
    """Play the episode `seed` of `env` in a sandbox of the caller, who removes it."""
    if env.reward is not None:
        raise Invalid("what is scored in a fork needs a host", hint="use EpisodeManager(host=..., rewards=...)")
    trajectory = into if into is not None else Trajectory()
    manager = EpisodeManager(
        environment=lambda: env,
        host=None,
        engine=engine,
        tokenizer=tokenizer,
        limits=limits or EpisodeLimits(),
        on_turn=on_turn,
    )
    spec = EpisodeSpec(prompt=prompt, seed=seed, index=index)
    label(trajectory, spec, sampling)
    await Episode(manager, env, sandbox, trajectory, spec, sampling, inject, None).run(())
    return trajectory


async def _remove(sandbox: Sandbox) -> None:
    with contextlib.suppress(PagurusError):  # it is the daemon's to clean up now; the trajectory itself is whole
        await sandbox.remove()
