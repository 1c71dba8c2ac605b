"""Folders of tasks in Harbor's format: read, built, played by the oracle and by one who does nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engine.chat import Characters
from rollout.engine.client import Sampling
from rollout.engine.script import Script
from rollout.environments.directory import load
from rollout.environments.harbor import HarborTask, tasks_of
from rollout.environments.images import build_missing, needed
from rollout.environments.mixture import Mixture, MixturePart
from rollout.episode.manager import EpisodeManager
from rollout.episode.prepared import PreparedStates
from rollout.episode.spec import EpisodeLimits
from rollout.evaluate import evaluate, oracle_of
from rollout.labels import LabellingClient
from rollout.rewards.service import RewardService
from sandbox import Client
from sandbox.errors import Invalid
from tests.support.daemon_host import missing

TWELVE = Path(__file__).parents[2] / "examples" / "harbor_tasks"
real = pytest.mark.skipif(bool(missing()), reason=missing())


def test_the_folder_of_twelve_is_read() -> None:
    task = load(TWELVE)
    assert task.name == "harbor_tasks" and task.environment.distinct() == 12
    assert len(task.environment.images()) == len(task.environment.builds()) >= 10  # equal folders share an image
    for seed in range(24):
        env, _ = task.environment().of(seed)
        assert env.image in task.environment.images() and env.reward is not None and env.reward.longest == 60.0
        assert env.seconds == 120.0 and env.limits.memory == "512MiB" and env.network.mode == "none"
        oracle = env.oracle(seed)
        assert oracle is not None and oracle[0].endswith("bash /solution/solve.sh") and oracle[1] == "exit"
    mixture = Mixture([MixturePart(task=str(TWELVE))])
    assert mixture.images() == task.environment.images() and mixture.builds() == task.environment.builds()


def test_a_changed_context_or_test_is_another_image_or_function(tmp_path: Path) -> None:
    shutil.copytree(TWELVE / "greeting", tmp_path / "greeting")
    (same,), before = tasks_of(tmp_path / "greeting"), HarborTask(TWELVE / "greeting")
    assert same.image == before.image
    (tmp_path / "greeting/environment/new").write_text("x")
    assert HarborTask(tmp_path / "greeting").image != before.image


def test_what_is_no_task_is_named(tmp_path: Path) -> None:
    assert tasks_of(tmp_path) == []
    (tmp_path / "task.toml").write_text("[agent]\ntimeout_sec = 'soon'\n")
    with pytest.raises(Invalid, match="is no task"):
        tasks_of(tmp_path)
    (tmp_path / "task.toml").write_text("")
    (tmp_path / "instruction.md").write_text("do it")
    with pytest.raises(Invalid, match="has no tests"):
        load(tmp_path)


class Images:
    """The images of a host that builds at once."""

    def __init__(self) -> None:
        self.names, self.built = ["debian"], list[tuple[str, Path]]()
        self.images = self

    async def list(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.names]

    async def build(self, name: str, context: Path, **_: Any) -> None:
        self.names.append(name)
        self.built.append((name, context))


async def test_images_are_built_once() -> None:
    environment, host, reported = load(TWELVE).environment, Images(), list[str]()
    target = environment.builds()
    for again in (False, True):
        built = await build_missing(host, target, report=reported.append)  # type: ignore[arg-type]
        assert built == (0 if again else len(target))
    assert dict(host.built) == {name: build.directory for name, build in target.items()}
    assert len(reported) == len(target) and reported[1].startswith(f"builds image 2 of {len(target)}, harbor-")
    assert list(needed(environment, [3])) == [environment().of(3)[0].image]


def write(directory: Path, instruction: str, solve: str, test: str) -> None:
    """A task that starts from the image that every host of tests has."""
    for name, text in {
        "task.toml": '[environment]\ndocker_image = "debian"\nallow_internet = false\nmemory_mb = 256\n',
        "instruction.md": instruction,
        "solution/solve.sh": solve,
        "tests/test.sh": f"echo 0 > /logs/verifier/reward.txt\nset -e\n. /tests/deep/lib.sh\n{test}",
        "tests/deep/lib.sh": 'earn() { echo "{\\"reward\\": $1}" > /logs/verifier/reward.txt; }\n',
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


async def oracle_alone_passes(host: Client, environment: Any, directory: Path, *, shares: bool = False) -> None:
    """`shares`: resets are shared by forks."""
    labelled = LabellingClient(host, directory / "run")
    async with RewardService(labelled) as rewards:
        manager = EpisodeManager(
            environment=environment,
            host=labelled,
            engine=Script(),
            tokenizer=Characters(),
            rewards=rewards,
            limits=EpisodeLimits(max_length=1 << 20),
            prepared=PreparedStates(labelled, directory / "prepared") if shares else None,
        )
        sampling = Sampling(max_tokens=1 << 16)
        oracle = await evaluate(manager, range(2), sampling, engine=oracle_of(environment))
        idle = await evaluate(manager, range(2), sampling)
    assert (oracle.reward, oracle.lost) == (1.0, 0), oracle.reasons
    assert (idle.reward, idle.lost) == (0.0, 0), idle.reasons


@real
async def test_the_oracle_passes_and_nobody_else(host: Client, tmp_path: Path) -> None:
    """A file that is written, and a process that has to be left running."""
    write(tmp_path / "tasks/file", "write", "echo done > /root/work\n", "grep -x done /root/work\nearn 1.0\n")
    alive = "kill -0 $(cat /root/pid)\nearn 1\n"
    write(tmp_path / "tasks/process", "run", "sleep 1000 > /dev/null 2>&1 &\necho $! > /root/pid\n", alive)
    environment = load(tmp_path / "tasks").environment
    assert environment.builds() == {} and environment.images() == {"debian"}
    await oracle_alone_passes(host, environment, tmp_path)


COMPOSE = """
services:
  main:
    depends_on: {db: {condition: service_healthy}}
    environment: [DB=db]
  db:
    image: debian
    command: >-
      perl -MIO::Socket::INET -e '$$s = IO::Socket::INET->new(LocalPort => 80, Listen => 5); open F, ">/ok";
      while ($$c = $$s->accept) { print $$c "42\\n"; close $$c }'
    healthcheck: {test: test -e /ok, interval: 200ms, retries: 50}
