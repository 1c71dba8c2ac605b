"""A model behind OpenAI's protocol at an environment: the conversation, the score, what is lost."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.blame import Cause, EpisodePhase, TrajectoryFailure
from rollout.decide.passed import at_least_one, interval
from rollout.engine import chat
from rollout.engine.chat import END, WRITTEN, Characters, ChatEngine, action, conversation
from rollout.engine.client import Sampling
from rollout.environments.base import Environment, Observation
from rollout.episode.talk import talk_of
from rollout.evaluate import scored
from rollout.messages import Trajectory
from sandbox.errors import EngineFailed
from tests.support.daemon_host import Daemon
from tests.support.rollout_engines import publish

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = ROOT / "tests" / "support" / "two_methods.py"


class Model(BaseHTTPRequestHandler):
    """Reads the file, then says what it read: but of odd numbers it says another."""

    requested: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str]] = []
    busy: ClassVar[list[int]] = []  # statuses that it answers with first

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requested.append(body)
        self.keys.append(self.headers.get("Authorization", ""))
        if self.busy:
            self._reply({"error": "busy"}, self.busy.pop())
            return
        last = body["messages"][-1]["content"]
        if last.splitlines()[0].isdigit():
            said = int(last.splitlines()[0])
            text = f"answer {said + said % 2}"
        else:
            text = "```sh\ncat /srv/number\n```"
        self._reply({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]})

    def _reply(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def model() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for retained in (Model.requested, Model.keys, Model.busy):
            retained.clear()


def pagurus(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PAGURUS_RUN": str(daemon.run), "OPENAI_API_KEY": "secret"}
    command = [sys.executable, "-m", "pagurus", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_an_environment_of_two_methods_is_played(daemon: Daemon, model: str) -> None:
    done = pagurus(daemon, "play", str(ENVIRONMENT), "--model", model, "--seed", "6")
    assert done.returncode == 0, done.stderr
    assert "A number lies below /srv" in done.stdout and "> cat /srv/number   [files]\n42\n" in done.stdout
    assert done.stdout.endswith("reward 1 in 2 turns, completed\n")
    first, second = Model.requested
    assert (first["model"], Model.keys[0]) == ("first", "Bearer secret")
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "cat /srv/number"
    assert second["messages"][3]["content"] == "42\n$ "


EXISTING = """
from rollout import Environment, Observation

class Known(Environment):
    image = ""
    async def reset(self, sandbox, seed):
        return Observation("say yes")
    async def step(self, sandbox, action):
        return Observation("", reward=float(action == "yes"), done=True)
    def oracle(self, seed):
        return ["yes"]

