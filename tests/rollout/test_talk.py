"""Episodes with chat models: one environment, several families, token for token."""

from __future__ import annotations

from typing import Any

import pytest

from rollout import Environment, Observation, Trajectory
from rollout.engine.client import Sampling
from rollout.episode.manager import EpisodeManager
from rollout.episode.spec import EpisodeSpec
from rollout.episode.talk import NOT_EXECUTED, Chat, sampled
from tests.rollout.test_endpoints import BASH, Speaker
from tests.support.chat_models import need_models

pytestmark = pytest.mark.filterwarnings("default")


class Counting(Environment):
    """Says how often it was told something; three answers end it."""

    system = "You count."
    tools = (BASH,)

    def __init__(self) -> None:
        self.last_seen: list[str] = []

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        return Observation("begin")

    async def step(self, sandbox: Any, action: str) -> Observation:
        self.last_seen.append(action)
        return Observation(f"answer {len(self.last_seen)}", reward=1.0, done=len(self.last_seen) == 3)


class Silent:
    """A sandbox that nothing is asked of."""

    id = "none"

    class info:
        head = None

    async def tree(self) -> list[Any]:
        return []


async def play(engine: Speaker, env: Counting) -> Trajectory:
    from rollout.episode.records import label
    from rollout.episode.turns import Episode

    manager = EpisodeManager(
        environment=lambda: env,
        host=None,
        engine=engine,
        tokenizer=None,
        renderer=engine.renderer,  # type: ignore[arg-type]
    )
    trajectory, spec = Trajectory(), EpisodeSpec(prompt="p", seed=0)
    label(trajectory, spec, Sampling())
    await Episode(manager, env, Silent(), trajectory, spec, Sampling(), None, None).run(())
    return trajectory


CALL = '<tool_call>\n{"name":  "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    need_models()


async def test_an_episode_of_calls_is_one_sample() -> None:
    env, engine = Counting(), Speaker("qwen2.5", "I look.\n" + CALL, "so", "done")
    trajectory = await play(engine, env)
    assert trajectory.status == "completed", trajectory.reason
    assert env.last_seen == ["ls", "so", "done"] and trajectory.reward == 3.0 and not trajectory.breaks
    trajectory.check()
    assert [trajectory.tokens[:at] for _, at, _ in sampled(trajectory)] == engine.requested
    text = engine.renderer.decode(trajectory.tokens)
    assert CALL in text and "<tool_response>\nanswer 1\n</tool_response>" in text and "You count." in text


class Several(Counting):
    """Carries out every call of an answer, and says what came of each."""

    def read_action(self, content: str, calls: Any) -> str:
        return " ".join(arguments for _, arguments in calls) or content

    async def step(self, sandbox: Any, action: str) -> Observation:
        seen = await super().step(sandbox, action)
        return Observation("both", done=seen.done, results=("first result", "second result" * 500))


async def test_each_call_of_an_answer_gets_its_own_result() -> None:
    engine = Speaker("qwen2.5", CALL + "\n" + CALL, "so", "done")
    trajectory = await play(engine, Several())
    text = engine.renderer.decode(trajectory.tokens)
    assert "<tool_response>\nfirst result\n</tool_response>\n<tool_response>\nsecond result" in text
    assert text.count("second result") < 500  # results together are bounded as one observation is
    chat = Chat(Several(), engine.renderer)
    chat.recall(trajectory, last_seen=True)
    results = [message["content"] for message in chat.history if message["role"] == "tool"]
    assert results[0] == "first result" and results[1].startswith("second result")


async def test_calls_that_are_not_carried_out_say_so() -> None:
    engine = Speaker("qwen2.5", CALL + "\n" + CALL, "so", "done")
    trajectory = await play(engine, Counting())
    text = engine.renderer.decode(trajectory.tokens)
    assert f"<tool_response>\nanswer 1\n</tool_response>\n<tool_response>\n{NOT_EXECUTED}\n" in text


async def test_where_a_template_drops_reasoning_a_new_sample_begins() -> None:
    env = Counting()
    engine = Speaker("qwen3", *[f"<think>\nhm {n}\n</think>\n\nyes {n}" for n in range(3)])
    trajectory = await play(engine, env)
    assert trajectory.status == "completed", trajectory.reason
    assert env.last_seen == ["yes 0", "yes 1", "yes 2"] and len(trajectory.breaks) == 2
    trajectory.check()
    assert [trajectory.tokens[start:at] for start, at, _ in sampled(trajectory)] == engine.requested
    assert len(trajectory.parts) == 3 and trajectory.parts[-1][1] == len(trajectory.tokens)
    first = engine.renderer.decode(trajectory.tokens[slice(*trajectory.parts[0])])
    second = engine.renderer.decode(trajectory.tokens[slice(*trajectory.parts[1])])
    assert "hm 0" in first and "hm 0" not in second and "hm 1" in second


async def test_a_successor_knows_the_conversation() -> None:
    engine = Speaker("qwen2.5", "I look.\n" + CALL, "so", "done")
    trajectory = await play(engine, Counting())
    chat = Chat(Counting(), engine.renderer)
    chat.recall(trajectory, last_seen=False)
    roles = [message["role"] for message in chat.history]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert chat.history[2]["tool_calls"][0]["function"]["name"] == "bash"
    before = trajectory.tokens[: sampled(trajectory)[2][1]]
    again = engine.renderer.bridge(
        trajectory.tokens[: sampled(trajectory)[1][2]], chat.history[:5], chat.history[5:6], [BASH]
    )
    assert again == before