"""
ASK = "perl -MIO::Socket::INET -e 'print <$c> if $c = IO::Socket::INET->new(\"$ENV{DB}:80\")'"


def test_a_task_of_several_services_is_read(tmp_path: Path) -> None:
    write(tmp_path / "one", "ask", "true\n", "earn 1.0\n")
    (tmp_path / "one/environment").mkdir(exist_ok=True)
    (tmp_path / "one/environment/docker-compose.yaml").write_text(COMPOSE)
    (tmp_path / "one/task.toml").write_text("[environment]\ncpus = 2\nmemory = '1G'\n")
    task = HarborTask(tmp_path / "one")
    assert task.compose is not None and not task.builds
    assert task.compose.defaults == {"command": ["sh", "-c", "sleep infinity"], "cpus": 2.0, "mem_limit": "1G"}
    environment = load(tmp_path / "one").environment
    assert environment.images() == set() and environment.builds() == {}
    assert environment().of(0)[0].compose == task.compose
    (tmp_path / "one/environment/Dockerfile").write_text("FROM debian\n")
    task = HarborTask(tmp_path / "one")
    assert task.compose is not None and task.builds and task.compose.defaults["image"] == task.image
    assert load(tmp_path / "one").environment.images() == {task.image}


@real
async def test_a_task_of_several_services_is_played(host: Client, tmp_path: Path) -> None:
    """The agent's state is theirs, too: resets are shared by forks, and scored in forks."""
    test = f'test "$(cat /root/answer)" = "$({ASK})"\nearn 1.0\n'
    write(tmp_path / "tasks/ask", "ask", f"{ASK} > /root/answer\n", test)
    (tmp_path / "tasks/ask/environment").mkdir(exist_ok=True)
    (tmp_path / "tasks/ask/environment/docker-compose.yaml").write_text(COMPOSE)
    (tmp_path / "tasks/ask/environment/Dockerfile").write_text("FROM debian\nENV BUILT=yes\n")
    (tmp_path / "tasks/ask/task.toml").write_text("")
    environment = load(tmp_path / "tasks").environment
    assert await build_missing(host, needed(environment, range(2))) == 1
    await oracle_alone_passes(host, environment, tmp_path, shares=True)
    for info in await host.sandboxes():
        await (await host.get(info.id)).remove()
