"""The package `verifiers` through the loop of episodes, in the environment that `make setup-verifiers` makes for it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from sandbox import paths

ROOT = Path(__file__).parents[2]
PYTHON = paths.prefix() / "verifiers" / "bin" / "python"
PLAYED = """
import asyncio, json, sys
sys.path += sys.argv[1:3]
from pathlib import Path
from rollout.environments.check import NULL, ORACLE, check
from rollout.environments.folder import load
from rollout.environments.verifiers import verifiers_environment
from sandbox.errors import Unsupported
import verifiers.v1 as vf

kind = load(Path(sys.argv[3])).environment
found = asyncio.run(check(kind, None, range(5)))
seen = {each.what: each.seen for each in found.findings}
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
    places = [str(ROOT), str(Path(msgspec.__file__).parents[1]), str(ROOT / "tests/support/sums_of_verifiers.py")]
    done = subprocess.run([PYTHON, "-c", PLAYED, *places], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["right"] and told["distinct"] == 5 and told["system"] == "Answer with a number."
    assert told["oracle"] == "reward 1.000 over 5 seeds" and told["null"] == "reward 0.250 over 5 seeds"
    assert "a runtime for its rewards" in told["refused"]
