"""One episode: its tokens, its timeline, its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout import EpisodeLimits, Observation, Trajectory, run_trajectory
from rollout.chaos import Faults, Inject
from rollout.decide.blame import Blame, Cause, blame
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.episode import turns
from rollout.episode.spec import EpisodeSpec, sampling_seed
from sandbox.errors import Conflict, EngineFailed, Invalid, RestoreFailed, SandboxDead
from tests.support.rollout_fakes import END, SCRIPT, FakeHost, FakeSandbox, Letters, Notebook, ScriptedEngine

SAMPLING = Sampling(max_tokens=32, stop_token_ids=[END])


async def play(sandbox: Any = None, engine: Any = None, env: Any = None, **options: Any) -> Trajectory:
    return await run_trajectory(
        env or Notebook(),
        sandbox or FakeSandbox(),
        engine or ScriptedEngine(SCRIPT),
        options.pop("tokenizer", Letters()),
        seed=3,
        sampling=SAMPLING,
        **options,
    )


async def test_tokens_are_those_that_were_sampled_and_text_is_tokenised_once() -> None:
    tokenizer, engine = Letters(), ScriptedEngine(SCRIPT, version=4)
    trajectory = await play(engine=engine, tokenizer=tokenizer)
    assert (trajectory.status, trajectory.reward) == ("completed", 1.0)
    lengths = {len(getattr(trajectory, name)) for name in ("tokens", "mask", "logprobs", "versions")}
    assert lengths == {len(trajectory.tokens)}
    sampled = [token for token, mask in zip(trajectory.tokens, trajectory.mask, strict=True) if mask]
    assert sampled == [token for line in SCRIPT for token in [*map(ord, line), END]]
    assert {v for v, m in zip(trajectory.versions, trajectory.mask, strict=True) if m} == {4}
    assert {p for p, m in zip(trajectory.logprobs, trajectory.mask, strict=True) if m} == {-0.5}
    assert tokenizer.encoded == ["seed 3\n", "$ ", "start\na\n$ ", "$ "]  # each observation exactly once
    for earlier, later in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier  # exact prefixes: nothing was tokenised again
    assert trajectory.oldest == 4


async def test_the_answer_is_generated_while_the_checkpoint_is_taken() -> None:
    sandbox, engine = FakeSandbox(), ScriptedEngine(SCRIPT)
    sandbox.capture_gate, engine.gate = asyncio.Event(), asyncio.Event()
    sandbox.capture_gate.set()

    def close_gate(command: str) -> None:
        if command == SCRIPT[0]:
            sandbox.capture_gate = asyncio.Event()

    sandbox.after_command = close_gate
    engine.gate.set()
    task = asyncio.create_task(play(sandbox, engine))
    while len(engine.prompts) < 2:  # noqa: ASYNC110 - a turn of the loop, not a time
        await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert sandbox.commands[-1] == SCRIPT[0]  # generated, and held back
    sandbox.capture_gate.set()
    trajectory = await task
    assert trajectory.status == "completed" and trajectory.turns[0].waited_s > 0
    assert [turn.verdict for turn in trajectory.turns] == ["files", "none", "files", "none"]


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("when", ["between", "command", "checkpoint"])
async def test_a_killed_sandbox_changes_nothing_in_the_trajectory(turn: int, when: Any) -> None:
    host = FakeHost()
    undisturbed = await play(await host.create("x"))
    injected = await play(await host.create("x"), inject=Inject(turn, when, kill=host.kill))
    assert (injected.injected, injected.killed, injected.recovered_equal) == (1, 1, 1)
    assert (injected.tokens, injected.mask, injected.reward, injected.status) == (
        undisturbed.tokens,
        undisturbed.mask,
        1.0,
        "completed",
    )


async def test_failures_are_data_with_a_reason() -> None:
    engine = ScriptedEngine(SCRIPT)
    engine.failures = [EngineFailed("no engine")]
    assert (await play(engine=engine)).reason == "generate/engine: engine_failed: no engine"

    class Buggy(Notebook):
        async def step(self, sandbox: Any, action: str) -> Observation:
            raise KeyError("oops")

    trajectory = await play(env=Buggy())
    assert (trajectory.status, trajectory.reason) == ("failed", "step/raised: KeyError: 'oops'")
    assert len(trajectory.turns) == 1 and sum(trajectory.mask) > 0  # what was sampled is kept

    class Stuck(FakeSandbox):
        async def restore(self, to: Any = None, *, verify: bool = False) -> Any:
            raise RestoreFailed("criu: no", sandbox=self.id)

    sandbox = Stuck()
    sandbox.after_command = lambda command: sandbox.die() if command == SCRIPT[2] else None
    trajectory = await play(sandbox)
    assert trajectory.status == "failed" and "criu: no" in trajectory.reason


@pytest.mark.parametrize("ends", ["by itself", "failed", "cancelled"])
@pytest.mark.parametrize("closing", ["well", "raises", "hangs"])
async def test_an_environment_closes_once_however_its_episode_ends(
    ends: str, closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MAX_CLOSE", 0.01)
    closed, acting = [], asyncio.Event()

    class Opened(Notebook):
        async def step(self, sandbox: Any, action: str) -> Observation:
            acting.set()
            if ends == "cancelled":
                await asyncio.sleep(1000)
            if ends == "failed":
                raise KeyError("oops")
            return await super().step(sandbox, action)

        async def close(self) -> None:
            closed.append(self)
            if closing == "hangs":
                await asyncio.sleep(1000)
            if closing == "raises":
                raise OSError("not there")

    task = asyncio.create_task(play(env=Opened()))
    await acting.wait()
    if ends == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert (await task).status == {"by itself": "completed", "failed": "failed"}[ends]
    assert len(closed) == 1


async def test_limits_truncate_with_a_reason() -> None:
    class Endless(Notebook):
        async def step(self, sandbox: Any, action: str) -> Observation:
            return Observation("more ")

    trajectory = await play(env=Endless())
    assert (trajectory.status, trajectory.reason.partition(":")[0]) == ("truncated", "step/turns")
    trajectory = await play(env=Endless(), limits=EpisodeLimits(max_length=20))
    assert (trajectory.status, trajectory.reason.partition(":")[0]) == ("truncated", "generate/length")


def test_faults_are_the_same_for_the_same_seed_and_stop_at_their_budget() -> None:
    names = [(f"p{n:06d}", index) for n in range(40) for index in range(8)]
    first = [Faults(seed=1, share=0.2).choose(*name) for name in names]
    assert first == [Faults(seed=1, share=0.2).choose(*name) for name in names]
    injected = [inject for inject in first if inject is not None]
    assert 30 < len(injected) < 100 and {inject.when for inject in injected} == {"between", "command", "checkpoint"}
    assert all(1 <= inject.turn <= 5 for inject in injected)
    limited = Faults(seed=1, share=0.2, limit=5)
    assert sum(limited.choose(*name) is not None for name in names) == 5
    limited.active = False
    assert limited.choose("p000000", 0) is None


async def test_the_policys_own_doing_stays(subtests: Any) -> None:
    def bomb(sandbox: FakeSandbox, error: Exception) -> FakeSandbox:
        def after(command: str) -> None:
            if command == SCRIPT[1]:
                raise error

        sandbox.after_command = after
        return sandbox

    cases = {
        Cause.KILLED_ITSELF: SandboxDead("killed"),
        Cause.QUOTA: Conflict("no process left: all 256 are in use", sandbox="s"),
        Cause.NONSENSE: Invalid("arguments too long", sandbox="s"),
    }
    for cause, error in cases.items():
        with subtests.test(cause=cause):
            trajectory = await play(bomb(FakeSandbox(), error))
            assert trajectory.failure is not None and trajectory.failure.cause is cause
            assert blame(trajectory.failure) is Blame.POLICY
            assert (trajectory.status, trajectory.reward, trajectory.scored) == ("truncated", 0.0, True)


async def test_a_cut_action_is_not_executed() -> None:
    class Cutting(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
            generation = await super().generate(prompt_ids, sampling)
            if len(self.prompts) == 2:
                generation.token_ids.pop(), generation.logprobs.pop()
                generation.spans[:] = [WeightSpan(0, 0, len(generation.token_ids))]
                generation.finish_reason = "length"
            return generation

    sandbox = FakeSandbox()
    trajectory = await play(sandbox, Cutting(SCRIPT))
    assert sandbox.commands == ["echo start >> f", SCRIPT[0]]
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.CUT
    assert trajectory.scored and trajectory.turns[1].finish == "length"

    class Patient(Notebook):
        async def cut(self, sandbox: Any, action: str) -> Observation:
            return Observation("too long\n$ ", done=len(action) == 0)

    trajectory = await play(engine=Cutting(["true", "cut off", "true", "true", "true"]), env=Patient())
    assert trajectory.turns[1].observation == "too long\n$ " and trajectory.turns[2].action == "cut off"


async def test_only_the_trajectorys_own_time_counts() -> None:
    """What a command took is the trajectory's; what the engine took is nobody's."""
    sandbox = FakeSandbox()
    sandbox.duration = 3.0
    trajectory = await play(sandbox, limits=EpisodeLimits(step=8.0))
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.LATE
    assert trajectory.scored and len(trajectory.turns) == 3 and trajectory.own_s == pytest.approx(9.0, abs=1.0)

    slow = ScriptedEngine(SCRIPT)
    slow.delay = 0.4
    assert (await play(engine=slow, limits=EpisodeLimits(step=1.2))).status == "completed"


def test_every_answer_has_a_seed_of_its_own() -> None:
    seeds = {
        sampling_seed(7, EpisodeSpec(prompt=prompt, seed=0, index=index, start=start), turn)
        for prompt in ("p0", "p1")
        for index in range(8)
        for start in range(2)
        for turn in range(4)
    }
    assert len(seeds) == 2 * 8 * 2 * 4
    assert sampling_seed(None, EpisodeSpec(prompt="p0", seed=0), 0) is None


class Flood(Notebook):
    async def step(self, sandbox: Any, action: str) -> Observation:
        return Observation("x" * 100_000 + "end\n$ ")


async def test_an_observation_is_cut_in_the_middle_and_the_agent_reads_so() -> None:
    trajectory = await play(env=Flood(), limits=EpisodeLimits(max_length=400, max_observation=100))
    assert len(trajectory.tokens) < 400 and trajectory.failure is not None
    assert trajectory.failure.cause is Cause.LENGTH and blame(trajectory.failure) is Blame.POLICY
    read = trajectory.turns[0].observation
    assert 90 <= len(read) <= 100 and read.startswith("xxx") and read.endswith("end\n$ ")
    assert "characters left out" in read
    assert len(trajectory.turns) > 1  # and it went on


async def test_what_has_no_room_is_not_put_and_a_prompt_without_room_is_the_environments() -> None:
    trajectory = await play(env=Flood(), limits=EpisodeLimits(max_length=60))
    assert len(trajectory.tokens) <= 60 and trajectory.failure is not None

    class Long(Notebook):
        async def reset(self, sandbox: Any, seed: int) -> Observation:
            return Observation("x" * 100_000)

    trajectory = await play(env=Long(), limits=EpisodeLimits(max_length=60, max_observation=60))
    assert trajectory.failure is not None and blame(trajectory.failure) is Blame.ENVIRONMENT
    assert "the prompt has" in trajectory.failure.message
