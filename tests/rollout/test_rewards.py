"""Scoring in a fork of the final state: by functions that are right, hang, die, raise, or say nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from rollout.decide import anchor
from rollout.decide.blame import Blame, Cause, EpisodePhase, blame
from rollout.decide.keeping import KeepPlan
from rollout.engine.client import Sampling
from rollout.episode.manager import EpisodeManager
from rollout.episode.renderer import ChatRenderer
from rollout.episode.retained import RetainedStates
from rollout.episode.spec import EpisodeSpec
from rollout.labels import LabellingClient
from rollout.messages import FinalState, Trajectory, TurnRecord
from rollout.rewards import Score, Scoring, library
from rollout.rewards.messages import ScorerFailed
from rollout.rewards.service import RewardService, apply
from rollout.rewards.web import at
from rollout.rewards.weighted import RewardPlan, model, need_rewards, planned, weighted
from rollout.store.disk import DiskThread
from rollout.store.retained import RetainedLedger
from sandbox import Client
from sandbox.errors import Invalid, PagurusError
from tests.support import reward_functions as functions
from tests.support.daemon_host import missing
from tests.support.endpoint_engines import small_chat_model
from tests.support.rollout_fakes import END, SCRIPT, FakeHost, Letters, Notebook, ScriptedEngine
from trainer.reports.report import by_scorer

SAMPLING = Sampling(max_tokens=64, stop_token_ids=[END])
real = pytest.mark.skipif(bool(missing()), reason=missing())


class Scored(Notebook):
    """The notebook, whose own reward is left out: only the scorer's counts."""

    reward = functions.lines(target=3)

    async def step(self, sandbox: Any, action: str) -> Any:
        observed = await super().step(sandbox, action)
        return type(observed)(observed.text, done=observed.done)


def ended(scoring: Scoring, checkpoint: str = "", **fields: Any) -> Trajectory:
    """A trajectory that waits to be scored."""
    turns = [TurnRecord(index=0, action="say 4", observation="4")]
    final = FinalState(scoring=scoring, seed=7, checkpoint=checkpoint)
    return Trajectory(turns=turns, opening="2 + 2?", final=final, **fields)


@contextlib.asynccontextmanager
async def served(path: str, answer: Any) -> AsyncIterator[str]:
    """A server of one route; its address."""
    app = web.Application()
    app.router.add_post(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def wait_until_gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)


@pytest.fixture
async def rewards(tmp_path: Path) -> AsyncIterator[RewardService]:
    async with RewardService(FakeHost(), workers=2, ledger=tmp_path / "scores.sqlite") as service:
        yield service


def test_limits_follow_the_anchor_and_never_shrink_again() -> None:
    assert [anchor.limit(item) for item in (None, 0.1, 4.0, 100.0)] == [30.0, 2.0, 6.0, 30.0]
    for existing in (None, 0.0, 0.5, 3.0, 19.0, 1000.0):
        for longest in (1.0, 30.0, 600.0):
            tried = anchor.limits(existing, longest)
            assert tried == sorted(tried) and tried[-1] == longest
    assert anchor.raised(None, 2.0) == 2.0 and anchor.raised(3.0, 2.0) == 3.0
    assert not anchor.believed(0) and anchor.believed(1)


async def test_a_function_reads_what_was_said(rewards: RewardService) -> None:
    assert await rewards.score(ended(functions.says(word="4"))) == Score(reward=1.0)
    assert await rewards.score(ended(functions.says(word="5"))) == Score(reward=0.0)
    by_turn = await rewards.score(ended(functions.item_turn()))
    assert by_turn.turns == [0.25] and by_turn.total == 0.75


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raise", "RuntimeError: broken"),
        ("die", "its process died"),
        ("nan", "not between"),
        ("much", "not between"),
        ("text", "which is no number"),
        ("turns", "it rewards 9 turns of 1"),
        ("forge", "it wrote to the pool itself"),
    ],
)
async def test_a_scorer_that_fails_is_tried_again_and_is_no_reward(
    rewards: RewardService, tmp_path: Path, how: str, why: str
) -> None:
    once = functions.misbehaves(how=how, times=1, notes=str(tmp_path / "once"))
    assert (await rewards.score(ended(once))).reward == 1.0
    always = functions.misbehaves(how=how, times=99, notes=str(tmp_path / "always"))
    with pytest.raises(ScorerFailed, match=why):
        await rewards.score(ended(always))
    assert (await rewards.score(ended(functions.says(word="4")))).reward == 1.0  # whoever comes next is served


