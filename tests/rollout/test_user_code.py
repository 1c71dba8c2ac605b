"""Environments and rewards in files of a user's: which errors of theirs are found before a run begins, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.environments import directory
from rollout.rewards.messages import Scoring, ScoringRequest
from rollout.rewards.pool import WorkerPool
from rollout.rewards.weighted import RewardPlan
from sandbox.errors import Invalid

TASK = """
from rollout import Environment, Observation, reward

@reward(forks=False)
def right(final):
    return {value}

class Task(Environment):
    image = ""
    reward = right()

    async def reset(self, sandbox, seed):
        return Observation(text="")

    async def step(self, sandbox, action):
        return Observation(text="", done=True)
"""
GOOD = TASK.format(value=0.5)


def written(place: Path, text: str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", r"task.py does not load: SyntaxError: .*line 1"),
        ("\nimport absent_here\n", r"No module named 'absent_here' \(line 2 of task.py\).*install the package"),
        ("\n\nraise RuntimeError('boom')\n", r"RuntimeError: boom \(line 3 of task.py\)"),
        ("import helper_here\n", r"`from . import helper_here`"),
        (GOOD.replace("async def step", "async def stop"), "Task has no step"),
        (GOOD.replace("reward = right()", "reward = right"), r"Task.reward is no scoring.*reward = right\(\)"),
        (GOOD.replace('image = ""', 'image = ""\n    max_turns = 0'), "Task.max_turns is 0"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    written(tmp_path / "helper_here.py", "X = 1\n")
    with pytest.raises(Invalid, match=f"(?s){said}"):
        directory.load(written(tmp_path / "task.py", text))
    assert directory.load(written(tmp_path / "task.py", GOOD)).name == "task", "once it is corrected it loads"


def test_an_error_of_a_file_that_is_imported_names_both_lines(tmp_path: Path) -> None:
    written(tmp_path / "pack" / "inner.py", "\n\n1 / 0\n")
    written(tmp_path / "pack" / "__init__.py", "from . import inner\n")
    with pytest.raises(Invalid, match=r"line 1 of __init__.py, line 3 of inner.py"):
        directory.load(tmp_path / "pack")


def test_a_reward_that_looks_into_no_sandbox_is_refused(tmp_path: Path) -> None:
    kind = directory.load(written(tmp_path / "task.py", GOOD.replace("@reward(forks=False)", "@reward"))).environment
    with pytest.raises(Invalid, match=r"Task has no sandbox, and its reward .* looks into one"):
        directory.need_scorable(kind, [])
    directory.need_scorable(kind, [], image="debian")
    other = written(tmp_path / "other.py", "from rollout import reward\n\n@reward\ndef looks(final):\n    return 1\n")
    plain = directory.load(written(tmp_path / "plain.py", GOOD)).environment
    directory.need_scorable(plain, [])
    with pytest.raises(Invalid, match="reward looks looks into one"):
        directory.need_scorable(plain, [RewardPlan(name="looks", function=f"{other}:looks")])


async def test_files_of_one_name_keep_their_own_rewards(tmp_path: Path) -> None:
    """In this process, and in the workers that load them again."""
    values = {"a/task.py": 0.25, "b/task.py": 0.75, "c/task.v2.py": 0.5, "d/task/__init__.py": 1.0}
    pool, said = WorkerPool(1), []
    try:
        for name, value in values.items():
            place = written(tmp_path / name, TASK.format(value=value))
            place = place.parent if place.name == "__init__.py" else place
            scoring = directory.load(place).environment.reward
            assert isinstance(scoring, Scoring)
            score, _ = await pool.run(ScoringRequest(id=name, scoring=scoring, seed=0), None)
            said.append(score.reward)
    finally:
        await pool.close()
    assert said == list(values.values())
