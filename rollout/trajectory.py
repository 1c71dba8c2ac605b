"""`run_trajectory`: one episode, from the first observation to the reward.

Owns: the turn loop, the tokens of a trajectory, its timeline, the attribution of its end. Does not own: which
episodes run, how often they are tried again (controller), how a sandbox is brought back (guard).
Guarantee: the tokens that the engine sampled are the tokens that the loss sees (I8); whatever goes wrong ends as a
`Trajectory` with a status and a reason (I10), only cancellation propagates.

::

    reset ─▶ prompt ids ─▶┌─ generate ────────────────┐─▶ gate ─▶ step (exec in the sandbox) ─▶ observation ids ─┐
                          └─ checkpoint of last turn ─┘                                                          │
                          ▲                                                                                      │
                          └──────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from rollout.engine.client import Generation, Sampling
from rollout.environment import Environment, Observation, Tokenizer
from rollout.faults import Strike
from rollout.guard import Executed, GuardedSandbox
from rollout.messages import Trajectory, TurnRecord
from sandbox.errors import PagurusError
from sandbox.messages import Verdict


class Engine(Protocol):
    """What generates: an `EngineClient`, an `EngineSupervisor`, a pool of them."""

    def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Awaitable[Generation]: ...


OnTurn = Callable[[Trajectory, TurnRecord], None]


async def run_trajectory(
    env: Environment,
    sandbox: Any,
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    seed: int,
    sampling: Sampling,
    prompt: str = "",
    group: str = "",
    index: int = 0,
    max_length: int = 1024,
    strike: Strike | None = None,
    on_turn: OnTurn | None = None,
    into: Trajectory | None = None,
) -> Trajectory:
    """Play the episode `seed` of `env` in `sandbox`. `into` lets the caller watch the trajectory grow."""
    trajectory = into if into is not None else Trajectory()
    trajectory.prompt, trajectory.group, trajectory.index, trajectory.seed = prompt, group, index, seed
    trajectory.sandbox, trajectory.started_at = sandbox.id, time.time()
    trajectory.temperature = sampling.temperature
    guarded = GuardedSandbox(sandbox)
    loop = _Loop(env, guarded, engine, tokenizer, trajectory, sampling, max_length, strike, on_turn)
    try:
        await loop.play(seed)
        await loop.outlive()
    except PagurusError as error:
        trajectory.status, trajectory.reason = "failed", f"{error.code}: {error}"
    except asyncio.CancelledError:
        trajectory.status, trajectory.reason = "aborted", trajectory.reason or "cancelled"
        raise
    except Exception as error:  # noqa: BLE001 - the environment is a user's code: its bug is this episode's data (I10)
        trajectory.status, trajectory.reason = "failed", f"environment: {type(error).__name__}: {error}"
    finally:
        await guarded.close()
        loop.fill_turns()
        trajectory.recoveries = guarded.recoveries
        trajectory.killed = guarded.deaths
        trajectory.finished_at = time.time()
    return trajectory


class _Loop:
    """The turn loop of one trajectory."""

    def __init__(
        self,
        env: Environment,
        guarded: GuardedSandbox,
        engine: Engine,
        tokenizer: Tokenizer,
        trajectory: Trajectory,
        sampling: Sampling,
        max_length: int,
        strike: Strike | None,
        on_turn: OnTurn | None,
    ):
        self.env, self.guarded, self.engine, self.tokenizer = env, guarded, engine, tokenizer
        self.trajectory, self.sampling, self.max_length = trajectory, sampling, max_length
        self.strike, self.on_turn = strike, on_turn
        self._turn_of: list[tuple[TurnRecord, Executed]] = []

    async def play(self, seed: int) -> None:
        trajectory = self.trajectory
        observation = await self.env.reset(self.guarded, seed)
        trajectory.put(self.env.encode_observation(self.tokenizer, observation, True))
        for index in range(self.env.max_turns):
            if len(trajectory.tokens) + 1 >= self.max_length:
                self._truncate(f"context: {len(trajectory.tokens)} of {self.max_length} tokens are used")
                return
            record = TurnRecord(index=index)
            trajectory.turns.append(record)
            self.guarded.turn = index
            generation = await self._think(record)
            if generation.finish_reason == "abort":
                trajectory.status, trajectory.reason = "aborted", trajectory.reason or "the engine was told to abort"
                return
            observation = await self._act(record, generation)
            trajectory.reward += observation.reward
            if self.on_turn is not None:
                self.fill_turns()
                self.on_turn(trajectory, record)
            if observation.done:
                return
            trajectory.put(self.env.encode_observation(self.tokenizer, observation, False))
        self._truncate(f"turns: {self.env.max_turns} were not enough")

    async def outlive(self) -> None:
        """A sandbox that was struck in the last turn, and that nobody has needed since, is brought back too."""
        if self.trajectory.struck > self.guarded.deaths:
            await self.guarded.exec("true", ends_turn=False)

    async def _think(self, record: TurnRecord) -> Generation:
        """Generate the answer while the checkpoint of the last turn is being taken."""
        trajectory = self.trajectory
        self.guarded.start_settling()
        record.gen_start = time.time()
        room = self.max_length - len(trajectory.tokens)
        seed = None if self.sampling.seed is None else self.sampling.seed + record.index
        sampling = Sampling(
            max_tokens=min(self.sampling.max_tokens, room),
            temperature=self.sampling.temperature,
            stop_token_ids=self.sampling.stop_token_ids,
            seed=seed,
            ignore_eos=self.sampling.ignore_eos,
        )
        generation = await self.engine.generate(list(trajectory.tokens), sampling)
        record.gen_end = time.time()
        record.tokens = len(generation.token_ids)
        trajectory.sampled(generation)
        return generation

    async def _act(self, record: TurnRecord, generation: Generation) -> Observation:
        """Execute the answer. The guard holds it back until the last turn is captured (I2)."""
        ids = generation.token_ids
        stopped = generation.finish_reason == "stop"
        record.action = self.env.decode_action(self.tokenizer, ids[:-1] if stopped else ids)
        executed, deaths = len(self.guarded.executed), self.guarded.deaths
        blows: list[asyncio.Task[int]] = []
        if self.strike is not None and self.strike.turn == record.index:
            await self._aim(self.strike, blows)
        try:
            observation = await self.env.step(self.guarded, record.action)
        finally:
            self.guarded.on_exec = None
            self.trajectory.struck += sum(await asyncio.gather(*blows))
            record.restored = self.guarded.deaths - deaths
        record.observation = observation.text
        self._turn_of += [(record, done) for done in self.guarded.executed[executed:]]
        return observation

    async def _aim(self, strike: Strike, blows: list[asyncio.Task[int]]) -> None:
        """A fault on purpose: in the last turn's checkpoint, after it, or in the middle of the coming command."""
        if strike.when == "command":
            self.guarded.on_exec = lambda: blows.append(
                asyncio.get_running_loop().create_task(strike.kill(self.guarded.id, strike.delay))
            )
            return
        if strike.when == "between":
            await self.guarded.settled()
        self.trajectory.struck += await strike.kill(self.guarded.id, 0.0)

    def fill_turns(self) -> None:
        """Copy what commands and checkpoints did into the turns' records, as far as it is known by now."""
        for record, done in self._turn_of:
            record.exec_start = record.exec_start or done.started
            record.exec_end = done.ended
            result, info = done.result, done.info
            if result.verdict is None:
                continue
            record.verdict = _stronger(Verdict(record.verdict), result.verdict)
            record.verdict_ms = result.verdict_ms or 0.0
            record.checkpoint, record.waited_s = result.checkpoint, done.waited_s
            if info is not None and result.verdict is not Verdict.NONE:
                record.checkpoint_started = info.started_at or 0.0
                record.checkpoint_captured = info.captured_at or 0.0
                record.frozen_ms, record.stored_bytes = info.frozen_ms, info.stored_bytes
                record.full_bytes = info.full_bytes

    def _truncate(self, reason: str) -> None:
        self.trajectory.status, self.trajectory.reason = "truncated", reason


def _stronger(left: Verdict, right: Verdict) -> str:
    return Verdict.of(files=left.files or right.files, processes=left.processes or right.processes).value