async def test_a_scorer_that_hangs_is_killed_with_what_it_started(rewards: RewardService, tmp_path: Path) -> None:
    hangs = functions.misbehaves(how="hang", times=1, notes=str(tmp_path / "notes"))
    hangs = Scoring(**{name: getattr(hangs, name) for name in hangs.__struct_fields__} | {"longest": 0.5})
    assert (await rewards.score(ended(hangs))).reward == 1.0
    await asyncio.to_thread(wait_until_gone, int((tmp_path / "notes.child").read_text()))


async def test_what_was_scored_is_not_scored_again(rewards: RewardService, tmp_path: Path) -> None:
    scoring = functions.counts(notes=str(tmp_path / "notes"))
    scores = [await rewards.score(ended(scoring)) for _ in range(3)]
    other = ended(scoring)
    other.turns[0].observation = "5"
    await rewards.score(other)
    assert scores == [Score(reward=1.0)] * 3 and (tmp_path / "notes").read_text() == "xx" and rewards.existing == 2


async def test_a_command_that_was_cut_off_is_believed_at_the_second_limit(tmp_path: Path) -> None:
    host = FakeHost()
    sandbox = await host.create("")
    async with RewardService(host) as service:
        score = await service.score(ended(functions.slow(notes=str(tmp_path / "n")), sandbox.checkpoints[0][0].id))
    assert score.reason == "too slow" and (tmp_path / "n").read_text().split() == ["30.0", "30.0"]
    assert all(item.removed for item in host.sandboxes[1:]) and len(host.sandboxes) == 3


async def test_a_function_at_an_address(rewards: RewardService) -> None:
    requested: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        requested.append(body)
        if len(requested) == 1:
            return web.Response(status=503, text="starting")
        if len(requested) == 2:
            return web.json_response({"id": "another", "reward": 1.0})
        return web.json_response({"id": body["id"], "reward": 0.5, "reason": "half"})

    async with served("/score", answer) as url:
        score = await rewards.score(ended(at(f"{url}/score", strict=True)))
    assert score == Score(reward=0.5, reason="half") and len(requested) == 3
    assert requested[2]["options"] == {"strict": True} and requested[2]["turns"] == [
        {"action": "say 4", "observation": "4"}
    ]


def manager(host: Any, rewards: RewardService | None, kind: Any = Scored, **options: Any) -> EpisodeManager:
    engine = ScriptedEngine(SCRIPT)
    return EpisodeManager(environment=kind, host=host, engine=engine, tokenizer=Letters(), rewards=rewards, **options)


async def test_an_episode_is_scored_in_a_fork_and_its_sandbox_is_free_before() -> None:
    host = FakeHost()
    async with RewardService(host) as service:
        episodes = manager(host, service)
        trajectory = await episodes.run(EpisodeSpec(prompt="p", seed=3), SAMPLING)
        (sandbox,) = host.sandboxes
        assert not sandbox.alive and not sandbox.removed and trajectory.reward == 0.0
        await episodes.score(trajectory)
    assert trajectory.reward == 1.0 and trajectory.score is not None and trajectory.status == "completed"
    assert len(host.sandboxes) == 2 and all(item.removed for item in host.sandboxes)


async def test_the_policys_end_is_scored_too() -> None:
    class Short(Scored):
        max_turns = 2
        reward = functions.cause(target="turns")

    host = FakeHost()
    async with RewardService(host) as service:
        trajectory = await manager(host, service, Short).play(EpisodeSpec(prompt="p", seed=3), SAMPLING)
    assert (trajectory.status, trajectory.reward) == ("truncated", 1.0)


@pytest.mark.parametrize(
    ("how", "cause", "whose"),
    [
        ("raise", Cause.RAISED, Blame.ENVIRONMENT),
        ("nan", Cause.RAISED, Blame.ENVIRONMENT),
        ("die", Cause.SCORER, Blame.PLATFORM),
    ],
)
async def test_a_function_that_raises_is_the_environments_failure_and_one_that_dies_the_platforms(
    tmp_path: Path, how: str, cause: Cause, whose: Blame
) -> None:
    class Broken(Scored):
        reward = functions.misbehaves(how=how, times=99, notes=str(tmp_path / "n"))

    host = FakeHost()
    async with RewardService(host) as service:
        trajectory = await manager(host, service, Broken).play(EpisodeSpec(prompt="p", seed=3), SAMPLING)
    failure = trajectory.failure
    assert failure is not None and (failure.phase, failure.cause) == (EpisodePhase.SCORE, cause)
    assert blame(failure) is whose and not trajectory.scored


async def test_what_a_function_raises_on_is_scored_as_the_plan_says(tmp_path: Path) -> None:
    class Broken(Scored):
        reward = functions.misbehaves(how="raise", times=99, notes=str(tmp_path / "n"))

    host = FakeHost()
    async with RewardService(host) as service:
        made = manager(host, service, Broken)
        made.failed_reward = -0.5
        trajectory = await made.play(EpisodeSpec(prompt="p", seed=3), SAMPLING)
    assert trajectory.scored and trajectory.reward == -0.5
    assert trajectory.score is not None and "RuntimeError: broken" in trajectory.score.reason


