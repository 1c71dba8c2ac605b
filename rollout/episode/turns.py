"""`Episode`: the turn loop of one trajectory.

Guarantee: the tokens that the engine sampled are the tokens that the loss sees (I8); whatever goes wrong ends as a
`Trajectory` with a status, a failure and a reason (I10), only cancellation propagates; an action is in the journal
before it is executed.

::

    reset ─▶ prompt ids ─▶┌─ generate ────────────────┐─▶ gate ─▶ journal ─▶ step ─▶ observation ids ─┐
                          └─ checkpoint of last turn ─┘               ▲                               │
                          ▲                                 take over ┘                               │
                          └───────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from typing import Any

from rollout.chaos import Inject
from rollout.decide.blame import Blame, Cause, EpisodePhase, TrajectoryFailure, blame, cause_of
from rollout.decide.effects import watched
from rollout.decide.observed import middle_cut
from rollout.engine.client import Generation, Sampling, TurnSampling
from rollout.environments.base import Environment, Observation
from rollout.episode import origin, records, takeover
from rollout.episode.guard import ExecutedCommand, GuardedSandbox, KilledItself, ReplayDivergence
from rollout.episode.origin import Origin
from rollout.episode.parts import EpisodeEnd, EpisodeParts, observed, returned
from rollout.episode.prepared import PreparedState
from rollout.episode.spec import EpisodeSpec, sampling_seed
from rollout.episode.talk import talk_of
from rollout.episode_clock import TrajectoryClock
from rollout.experts import within
from rollout.messages import FinalState, Trajectory, TurnRecord
from rollout.rewards.messages import Scoring
from rollout.store.journal import TurnEntry
from rollout.store.retained import Visit
from sandbox.errors import PagurusError
from sandbox.messages import SandboxState

log = logging.getLogger("pagurus.rollout")

MAX_CLOSE = 10.0  # seconds that an environment may take to close
MAX_CHANGED = 100  # paths that a trajectory keeps


class Episode:
    """The turn loop of one trajectory."""

    def __init__(
        self,
        parts: EpisodeParts,
        env: Environment,
        sandbox: Any,
        trajectory: Trajectory,
        spec: EpisodeSpec,
        sampling: Sampling,
        inject: Inject | None,
        last: TurnEntry | None,
    ):
        self.parts, self.env, self.trajectory, self.spec = parts, env, trajectory, spec
        self.sampling, self.inject, self.limits = sampling, inject, parts.limits
        self.guarded = GuardedSandbox(sandbox, meter=parts.meter, epoch=last.epoch if last is not None else None)
        self.guarded.on_epoch = self._on_epoch
        self.clock = TrajectoryClock(env.seconds or self.limits.step, used=last.own_s if last is not None else 0.0)
        self.talk = talk_of(env, parts.tokenizer, parts.renderer)
        self.phase = EpisodePhase.RESET
        self.resumable = False  # its journal says where to continue
        self.visits: list[Visit] = []  # states that it was in and that can be forked
        self._answer_at = 0  # tokens before the answer of the turn at hand
        self._written = self._routed = 0  # tokens that the journal has, and those whose experts it has
        self._turn_of: list[tuple[TurnRecord, ExecutedCommand]] = []

    async def reset(self) -> tuple[Observation, bytes | None]:
        """Nothing but the reset: what it showed, and what the environment keeps. Raises Ended."""
        try:
            return await self._reset(), self.env.snapshot()
        except EpisodeEnd:
            raise
        except Exception as error:  # whatever a user's code raises is attributed
            raise EpisodeEnd(self._failure(error)) from error
        finally:
            await self._close()

    async def _close(self) -> None:
        """What this episode worked with is given back. What the environment raises then changes nothing any more."""
        await self.guarded.close()
        try:
            async with asyncio.timeout(MAX_CLOSE):
                await self.env.close()
        except Exception:
            log.warning("the environment of %s did not close", self.spec.prompt, exc_info=True)

    async def _reset(self) -> Observation:
        async with self._limited(EpisodePhase.RESET, TrajectoryClock(self.limits.reset)):
            return await observed(self.env.reset(self.guarded, self.spec.seed), "reset")

    async def run(self, since: Sequence[TurnEntry], start: PreparedState | Origin | None = None) -> None:
        """To the end, whatever it is. `start`: the sandbox is a fork of that state."""
        trajectory = self.trajectory
        trajectory.sandbox, trajectory.started_at = self.guarded.id, time.time()
        try:
            await self._attributed(self._play(since, start))
            if trajectory.scored and self.env.reward is not None:
                await self._attributed(self._leave_final(self.env.reward))
        except asyncio.CancelledError:
            trajectory.status, trajectory.reason = "aborted", trajectory.reason or "cancelled"
            raise
        finally:
            await self._close()
            await self._poll_at_files()
            records.fill(self._turn_of, await self.guarded.stored())
            trajectory.recoveries = self.guarded.recoveries
            trajectory.killed = self.guarded.deaths
            trajectory.own_s = self.clock.used
            trajectory.finished_at = time.time()

    # ----------------------------------------------------------------- the loop

    async def _play(self, since: Sequence[TurnEntry], start: PreparedState | Origin | None) -> None:
        trajectory, env = self.trajectory, self.env
        observation: Observation | None = None
        if since:
            observation = await self._take_over(since)
        elif isinstance(start, Origin):
            self._branch_off(start)
        else:
            first = await self._reset() if start is None else self._start_in(start)
            first = self._shortened(first)
            trajectory.opening = first.text
            self.talk.open(trajectory, first)
            if len(trajectory.sample) + 1 >= self.limits.max_length:
                used, limit = len(trajectory.sample), self.limits.max_length
                raise _ended(
                    EpisodePhase.RESET, Cause.LENGTH, f"the prompt has {used} tokens, a trajectory {limit} at most"
                )
        while observation is None or not observation.done:
            if observation is not None:
                self._hear(observation)
            if len(trajectory.turns) >= env.max_turns:
                raise _ended(EpisodePhase.STEP, Cause.TURNS, f"{env.max_turns} were not enough")
            if len(trajectory.sample) + 1 >= self.limits.max_length:
                raise self._full()
            observation = await self._turn(TurnRecord(index=len(trajectory.turns)))
        await self._outlive()
        if self.parts.visitable:
            await self._note_end()

    def _hear(self, observation: Observation) -> None:
        """Puts what the agent reads; what has no room any more ends the episode and is not put."""
        trajectory = self.trajectory
        last_seen = self.talk.hear(trajectory, observation)
        before = 0 if last_seen.redo else len(trajectory.sample)
        if before + len(last_seen.ids) + 1 >= self.limits.max_length:
            raise self._full(before + len(last_seen.ids))
        if last_seen.redo:
            trajectory.breaks.append(len(trajectory.tokens))
        trajectory.put(last_seen.ids)

    def _shortened(self, observation: Observation) -> Observation:
        """As much of it as an observation may have; the model reads that something is missing."""
        limit = self.limits.observed
        text = middle_cut(observation.text, limit, self.talk.count)
        share = max(1, limit // max(1, len(observation.results)))
        results = tuple(middle_cut(item, share, self.talk.count) for item in observation.results)
        if text is observation.text and results == observation.results:
            return observation
        return replace(observation, text=text, results=results)

    def _start_in(self, ready: PreparedState) -> Observation:
        self.env.load(ready.state)
        self.guarded.head = ready.checkpoint
        return ready.first

    def _branch_off(self, start: Origin) -> None:
        origin.begin(self.trajectory, start)
        self.talk.recall(self.trajectory, last_seen=True)
        self.clock = TrajectoryClock(self.clock.budget, used=start.visit.own_s)
        self.env.load(start.visit.state)
        self.guarded.head = start.visit.checkpoint

    async def _turn(self, record: TurnRecord) -> Observation:
        self.trajectory.turns.append(record)
        self.guarded.begin_turn(record.index)
        generation = await self._think(record)
        if generation.finish_reason == "abort":
            raise _ended(EpisodePhase.GENERATE, Cause.ENGINE, "the engine aborted it")
        if generation.finish_reason == "length":
            return await self._cut(record)
        return await self._step(record)

    async def _think(self, record: TurnRecord) -> Generation:
        """Generate the answer while the checkpoint of the last turn is being taken."""
        trajectory = self.trajectory
        self.guarded.start_settling()
        self.phase = EpisodePhase.GENERATE
        record.gen_start = time.time()
        prompt, self._answer_at = trajectory.sample, len(trajectory.tokens)
        capacity = self.limits.max_length - len(prompt)
        sampling = TurnSampling.of(
            self.sampling,
            routed=max(0, trajectory.routed - self._answer_at + len(prompt)),
            max_tokens=min(self.sampling.max_tokens, capacity),
            seed=sampling_seed(self.sampling.seed, self.spec, record.index),
        )
        try:
            with self.parts.metered(EpisodePhase.GENERATE):
                async with asyncio.timeout(self.limits.generate):
                    generation = await self.parts.engine.generate(list(prompt), sampling)
        except TimeoutError:
            raise _ended(EpisodePhase.GENERATE, Cause.LATE, f"no answer within {self.limits.generate:g} s") from None
        ids = generation.token_ids
        record.gen_end, record.tokens, record.finish = time.time(), len(ids), generation.finish_reason
        record.version = max((span.version for span in generation.spans), default=-1)
        record.action = self.talk.read(ids, prompt, complete=generation.finish_reason == "stop")
        trajectory.sampled(generation)
        return generation

    async def _cut(self, record: TurnRecord) -> Observation:
        """The action is not complete: it is not executed."""
        if len(self.trajectory.sample) + 1 >= self.limits.max_length:
            raise self._full()
        async with self._limited(EpisodePhase.STEP, self.clock):
            observation = await returned(self.env.cut(self.guarded, record.action), "cut")
        if observation is None:
            raise _ended(
                EpisodePhase.STEP, Cause.CUT, f"the action of turn {record.index} reached {record.tokens} tokens"
            )
        observation = self._shortened(observation)
        self._observed(record, observation)
        return observation

    async def _step(self, record: TurnRecord) -> Observation:
        """Execute the answer. The guard holds it back until the last turn is captured (I2)."""
        injections: list[asyncio.Task[int]] = []
        if self.inject is not None and self.inject.turn == record.index:
            await self._aim(self.inject, injections)
        with contextlib.suppress(PagurusError):  # the command meets the same, and deals with it
            await self.guarded.finalized()
        state = self.env.snapshot()
        if record.index == 0:
            self.trajectory.base = self.guarded.head
        self._note_visit(record.index, self._answer_at, state)
        await self._write_down(record, state)
        return await self._act(record, injections)

    async def _act(self, record: TurnRecord, injections: list[asyncio.Task[int]]) -> Observation:
        executed, deaths = len(self.guarded.executed), self.guarded.deaths
        try:
            async with self._limited(EpisodePhase.STEP, self.clock):
                observation = await observed(self.env.step(self.guarded, record.action), "step")
        finally:
            self.guarded.on_exec = None
            self.trajectory.injected += sum(await asyncio.gather(*injections))
            record.restored += self.guarded.deaths - deaths
            self._turn_of += [(record, done) for done in self.guarded.executed[executed:]]
        if observation.back_to is not None:
            observation = await self._roll_back(record, observation)
        observation = self._shortened(observation)
        self._observed(record, observation)
        if not observation.done and self.clock.left <= 0:
            raise _ended(EpisodePhase.STEP, Cause.LATE, f"its {self.clock.budget:g} s are used up")
        return observation

    async def _roll_back(self, record: TurnRecord, observation: Observation) -> Observation:
        """Sandbox, environment and reward are as they were before that turn. The tokens stay in the record.

        Where no checkpoint holds that state nothing changes, and the agent is informed.
        """
        existing = {visit.turn: visit for visit in self.visits}
        visit = existing.get(observation.back_to if observation.back_to is not None else -1)
        if visit is None:
            there = ", ".join(map(str, existing)) or "none"
            reported = f"no checkpoint holds the state before turn {observation.back_to}; there are: {there}\n"
            return replace(observation, text=reported, back_to=None)
        await self.guarded.roll_back(visit.checkpoint)
        self.env.load(visit.state)
        self.trajectory.reward, record.back_to = visit.reward, visit.turn
        return observation

    def _note_visit(self, turn: int, at: int, state: bytes | None) -> None:
        head = self.guarded.head
        if state is not None and head is not None and self.guarded.clean:
            reward, used = self.trajectory.reward, self.clock.used
            self.visits.append(Visit(turn=turn, at=at, checkpoint=head, state=state, reward=reward, own_s=used))

    async def _note_end(self) -> None:
        """The last state can be visited too, as soon as it is captured."""
        with contextlib.suppress(PagurusError):  # it cannot: then the states before it can
            await self.guarded.finalized()
        self._note_visit(len(self.trajectory.turns), len(self.trajectory.tokens), self.env.snapshot())

    def _observed(self, record: TurnRecord, observation: Observation) -> None:
        record.observation, record.results = observation.text, list(observation.results)
        record.reward += observation.reward
        self.trajectory.reward += observation.reward
        if self.parts.on_turn is not None:
            records.fill(self._turn_of)
            self.parts.on_turn(self.trajectory, record)

    async def _outlive(self) -> None:
        """A sandbox that got a fault in the last turn, and was not needed since, is restored too."""
        if self.trajectory.injected > self.guarded.deaths:
            self.phase = EpisodePhase.SCORE
            await self.guarded.exec("true", ends_turn=False)

    async def _aim(self, inject: Inject, injections: list[asyncio.Task[int]]) -> None:
        """A fault on purpose: in the last turn's checkpoint, after it, or in the middle of the coming command."""
        if inject.when == "command":
            self.guarded.on_exec = lambda: injections.append(
                asyncio.get_running_loop().create_task(inject.kill(self.guarded.id, inject.delay))
            )
            return
        if inject.when == "between":
            await self.guarded.finalized()
        self.trajectory.injected += await inject.kill(self.guarded.id, 0.0)

    # ----------------------------------------------------------------- journal

    async def _write_down(self, record: TurnRecord, state: bytes | None) -> None:
        """Before the action is executed: all that a successor needs to execute it."""
        notes, trajectory, guarded, at = self.parts.notes, self.trajectory, self.guarded, self._written
        if notes is None:
            return
        records.fill(self._turn_of)
        entry = TurnEntry(
            turn=record.index,
            sandbox=guarded.id,
            epoch=guarded.epoch,
            at=at,
            tokens=trajectory.tokens[at:],
            mask=trajectory.mask[at:],
            logprobs=trajectory.logprobs[at:],
            versions=trajectory.versions[at:],
            action=record.action,
            state=state,
            checkpoint=guarded.head if guarded.clean else None,
            records=trajectory.turns[max(0, record.index - 1) if at else 0 :],
            reward=trajectory.reward,
            own_s=self.clock.used,
            killed=guarded.deaths,
            injected=trajectory.injected,
            recoveries=guarded.recoveries,
            continued=trajectory.continued,
            opening=trajectory.opening,
            breaks=list(trajectory.breaks),
            lineage=list(trajectory.lineage),
            base=trajectory.base,
            experts=within(trajectory.experts, self._routed, len(trajectory.tokens)),
        )
        self._written, self._routed = len(trajectory.tokens), trajectory.routed
        await notes.append(self.spec.key, entry)
        self.resumable = state is not None

    async def _on_epoch(self, epoch: str) -> None:
        if self.parts.notes is not None:
            await self.parts.notes.restored(self.spec.key, self.guarded.turn, epoch)

    async def _take_over(self, since: Sequence[TurnEntry]) -> Observation:
        """Become what another process was, and execute the action that it had written down last.

        The daemon carries a command out once per key: what the other process had it do is answered, not done again.
        """
        trajectory, guarded, last = self.trajectory, self.guarded, since[-1]
        self.phase = EpisodePhase.RECOVER
        takeover.recall(trajectory, since)
        self.talk.recall(trajectory, last_seen=False)
        self.visits, self.resumable = takeover.visits(since), True
        self._written, self._routed = len(trajectory.tokens), trajectory.routed
        guarded.begin_turn(last.turn)
        guarded.adopt(last.checkpoint, last.killed, last.recoveries)
        if last.state is None:
            raise _ended(EpisodePhase.RECOVER, Cause.DIED, "the environment does not save its state")
        if guarded.sandbox.info.state is SandboxState.RUNNING and last.epoch:
            self.env.load(last.state)
        else:
            await takeover.rewind(self.env, guarded, trajectory, since)
            await self._on_epoch(guarded.epoch)
        return await self._act(trajectory.turns[last.turn], [])

    # ----------------------------------------------------------------- its end

    async def _attributed(self, work: Awaitable[None]) -> None:
        """Whatever ends it is this trajectory's data (I10)."""
        try:
            await work
        except EpisodeEnd as end:
            records.fail(self.trajectory, end.failure)
        except Exception as error:  # noqa: BLE001 - the environment is a user's code
            records.fail(self.trajectory, self._failure(error))

    async def _leave_final(self, scoring: Scoring) -> None:
        """The state that is scored: captured; then nothing runs in the sandbox any more."""
        ended, guarded = time.monotonic(), self.guarded
        async with self._limited(EpisodePhase.SCORE, TrajectoryClock(self.limits.score)):
            state = self.env.snapshot()
            checkpoint = await guarded.final() if scoring.forks else ""
            self.trajectory.final = FinalState(
                scoring=scoring, seed=self.spec.seed, checkpoint=checkpoint, state=state, row=self.env.row
            )
            with contextlib.suppress(PagurusError):  # it is dead already, or its host is: nothing of it is needed
                await guarded.sandbox.kill()
        self.trajectory.freed_s = time.monotonic() - ended

    def _failure(self, error: Exception) -> TrajectoryFailure:
        """What an exception means, by the phase in which it was raised."""
        result: BaseException | None = error
        while result is not None and not isinstance(result, PagurusError):
            result = result.__cause__ or result.__context__
        platform = self._of_platform(result) if isinstance(result, PagurusError) else None
        if platform is not None and (result is error or blame(platform) is Blame.PLATFORM):
            return platform
        return TrajectoryFailure(phase=self.phase, cause=Cause.RAISED, message=f"{type(error).__name__}: {error}")

    def _of_platform(self, error: PagurusError) -> TrajectoryFailure:
        phase, text = self.guarded.failed_in or self.phase, f"{error.code}: {error}"
        if isinstance(error, KilledItself):
            return TrajectoryFailure(phase=self.phase, cause=Cause.KILLED_ITSELF, message=text)
        if isinstance(error, ReplayDivergence):
            return TrajectoryFailure(phase=EpisodePhase.RECOVER, cause=Cause.DIVERGED, message=text)
        return TrajectoryFailure(
            phase=phase, cause=cause_of(error.code, phase, own=error.sandbox is not None), message=text
        )

    @contextlib.asynccontextmanager
    async def _limited(self, phase: EpisodePhase, clock: TrajectoryClock) -> AsyncIterator[None]:
        """In `phase`, on its clock."""
        guarded = self.guarded
        self.phase = guarded.phase = phase
        guarded.clock, guarded.failed_in = clock, None
        try:
            with self.parts.metered(phase):
                async with clock.running():
                    yield
        except TimeoutError as error:
            if not clock.expired:
                raise
            raise _ended(phase, Cause.LATE, f"its {clock.budget:g} s are used up") from error
        finally:
            guarded.clock = guarded.phase = None

    async def _poll_at_files(self) -> None:
        """What differs at the end from what the reset left, as far as rules name it."""
        rules, base = self.parts.effects, self.trajectory.base
        if rules is None or not rules.paths or base is None or not self.trajectory.scored:
            return
        with contextlib.suppress(PagurusError):  # the sandbox is dead, its host gone: then there are hints alone
            changes = await self.guarded.sandbox.diff(base)
            self.trajectory.changed = watched([change.path for change in changes], rules, MAX_CHANGED)

    def _full(self, used: int | None = None) -> EpisodeEnd:
        used, limit = used or len(self.trajectory.sample), self.limits.max_length
        return _ended(EpisodePhase.GENERATE, Cause.LENGTH, f"{used} of {limit} tokens are used")


def _ended(phase: EpisodePhase, cause: Cause, message: str) -> EpisodeEnd:
    return EpisodeEnd(TrajectoryFailure(phase=phase, cause=cause, message=message))
