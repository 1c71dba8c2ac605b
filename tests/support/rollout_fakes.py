"""Fakes for the rollout's unit tests: a host with sandboxes in memory, engines that answer from a script.

The fake sandbox is held to the same contract as the real one by tests/rollout/test_recovery.py.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable
from typing import Any

from rollout import Environment, Observation
from rollout.engine.client import Generation, Sampling, WeightSpan
from sandbox.errors import CheckpointFailed, Conflict, Interrupted, NotFound, SandboxDead
from sandbox.messages import (
    CheckpointInfo,
    CheckpointState,
    ExecResult,
    RestoreResult,
    SandboxInfo,
    SandboxState,
    Verdict,
)

END = 1


class Letters:
    """A tokenizer: one token per character."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class FakeSandbox:
    """Files in memory. Understands ``echo W >> F``, ``cat F``, ``true`` and ``sleep`` (blocks until released)."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.id = f"s-fake{next(self.numbers)}"
        self.content: dict[str, str] = {}
        self.checkpoints: list[tuple[CheckpointInfo, dict[str, str]]] = []
        self.alive, self.removed = True, False
        self.commands: list[str] = []
        self.answers: dict[str, ExecResult] = {}
        self.begun: set[str] = set()
        self.fail_captures = 0
        self.capture_gate: asyncio.Event | None = None
        self.unequal = False
        self.duration = 0.0  # of each command, as it is told
        self.after_command: Callable[[str], None] | None = None
        self._save(Verdict.BOTH)

    async def exec(self, command: str, *, ends_turn: bool = True, key: str | None = None, **_: Any) -> ExecResult:
        """A key that was used is answered as before; one whose answer got lost, with Interrupted."""
        if key is not None and key in self.answers:
            return self.answers[key]
        if key is not None and key in self.begun:
            raise Interrupted("the daemon ended meanwhile", sandbox=self.id)
        if key is not None:
            self.begun.add(key)
        result = await self._exec(command, ends_turn)
        if key is not None:
            self.answers[key] = result
        return result

    async def _exec(self, command: str, ends_turn: bool) -> ExecResult:
        self._need_alive()
        await self._captured()
        self.commands.append(command)
        before = copy.deepcopy(self.content)
        stdout = self._run(command)
        if self.after_command is not None:
            self.after_command(command)
        await asyncio.sleep(0)
        self._need_alive()
        result = ExecResult(exit_code=0, stdout=stdout.encode(), stderr=b"", duration=self.duration)
        if ends_turn:
            result.verdict = Verdict.NONE if before == self.content else Verdict.FILES
            info = self.checkpoints[-1][0] if before == self.content else self._save(Verdict.FILES)
            result.checkpoint = info.id
        return result

    def _run(self, command: str) -> str:
        words = command.split()
        if words[0] == "echo":
            self.content[words[3]] = self.content.get(words[3], "") + words[1] + "\n"
            return ""
        return self.content.get(words[1], "") if words[0] == "cat" else ""

    def _save(self, verdict: Verdict) -> CheckpointInfo:
        failing = self.fail_captures > 0
        self.fail_captures -= failing
        info = CheckpointInfo(
            id=f"c-{self.id}-{len(self.checkpoints)}",
            sandbox=self.id,
            state=CheckpointState.FAILED if failing else CheckpointState.CAPTURED,
            verdict=verdict,
            started_at=1.0,
            captured_at=2.0,
            error="refused" if failing else None,
        )
        self.checkpoints.append((info, copy.deepcopy(self.content)))
        return info

    async def captured(self, of: ExecResult) -> CheckpointInfo:
        await self._captured()
        info = next(info for info, _ in self.checkpoints if info.id == of.checkpoint)
        if info.state is CheckpointState.FAILED:
            raise CheckpointFailed(info.error or "")
        return info

    async def _captured(self) -> None:
        if self.capture_gate is not None:
            await self.capture_gate.wait()

    async def checkpoint(self, label: str | None = None) -> CheckpointInfo:
        self._need_alive()
        info = self._save(Verdict.BOTH)
        if info.error is not None:
            raise CheckpointFailed(info.error, sandbox=self.id)
        return info

    async def tree(self) -> list[CheckpointInfo]:
        return [info for info, _ in self.checkpoints]

    async def restore(self, to: str | None = None, *, verify: bool = False) -> RestoreResult:
        complete = [entry for entry in self.checkpoints if entry[0].state is CheckpointState.CAPTURED]
        result = [entry for entry in complete if to is None or entry[0].id == to]
        if not result:
            raise Conflict(f"checkpoint {to} was not captured", sandbox=self.id)
        info, content = result[-1]
        self.content, self.alive = copy.deepcopy(content), True
        differences = ["memory"] if self.unequal else []
        return RestoreResult(sandbox=self.id, checkpoint=info.id, total_ms=1, verified=verify, differences=differences)

    async def remove(self) -> None:
        self.removed = True

    def die(self) -> None:
        self.alive = False

    async def kill(self) -> None:
        self._need_alive()
        self.die()

    @property
    def info(self) -> SandboxInfo:
        state = SandboxState.RUNNING if self.alive else SandboxState.DEAD
        return SandboxInfo(id=self.id, image="x", state=state, created_at=0.0)

    def _need_alive(self) -> None:
        if self.removed:
            raise NotFound("removed", sandbox=self.id)
        if not self.alive:
            raise SandboxDead("pid 1 is gone", hint="restore it", sandbox=self.id)


class FakeHost:
    def __init__(self, prepare: Callable[[FakeSandbox], None] | None = None) -> None:
        self.sandboxes: list[FakeSandbox] = []
        self.prepare = prepare
        self.failures: list[Exception] = []
        self.prepared: dict[str, str] = {}
        self._retained: list[str] = []

    async def create(self, image: str, **_: Any) -> FakeSandbox:
        if self.failures:
            raise self.failures.pop(0)
        sandbox = FakeSandbox()
        if self.prepare is not None:
            self.prepare(sandbox)
        self.sandboxes.append(sandbox)
        return sandbox

    async def get(self, sandbox: str) -> FakeSandbox:
        result = [one for one in self.sandboxes if one.id == sandbox and not one.removed]
        if not result:
            raise NotFound(f"no sandbox {sandbox}", sandbox=sandbox)
        return result[0]

    async def image_digest(self, name: str) -> str:
        return name

    async def fork(self, checkpoint: str) -> FakeSandbox:
        child = await self.create("")
        existing = [entry for item in self.sandboxes if not item.removed for entry in item.checkpoints]
        result = [entry for entry in existing if entry[0].id == checkpoint]
        if not result:
            raise NotFound(f"no checkpoint {checkpoint}")
        child.checkpoints.append(result[0])
        child.content = copy.deepcopy(result[0][1])
        return child

    async def keep(self, sandbox: FakeSandbox) -> None:
        self._retained.append(sandbox.id)

    async def retained(self) -> list[str]:
        return list(self._retained)

    async def remove(self, left: Any) -> int:
        for sandbox in self.sandboxes:
            sandbox.removed = sandbox.removed or sandbox.id in left
        return len(left)

    async def keep_prepared(self, sandbox: FakeSandbox, name: str, ledger: Any) -> None:
        self.prepared[sandbox.id] = name

    async def drop_prepared(self, name: str) -> None:
        for sandbox in self.sandboxes:
            sandbox.removed = sandbox.removed or self.prepared.get(sandbox.id) == name

    async def kill(self, sandbox: str, delay: float) -> int:
        """A `rollout.chaos.Kill`."""
        await asyncio.sleep(0)
        result = next(one for one in self.sandboxes if one.id == sandbox)
        was, result.alive = result.alive, False
        return int(was)


class ScriptedEngine:
    """Answers turn n of every trajectory with ``script[n]``, told apart by how many stop tokens the prompt holds."""

    def __init__(self, script: list[str], *, version: int = 0) -> None:
        self.script, self.version = script, version
        self.prompts: list[list[int]] = []
        self.gate: asyncio.Event | None = None
        self.failures: list[Exception] = []
        self.delay = 0.0

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        self.prompts.append(prompt_ids)
        await (self.gate.wait() if self.gate is not None else asyncio.sleep(self.delay))
        if self.failures:
            raise self.failures.pop(0)
        ids = [*map(ord, self.script[prompt_ids.count(END) % len(self.script)]), END]
        return Generation(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            spans=[WeightSpan(self.version, 0, len(ids))],
            finish_reason="stop",
        )


SCRIPT = ["echo a >> f", "cat f", "echo b >> f", "cat f"]


class Notebook(Environment):
    """Four turns; the reward is 1 when the file holds exactly what was written."""

    max_turns = 4

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        await sandbox.exec("echo start >> f")
        self.turns = 0
        return Observation(text=f"seed {seed}\n")

    async def step(self, sandbox: Any, action: str) -> Observation:
        self.turns += 1
        result = await sandbox.exec(action)
        done = self.turns == len(SCRIPT)
        return Observation(text=result.text + "$ ", reward=float(done and result.text == "start\na\nb\n"), done=done)