@real
async def test_in_real_sandboxes(host: Client, tmp_path: Path) -> None:
    """The agent's processes are in the fork, as it left them; a final state that is kept can be scored again."""
    labelled, disk, ledger = LabellingClient(host, tmp_path / "run"), DiskThread(), RetainedLedger(tmp_path)
    async with RewardService(labelled) as service:
        episodes = manager(labelled, service, retained=RetainedStates(labelled, ledger, disk, KeepPlan(trajectories=2)))
        played = [await episodes.play(EpisodeSpec(prompt=f"p{seed}", seed=seed), SAMPLING) for seed in (1, 2, 3)]
        assert [item.reward for item in played] == [1.0] * 3, [item.reason for item in played]
        retained = await labelled.retained()
        assert sorted(retained) == sorted(item.sandbox for item in played[1:])
        assert all([(await host.get(name)).info.state == "dead" for name in retained])
        other = await service.score(played[2], functions.lines(target=7))
        assert other.reward == 0.0
    await labelled.remove(retained)
    disk.close()
    ledger.close()
    assert not [info for info in await host.sandboxes() if str(tmp_path) in str(info.labels)]


async def test_library_functions(rewards: RewardService) -> None:
    assert (await rewards.score(ended(library.matches(pattern=r"say \d")))).reward == 1.0
    assert (await rewards.score(ended(library.matches(pattern=r"\d")))).reward == 0.0
    requested: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        requested.append(await request.json())
        said = ["no idea", 'Sure: {"score": 7, "reason": "nearly"}'][len(requested) > 1]
        return web.json_response({"choices": [{"message": {"content": said}}]})

    async with served("/v1/chat/completions", answer) as url:
        score = await rewards.score(ended(library.judge(url=url, model="m", rubric="is it right?")))
    assert score == Score(reward=0.7, reason="nearly") and len(requested) == 2
    assert "2 + 2?" in requested[0]["messages"][1]["content"]


async def test_a_judge_is_asked_again_where_it_is_busy_and_never_twice_for_an_answer(tmp_path: Path) -> None:
    requested: list[float] = []

    async def answer(request: web.Request) -> web.Response:
        requested.append(time.monotonic())
        if len(requested) == 1:
            return web.Response(status=429, headers={"retry-after": "1"})
        if len(requested) == 2:
            return web.json_response({"choices": [{"message": {"content": "no grade"}}]})
        return web.json_response({"choices": [{"message": {"content": '{"score": 4}'}}]})

    cache = str(tmp_path / "answers.sqlite")
    async with served("/v1/chat/completions", answer) as url:
        judge = library.judge(url=url, model="m", rubric="is it right?", cache=cache)
        for run in range(2):  # the second run has a ledger of its own, and the first one's answers
            async with RewardService(FakeHost(), ledger=tmp_path / f"{run}.sqlite") as service:
                assert (await service.score(ended(judge))).reward == 0.4
    assert len(requested) == 3 and requested[1] - requested[0] >= 1.0


async def test_a_judge_that_refuses_is_asked_once_in_a_try(rewards: RewardService) -> None:
    requested: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        requested.append("")
        return web.Response(status=401, text="no such key")

    async with served("/v1/chat/completions", answer) as url:
        with pytest.raises(ScorerFailed, match=r"answered 401.*no such key") as caught:
            await rewards.score(ended(library.judge(url=url, model="m", rubric="")))
    assert caught.value.raised and len(requested) == anchor.TRIES


async def test_several_rewards_are_weighted_and_each_is_named(rewards: RewardService, tmp_path: Path) -> None:
    four, never = functions.says(word="4"), functions.says(word="x")
    parts = weighted(said=(four, 0.5), turns=functions.item_turn(), no=(never, 9))
    assert not parts.forks
    trajectory = ended(parts)
    score = await rewards.score(trajectory)
    assert (score.reward, score.turns) == (1.0, [0.25])
    assert score.parts == {"said": 1.0, "turns": 0.75, "no": 0.0}
    apply(trajectory, score)
    assert (trajectory.reward, trajectory.turns[0].reward) == (1.25, 0.25)
    assert by_scorer("reward", [trajectory, ended(parts)]) == {"reward": {"no": 0.0, "said": 1.0, "turns": 0.75}}
    assert by_scorer("reward", [ended(parts)]) == {}
    bad = functions.misbehaves(how="raise", times=9, notes=str(tmp_path / "notes"))
    with pytest.raises(ScorerFailed, match="misbehaves"):
        await rewards.score(ended(weighted(said=four, bad=bad)))


