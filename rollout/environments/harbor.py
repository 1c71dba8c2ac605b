"""Directories of tasks in Harbor's format as environments: instruction, image, limits, tests, solution.

Guarantee: tests and solution are in no sandbox before the episode has ended; the oracle's solution alone is, when the
oracle plays.

::

    instruction.md ─▶ first observation      environment/Dockerfile ─▶ image, or that of `main`
    environment/docker-compose.yaml ─▶ its services and `main` in one sandbox
    solution/ ─▶ the oracle's only action    tests/test.sh ─▶ reward, from /logs/verifier/reward.txt or reward.json
"""

from __future__ import annotations

import base64
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rollout.decide import anchor
from rollout.environments.base import AgentSandbox, Build, ComposeFiles, Environment, Observation
from rollout.rewards.messages import Final, Score, Scoring, TooSlow
from rollout.rewards.registry import reward
from sandbox.errors import Invalid
from sandbox.messages import Limits, Network

TASK = "task.toml"
MAIN = "main"  # the service in which the agent works
OUTPUT = 4000  # characters of a command's output that the agent reads
SYSTEM = (
    "You work in a shell. Each of your messages is one command for /bin/sh, alone and without explanation; you are "
    "shown what it prints. When the task is done, say exit."
)


class _Agent(msgspec.Struct):
    timeout_sec: float = 600.0


class _Verifier(msgspec.Struct):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}


class _Box(msgspec.Struct):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    memory: str | None = None  # of older tasks: "2G"
    storage: str | None = None
    allow_internet: bool = True
    workdir: str | None = None


class _Settings(msgspec.Struct):
    agent: _Agent = msgspec.field(default_factory=_Agent)
    verifier: _Verifier = msgspec.field(default_factory=_Verifier)
    environment: _Box = msgspec.field(default_factory=_Box)
    metadata: dict[str, Any] = {}


class HarborTask:
    """One directory. Raises Invalid, naming what is wrong with it."""

    def __init__(self, directory: Path):
        self.directory = directory.resolve()
        self.context = self.directory / "environment"
        try:
            self.settings = msgspec.convert(tomllib.loads((directory / TASK).read_text()), _Settings, strict=False)
            self.instruction = (directory / "instruction.md").read_text()
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise Invalid(f"{directory} is no task: {error}", hint="it needs task.toml and instruction.md") from None
        if not (directory / "tests" / "test.sh").is_file():
            raise Invalid(f"{directory} has no tests/test.sh", hint="write one that leaves /logs/verifier/reward.txt")

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def image(self) -> str:
        """The name of its image: by content, so that a changed one is built again."""
        named = self.settings.environment.docker_image
        return named or f"harbor-{_digest(self.context)}"

    @property
    def builds(self) -> bool:
        """Whether its image is built from its Dockerfile."""
        named = self.settings.environment.docker_image is not None
        return not named and (self.compose_file is None or (self.context / "Dockerfile").is_file())

    @property
    def compose_file(self) -> Path | None:
        file = self.context / "docker-compose.yaml"
        return file if file.is_file() else None

    @property
    def compose(self) -> ComposeFiles | None:
        """The services of which its sandbox consists; None: it is one container."""
        if self.compose_file is None:
            return None
        box = self.settings.environment
        main: dict[str, Any] = {
            "command": ["sh", "-c", "sleep infinity"],
            "cpus": box.cpus,
            "mem_limit": str(self.limits.memory).replace("iB", ""),
        }
        if self.builds or box.docker_image is not None:
            main["image"] = self.image
        return ComposeFiles(
            files=[str(self.compose_file)],
            directory=str(self.context),
            digest=_digest(self.context),
            main=MAIN,
            defaults=main,
            variables={"CONTEXT_DIR": str(self.context), "MAIN_IMAGE_NAME": self.image},
        )

    @property
    def identity(self) -> str:
        """Of all that the task consists of, whatever its directory is called."""
        return _digest(self.directory)

    @property
    def limits(self) -> Limits:
        box = self.settings.environment
        return Limits(
            cpus=box.cpus,
            memory=_size(box.memory) or f"{box.memory_mb}MiB",
            disk=_size(box.storage) or f"{box.storage_mb}MiB",
            processes=None,
        )

    def oracle(self) -> str | None:
        """One command that does what the solution does."""
        directory = self.directory / "solution"
        if not (directory / "solve.sh").is_file():
            return None
        lines = ["mkdir -p /solution"]
        for path, content in _files(directory):
            target = f"/solution/{path}"
            lines.append(f"mkdir -p '{Path(target).parent}' && base64 -d > '{target}' <<'END_OF_FILE'")
            lines += [base64.b64encode(content).decode(), "END_OF_FILE"]
        return "\n".join([*lines, "bash /solution/solve.sh"])


