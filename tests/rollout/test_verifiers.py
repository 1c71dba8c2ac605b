"""The package `verifiers` through the loop of episodes, in environments that `make setup-verifiers` makes for it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandbox import paths

ROOT = Path(__file__).parents[2]
PYTHON, CLASSIC = (paths.prefix() / name / "bin" / "python" for name in ("verifiers", "verifiers-classic"))


def printed(python: Path, code: str, tasks: str) -> Any:
    """What a program with the package says last, as JSON. It is told where these tasks are."""
    places = [str(ROOT), str(Path(msgspec.__file__).parents[1]), str(ROOT / f"tests/support/{tasks}_of_verifiers.py")]
    done = subprocess.run([python, "-c", code, *places], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PLAYED = """
import asyncio, json, sys
sys.path += sys.argv[1:3]
from pathlib import Path
from rollout.env_check import NULL, ORACLE, check
from rollout.environments.directory import load
from rollout.environments.verifiers import verifiers_environment
from sandbox.errors import Unsupported
import verifiers.v1 as vf

kind = load(Path(sys.argv[3])).environment
found = asyncio.run(check(kind, None, range(5)))
seen = {each.what: each.observed for each in found.findings}
module = sys.modules[type(kind.tasks[0]).__module__]

class Looking(module.SumTask):
    @vf.reward
    async def looks(self, trace, runtime) -> float:
        return 1.0

class Places(vf.Taskset[Looking]):
    def load(self):
        yield Looking(module.Sum(prompt="?", answer=1))

try:
    verifiers_environment(Places(vf.TasksetConfig()))
    refused = ""
except Unsupported as error:
    refused = str(error)
print(json.dumps({"right": found.right, "oracle": seen[ORACLE], "null": seen[NULL], "refused": refused,
                  "distinct": kind.distinct(), "system": kind().of(1)[0].system}))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="no verifiers; run `make setup-verifiers`")
def test_a_taskset_is_played_scored_by_its_own_rewards_and_refused_where_it_needs_more() -> None:
    reported = printed(PYTHON, PLAYED, "sums")
    assert reported["right"] and reported["distinct"] == 5 and reported["system"] == "Answer with a number."
    assert reported["oracle"] == "reward 1.000 over 5 seeds" and reported["null"] == "reward 0.250 over 5 seeds"
    assert "a runtime for its rewards" in reported["refused"]


CALLED = """
import asyncio, json, sys
sys.path += sys.argv[1:3]
from pathlib import Path
from rollout.env_check import NULL, ORACLE, check
from rollout.environments.directory import load
from rollout.environments.verifiers_classic import tool_call

kind = load(Path(sys.argv[3])).environment

async def work():
    found = await check(kind, None, range(3))
    env = kind()
    await env.reset(None, 1)
    said = [tool_call("shelves_look", shelf=2), tool_call("shelves_look", shelf=7), tool_call("shelves_look"),
            tool_call("other")]
    odd = ("[1]", "null", "3", '"shelf"')
    said += [f'<tool_call>{{"name": "shelves_look", "arguments": {each}}}</tool_call>' for each in odd]
    texts = [(await env.step(None, each)).text for each in said]
    end = await env.step(None, "elm")
    seen = {each.what: each.observed for each in found.findings}
    return {"right": found.right, "oracle": seen[ORACLE], "null": seen[NULL], "texts": texts,
            "end": [end.done, end.reward], "tools": env.tools}

print(json.dumps(asyncio.run(work())))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="no verifiers; run `make setup-verifiers`")
def test_tools_of_a_taskset_answer_calls_and_its_rewards_see_them() -> None:
    reported = printed(PYTHON, CALLED, "tools")
    assert reported["right"] and reported["end"] == [True, 1.0]
    assert reported["oracle"] == "reward 1.000 over 3 seeds" and reported["null"] == "reward 0.000 over 3 seeds"
    (tool,) = reported["tools"]
    assert tool["function"]["name"] == "shelves_look" and "shelf" in tool["function"]["parameters"]["properties"]
    oak, beyond, without, other, *odd = reported["texts"]
    assert oak == "oak" and "index out of range" in beyond and "shelf" in without and other == "no tool 'other'"
    assert len(odd) == 4 and all(item.startswith("the arguments of shelves_look are no ") for item in odd)


SHARED = """
import asyncio, json, sys
sys.path += sys.argv[1:3]
from pathlib import Path
from rollout.environments.directory import load
import verifiers.v1 as vf

