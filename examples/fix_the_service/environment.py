"""The environment: one broken service per episode, repaired by shell commands in a real sandbox.

Owns: the ticket, what counts as solved. Does not own: turns and observations (rollout.environments.shell), sandboxes
(it is handed one per episode), checkpoints, tokens.
Guarantee: the reward is 1 only if the service answers properly over loopback when the episode ends, asked by
the environment itself, and the agent looked before it repaired and checked after it started; else 0.
An episode's state is in the sandbox and in what `snapshot` tells: a sandbox may be restored under it at any turn, and
another process may go on with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout import Observation
from rollout.environments.shell import PROMPT, ShellEnvironment
from sandbox.messages import ExecResult

from .scenario import DIRECTORY, Scenario, scenario

LONGEST = 20.0  # seconds for a command that should end by itself
FOREGROUND = 1.0  # seconds for the service in the foreground, which never does


class FixTheService(ShellEnvironment):
    """Example: ``await env.reset(sandbox, seed=7)``, then ``await env.step(sandbox, "cat app.conf")``."""

    image = "debian"
    max_turns = 8

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.scenario: Scenario | None = None
        self.looked = self.repaired = self.checked = False

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.seed, self.scenario = seed, scenario(seed)
        self.turns = 0
        self.looked = self.repaired = self.checked = False
        result = await sandbox.exec(self.scenario.install, cwd=DIRECTORY, timeout=LONGEST)
        if result.exit_code != 0:
            raise RuntimeError(f"the service could not be laid down: {result.stderr[:200]!r}")
        return Observation(text=self.scenario.ticket + PROMPT)

    async def execute(self, sandbox: Any, command: str) -> ExecResult:
        foreground = command.startswith("./serve") and not command.endswith("&")
        result: ExecResult = await sandbox.exec(command, cwd=DIRECTORY, timeout=FOREGROUND if foreground else LONGEST)
        self._judge(command, result)
        return result

    async def earned(self, sandbox: Any) -> float:
        if not (self.looked and self.checked):  # without both no answer of the service could earn it
            return 0.0
        assert self.scenario is not None
        result = await sandbox.exec(self.scenario.verify, cwd=DIRECTORY, timeout=LONGEST, ends_turn=False)
        return float(result.text == self.scenario.answer + "\n")

    def snapshot(self) -> bytes:
        assert self.scenario is not None, "reset() comes first"
        return msgspec.json.encode((self.seed, self.turns, self.looked, self.repaired, self.checked))

    def load(self, state: bytes) -> None:
        self.seed, self.turns, self.looked, self.repaired, self.checked = msgspec.json.decode(state)
        self.scenario = scenario(self.seed)

    def _judge(self, action: str, result: ExecResult) -> None:
        """Notes what the agent has done so far, from what its command really printed."""
        assert self.scenario is not None
        if action.startswith(("cat ", "ls")) and result.exit_code == 0 and result.stdout and not self.repaired:
            self.looked = True
        if action.startswith(("sed ", "cp ")):
            self.repaired = True
        if action.startswith("./ask ") and self.scenario.answer in result.text:
            self.checked = True