def tasks_of(place: Path) -> list[HarborTask]:
    """The task in a directory, or all in the directories below it, by name; none where it holds none."""
    if (place / TASK).is_file():
        return [HarborTask(place)]
    if not place.is_dir():
        return []
    return [HarborTask(item) for item in sorted(place.iterdir()) if (item / TASK).is_file()]


@reward
async def verified(final: Final, *, tests: str, digest: str, env: dict[str, str], workdir: str | None) -> Score:
    """What tests/test.sh says of the final state. What the agent left running keeps running: it may be what is
    tested."""
    box = final.sandbox
    await box.exec("rm -rf /tests /logs/verifier; mkdir -p /tests /logs/verifier", user="root")
    for path, content in _files(Path(tests)):
        await box.files.write(f"/tests/{path}", content)
    done = await box.exec(["bash", "/tests/test.sh"], timeout=final.limit, env=env, cwd=workdir, user="root")
    if done.timed_out:
        if not anchor.believed(final.request.attempt):
            raise TooSlow(f"the tests took more than {final.limit:g} s")
        return Score(reward=0.0, reason=f"the tests took more than {final.limit:g} s")
    said = (done.stdout + done.stderr).decode("utf-8", "replace")[-400:]
    reported = await box.exec(
        "cat /logs/verifier/reward.txt 2>/dev/null || cat /logs/verifier/reward.json", user="root"
    )
    try:
        value = json.loads(reported.text)
        value = value["reward"] if isinstance(value, dict) else value
        return Score(reward=float(value), reason=said)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Score(reward=0.0, reason=f"the tests left no reward: {said}")


class HarborEnvironment(Environment):
    """One task of a directory, chosen by the seed: seed 0 is the first. Made by `environment_of`."""

    tasks: ClassVar[list[HarborTask]] = []
    system = SYSTEM
    max_turns = 50

    def __init__(self) -> None:
        self.task = self.instruction = ""

    @classmethod
    def builds(cls) -> dict[str, Build]:
        return {
            task.image: Build(task.context, task.settings.environment.build_timeout_sec)
            for task in cls.tasks
            if task.builds
        }

    @classmethod
    def images(cls) -> set[str]:
        return {task.image for task in cls.tasks if task.compose_file is None or task.builds}

    def of(self, seed: int) -> tuple[Environment, int]:
        task = self._task(seed)
        box = task.settings.environment
        self.image, self.limits, self.compose = task.image, task.limits, task.compose
        self.network = Network.open() if box.allow_internet else Network.none()
        self.reward = _scoring(task)
        self.task, self.instruction, self.seconds = task.name, task.instruction, task.settings.agent.timeout_sec
        return self, seed

    @classmethod
    def distinct(cls) -> int | None:
        return len(cls.tasks)

    @classmethod
    def identities(cls) -> list[str] | None:
        return [task.identity for task in cls.tasks]

    def _task(self, seed: int) -> HarborTask:
        return self.tasks[seed % len(self.tasks)]

    def oracle(self, seed: int) -> list[str] | None:
        solution = self._task(seed).oracle()
        return None if solution is None else [solution, "exit"]

    async def reset(self, sandbox: AgentSandbox, seed: int) -> Observation:
        await sandbox.exec("mkdir -p /logs/agent /logs/verifier", user="root")
        return Observation(f"{self.instruction}\n$ ")

    async def step(self, sandbox: AgentSandbox, action: str) -> Observation:
        if action.strip() == "exit":
            return Observation("", done=True)
        if "\0" in action:
            return Observation("sh: a command holds a NUL byte\n$ ")
        result = await sandbox.exec(action, timeout=self.seconds)
        text = (result.stdout + result.stderr).decode("utf-8", "replace")
        if len(text) > OUTPUT:
            text = f"{text[: OUTPUT // 2]}\n[{len(text) - OUTPUT} characters left out]\n{text[-OUTPUT // 2 :]}"
        return Observation(f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}$ ")


def environment_of(tasks: list[HarborTask]) -> type[Environment]:
    """The environment of these tasks."""
    return type("HarborTasks", (HarborEnvironment,), {"tasks": tasks, "image": tasks[0].image, "__module__": __name__})


def _scoring(task: HarborTask) -> Scoring:
    tests = task.directory / "tests"
    verifier = task.settings.verifier
    requested = verified(
        tests=str(tests), digest=_digest(tests), env=dict(verifier.env), workdir=task.settings.environment.workdir
    )
    return msgspec.structs.replace(requested, longest=verifier.timeout_sec)


def _files(directory: Path) -> list[tuple[str, bytes]]:
    return [
        (str(path.relative_to(directory)), path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]


def _digest(directory: Path) -> str:
    result = hashlib.blake2b(digest_size=8)
    for path, content in _files(directory):
        result.update(f"{path} {len(content)}\n".encode() + content)
    return result.hexdigest()


def _size(text: str | None) -> str | None:
    """Sizes of older tasks. Example: ``_size("2G") == "2GiB"``."""
    return None if text is None else text.rstrip("iB") + "iB"