kind = load(Path(sys.argv[3])).environment
begun = []

class Slow(vf.Toolset[vf.ToolsetConfig]):
    async def setup(self):
        begun.append(1)
        await asyncio.sleep(0.05)
        if len(begun) == 1:
            raise OSError("not yet")

    @vf.tool
    def echo(self, text: str) -> str:
        return text

async def work():
    kind.taskset.toolsets = lambda config: [Slow(config=vf.ToolsetConfig())]
    try:
        await kind().reset(None, 0)
    except OSError:
        pass
    envs = [kind() for _ in range(3)]
    resets = [asyncio.create_task(env.reset(None, 0)) for env in envs]
    await asyncio.sleep(0.01)
    resets[0].cancel()
    ended = await asyncio.gather(*resets, return_exceptions=True)
    return [type(each).__name__ for each in ended], len(begun), len(envs[2].tools)

print(json.dumps(asyncio.run(work())))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="no verifiers; run `make setup-verifiers`")
def test_tools_of_all_tasks_are_set_up_once_whatever_becomes_of_the_episode_that_began_it() -> None:
    ended, begun, tools = printed(PYTHON, SHARED, "tools")
    assert ended == ["CancelledError", "Observation", "Observation"] and begun == 2 and tools == 2


SPOKEN = """
import asyncio, json, sys
sys.path += sys.argv[1:3]
from pathlib import Path
from rollout.env_check import NULL, ORACLE, check
from rollout.user_code import load as load_code
from rollout.environments.verifiers_classic import classic_environment, tool_call
from sandbox.errors import Unsupported
import verifiers as vf

made = load_code("errands", Path(sys.argv[3]))
told = {}
for name in ("STATEFUL", "GUESSED"):
    found = asyncio.run(check(getattr(made, name), None, range(3)))
    seen = {each.what: each.observed for each in found.findings}
    told[name] = [found.right, seen[ORACLE], seen[NULL]]

async def turns():
    env = made.STATEFUL()
    first = await env.reset(None, 1)
    both = env.read_action("I look.", [("look", '{"shelf": 0}'), ("look", '{"shelf": 1}')])
    said = [first.text, (await env.step(None, both)).text]
    said.append((await env.step(None, tool_call("move", item="cat", shelf=9))).text)
    cut = await env.cut(None, "I thi")
    return said, env.system, [tool["function"]["name"] for tool in env.tools], env.tools[0], cut.done, cut.reward

def grouped(states):
    return [0.0 for _ in states]

try:
    classic_environment(made.HigherLower(dataset=made.GUESSED.rows, rubric=vf.Rubric(funcs=[grouped])))
    told["refused"] = ""
except Unsupported as error:
    told["refused"] = str(error)
told["turns"] = asyncio.run(turns())
print(json.dumps(told))
"""


@pytest.mark.skipif(not CLASSIC.exists(), reason="no verifiers-classic; run `make setup-verifiers`")
def test_environments_of_several_turns_and_tools_are_played_by_their_own_rules() -> None:
    reported = printed(CLASSIC, SPOKEN, "errands")
    for name in ("STATEFUL", "GUESSED"):
        right, oracle, null = reported[name]
        assert right and oracle == "reward 1.000 over 3 seeds" and null == "reward 0.000 over 3 seeds"
    said, system, tools, poll, ended, reward = reported["turns"]
    assert said == ["Bring the rope to shelf 9.", "lamp\nrope", "there is no cat"]
    assert (system, tools, ended, reward) == ("You mind a stockroom.", ["look", "move"], True, 0.0)
    assert "store" not in poll["function"]["parameters"]["properties"]
    assert "whole groups" in reported["refused"]