ENVIRONMENT = Known
"""


def test_the_oracle_plays_what_is_right(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "known.py").write_text(EXISTING)
    for who, reward in (("oracle", 1), ("null", 0)):
        done = pagurus(daemon, "play", str(tmp_path / "known.py"), "--model", who)
        assert done.returncode == 0 and f"reward {reward} in 1 turns" in done.stdout, done.stderr


def test_a_model_is_scored(daemon: Daemon, model: str) -> None:
    words = ["eval", str(ENVIRONMENT), "--model", f"{model}/v1", "--name", "mine", "--episodes", "4", "--samples", "2"]
    done = pagurus(daemon, *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["seeds"], result["samples"], result["lost"], result["reward"]) == (4, 2, 0, 0.5)
    once, twice = result["rates"]
    assert (once["k"], once["mean"], twice["k"], twice["mean"]) == (1, 0.5, 2, 0.5)  # it always says the same
    assert 0.1 < once["low"] < 0.2 and 0.8 < once["high"] < 0.9
    assert "pass@1 0.500, 95 % between 0.1" in pagurus(daemon, *words).stdout
    assert {body["model"] for body in Model.requested} == {"mine"}
    assert json.loads(pagurus(daemon, "ls", "--json").stdout) == []


def test_a_version_of_a_run_is_scored_as_it_was_trained(daemon: Daemon, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    run = tmp_path / "run"
    for version in (3, 4):
        publish(run / "weights", version)
    words = ["eval", str(ENVIRONMENT), "--episodes", "2", "--samples", "2", "--max-tokens", "16", "--json"]
    for model in (str(run), f"{run}@3"):
        done = pagurus(daemon, *words, "--model", model)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["seeds"], result["samples"], result["lost"]) == (2, 2, 0) and result["turns"] >= 1
        assert [rate["k"] for rate in result["rates"]] == [1, 2]
    done = pagurus(daemon, *words, "--model", f"{run}@9")
    assert done.returncode == 1 and "9" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch.py", "--model", "http://127.0.0.1:9"], "nosuch.py"),
        ([str(ENVIRONMENT), "--model", "here"], "'here' is neither an address nor a directory"),
    ],
)
def test_what_cannot_be_played_is_said(daemon: Daemon, words: list[str], said: str) -> None:
    done = pagurus(daemon, "play", *words)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1


async def test_a_busy_server_is_asked_again(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "PAUSE", 0.01)
    async with ChatEngine(model, "m") as engine:
        Model.busy += [503, 429]
        text = Characters()
        answer = await engine.generate(text.encode("go"), Sampling())
        assert text.decode(answer.token_ids) == "cat /srv/number" and answer.finish_reason == "stop"
        assert len(Model.requested) == 3
        Model.busy += [400]
        with pytest.raises(EngineFailed, match="status 400"):
            await engine.generate(text.encode("go"), Sampling())
        Model.busy += [503] * chat.ATTEMPTS
        with pytest.raises(EngineFailed, match="status 503"):
            await engine.generate(text.encode("go"), Sampling())


@given(st.lists(st.tuples(st.booleans(), st.text(min_size=1)), max_size=6))
def test_a_conversation_is_what_was_said(parts: list[tuple[bool, str]]) -> None:
    text = Characters()
    ids: list[int] = []
    for ours, said in parts:
        ids += [WRITTEN + ord(char) for char in said] + [END] if ours else text.encode(said)
    reported = conversation(ids, "")
    assert "".join(message["content"] for message in reported) == "".join(said for _, said in parts)
    roles = [message["role"] for message in reported]
    assert all(left != right for left, right in itertools.pairwise(roles))


class Shelves(Environment):
    """Tells its model a rule and a tool."""

    image, system = "", "Keep order."
    tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},)

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        return Observation("go")

    async def step(self, sandbox: Any, action: str) -> Observation:
        return Observation(action, done=True)


def test_a_served_model_is_told_what_its_environment_says_and_its_calls_are_read() -> None:
    talk, trajectory = talk_of(Shelves(), Characters(), None), Trajectory()
    talk.open(trajectory, Observation("go"))
    first, second = conversation(trajectory.tokens, None)
    assert first["content"].startswith("Keep order.\n") and '"name": "look"' in first["content"]
    assert second == {"role": "user", "content": "go"}
    assert conversation(trajectory.tokens, "Mine.")[0] == {"role": "system", "content": "Mine."}
    assert conversation(Characters().encode("go"), None)[0]["content"] == chat.SYSTEM
    said = 'Hm. <tool_call>{"name": "look", "arguments": {"shelf": "top"}}</tool_call>'
    assert talk.read([*(WRITTEN + ord(char) for char in said), END], trajectory.tokens, complete=True) == "top"


def test_an_action_is_without_its_fence() -> None:
    assert [action(text) for text in ("ls\n", "```\nls\ncat x\n```", "`ls`", "")] == ["ls", "ls\ncat x", "`ls`", ""]


def test_pass_at_k_against_the_definition() -> None:
    """By drawing: of many k out of n, in how many is at least one that passed."""
    drawn = random.Random(0)
    for samples, passed, k in ((4, 1, 2), (8, 3, 4), (5, 0, 5), (5, 5, 1)):
        outcomes = [True] * passed + [False] * (samples - passed)
        share = sum(any(drawn.sample(outcomes, k)) for _ in range(20_000)) / 20_000
        assert math.isclose(at_least_one(samples, passed, k), share, abs_tol=0.02)
    with pytest.raises(ValueError):
        at_least_one(2, 1, 3)


@given(st.lists(st.floats(min_value=0, max_value=1), min_size=1, max_size=50))
def test_an_interval_holds_its_mean_and_shrinks(values: list[float]) -> None:
    mean, low, high = interval(values)
    assert 0 <= low <= mean + 1e-9 and mean - 1e-9 <= high <= 1
    _, less, more = interval(values * 4)
    assert more - less <= high - low


def test_what_the_platform_lost_is_not_scored() -> None:
    def end(reward: float, status: Any = "completed") -> Trajectory:
        failure = (
            TrajectoryFailure(phase=EpisodePhase.CREATE, cause=Cause.HOST, message="no") if status == "failed" else None
        )
        return Trajectory(reward=reward, status=status, failure=failure, reason="no room" if failure else "")

    result = scored([[end(1), end(0)], [end(1), end(0, "failed")], [end(0), end(0, "truncated")]])
    assert (result.seeds, result.lost, result.reward, result.reasons) == (2, 1, 0.25, ["no room"])
    assert [(rate.k, rate.mean) for rate in result.rates] == [(1, 0.25), (2, 0.5)]