def test_rewards_of_a_plan(tmp_path: Path) -> None:
    own = functions.says(word="own")
    file = tmp_path / "mine.py"
    file.write_text(
        "from rollout import reward\n\n@reward(forks=False)\ndef short(final, *, limit=3):\n    return 1.0\n"
    )
    plans = [
        RewardPlan(name="environment", weight=2.0),
        RewardPlan(name="mine", function=f"{file}:short", options={"limit": 9}),
        RewardPlan(name="rule", function="rollout.rewards.library:matches", options={"pattern": "x"}, weight=-1.0),
        RewardPlan(name="far", url="http://127.0.0.1:1/x"),
    ]
    made = planned(plans, own)
    assert made is not None and [(part.name, part.weight) for part in made.parts] == [
        ("environment", 2.0), ("mine", 1.0), ("rule", -1.0), ("far", 1.0),
    ]  # fmt: skip
    assert made.parts[0].scoring == own and made.parts[1].scoring.options == {"limit": 9}
    assert planned([], own) == own and planned([], None) is None
    need_rewards(plans)
    for plan, named in (
        (RewardPlan(name="a", function=f"{file}:long"), "no reward function"),
        (RewardPlan(name="a", function="nowhere.at.all:x"), "nowhere"),
        (RewardPlan(name="a", function=f"{tmp_path}/none.py:x"), "no reward function"),
        (RewardPlan(name="a", model=str(tmp_path)), "is no model"),
        (RewardPlan(name="a", function="rollout.rewards.library:matches"), "pattern"),
    ):
        with pytest.raises(PagurusError, match=named):
            need_rewards([plan])
    with pytest.raises(Invalid, match="of one name"):
        need_rewards([plans[1], plans[1]])
    with pytest.raises(Invalid, match="which has none"):
        planned(plans, None)


def reward_model(directory: Path) -> Any:
    """A small one, with the template of a chat model; and transformers' own model of it."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    small_chat_model(directory)
    vocabulary = json.loads((directory / "config.json").read_bytes())["vocab_size"]
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, max_position_embeddings=256,
    )  # fmt: skip
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    made = LlamaForSequenceClassification(config).eval()
    made.save_pretrained(directory)
    return made


async def test_a_reward_model_says_what_transformers_says(tmp_path: Path) -> None:
    theirs = reward_model(tmp_path / "rm")
    renderer = ChatRenderer.load(tmp_path / "rm")
    trajectory = ended(model(str(tmp_path / "rm")))
    trajectory.turns.append(TurnRecord(index=1, action="say 5", observation="no"))
    messages = [
        {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "say 4"},
        {"role": "user", "content": "4"}, {"role": "assistant", "content": "say 5"},
    ]  # fmt: skip
    ids = [renderer.closed(messages[:2]), renderer.closed(messages)]
    with torch.inference_mode():
        first, last = (float(theirs(input_ids=torch.tensor([item])).logits[0, 0]) for item in ids)
    async with RewardService(FakeHost(), workers=2, log=tmp_path / "log") as service:
        score = await service.score(trajectory)
        assert score.reward == pytest.approx(last, abs=1e-5) and score.turns == []
        by_turn = await service.score(trajectory, model(str(tmp_path / "rm"), turns=True))
        assert by_turn.reward == 0.0 and by_turn.turns == pytest.approx([first, last - first], abs=1e-5)
        long = ended(model(str(tmp_path / "rm")))
        long.turns[0].action = "4 " * 500
        with pytest.raises(ScorerFailed, match="256 positions"):
            await service.score(long)


async def test_a_reward_model_behind_a_server_is_asked_for_each_turn(rewards: RewardService) -> None:
    async def answer(request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        return web.json_response({"data": [{"data": [[0.25 * len(messages)]]}]})

    async with served("/pooling", answer) as url:
        score = await rewards.score(ended(library.served_model(url=url, model="rm")))
        turns = await rewards.score(ended(library.served_model(url=url, model="rm", turns=True)))
    assert score.reward == 0.5 and turns.turns == [0.5]


@real
async def test_a_suite_sees_the_work_and_not_what_still_runs(host: Client, tmp_path: Path) -> None:
    labelled = LabellingClient(host, tmp_path / "run")
    racing = "(while sleep 0.01; do test -e /t/check.sh && echo true > /t/check.sh; done) > /dev/null 2>&1 &"
    async with labelled.create("debian") as sandbox, RewardService(labelled) as service:
        await sandbox.exec(f"echo good > /work; {racing}")
        point = await sandbox.checkpoint()
        for target, worth in (("good", 1.0), ("bad", 0.0)):
            check = library.suite(
                command="sh /t/check.sh", files={"/t/check.sh": f"sleep 0.1\ngrep -x {target} /work\n"}
            )
            assert (await service.score(ended(check, point.id))).reward == worth
