"""The environment: one broken service per episode, repaired by shell commands in a real sandbox.

Owns: the ticket, what counts as solved, how an output becomes an observation. Does not own: sandboxes
(it is handed one per episode), turns, checkpoints, tokens.
Guarantee: the reward is 1 only if the service answers properly over loopback when the episode ends, asked by
the environment itself, and the agent looked before it repaired and checked after it started; else 0.
An episode's state is in the sandbox and in what `snapshot` tells: a sandbox may be restored under it at any turn, and
another process may go on with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout import Environment, Observation
from sandbox.messages import ExecResult

from .scenario import FOLDER, Scenario, scenario

PROMPT = "$ "
TOO_LONG = "refused\n"  # a command that is longer than a policy may write
OUTPUT_LIMIT = 160  # characters of a command's output that the policy gets to see
LONGEST = 20.0  # seconds for a command that should end by itself
FOREGROUND = 1.0  # seconds for the service in the foreground, which never does


def observe(result: ExecResult) -> str:
    """What the policy reads: stdout, stderr, a note on a deadline, the next prompt."""
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    if len(text) > OUTPUT_LIMIT:
        text = text[:OUTPUT_LIMIT]
    if result.timed_out:
        text += "timed out\n"
    if text and not text.endswith("\n"):
        text += "\n"
    return text + PROMPT


class FixTheService(Environment):
    """Example: ``await env.reset(sandbox, seed=7)``, then ``await env.step(sandbox, "cat app.conf")``."""

    image = "debian"
    max_turns = 8

    def __init__(self) -> None:
        self.seed = 0
        self.scenario: Scenario | None = None
        self.turns = 0
        self.looked = self.repaired = self.checked = False

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.seed, self.scenario = seed, scenario(seed)
        self.turns = 0
        self.looked = self.repaired = self.checked = False
        result = await sandbox.exec(self.scenario.install, cwd=FOLDER, timeout=LONGEST)
        if result.exit_code != 0:
            raise RuntimeError(f"the service could not be laid down: {result.stderr[:200]!r}")
        return Observation(text=self.scenario.ticket + PROMPT)

    async def step(self, sandbox: Any, action: str) -> Observation:
        assert self.scenario is not None, "reset() comes first"
        self.turns += 1
        if action.strip() == "exit":
            return await self._end(sandbox, "")
        if "\0" in action:  # no program can be given such an argument, so no shell ever sees it
            return Observation(text=f"sh: a command holds a NUL byte\n{PROMPT}")
        foreground = action.startswith("./serve") and not action.endswith("&")
        result = await sandbox.exec(action, cwd=FOLDER, timeout=FOREGROUND if foreground else LONGEST)
        self._judge(action, result)
        if self.turns >= self.max_turns:
            return await self._end(sandbox, observe(result))
        return Observation(text=observe(result))

    async def cut(self, sandbox: Any, action: str) -> Observation:
        self.turns += 1
        return await self._end(sandbox, "") if self.turns >= self.max_turns else Observation(text=TOO_LONG + PROMPT)

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

    async def _end(self, sandbox: Any, text: str) -> Observation:
        reward = 0.0
        if self.looked and self.checked:  # without both no answer of the service could earn it
            assert self.scenario is not None
            result = await sandbox.exec(self.scenario.verify, cwd=FOLDER, timeout=LONGEST, ends_turn=False)
            reward = float(result.text == self.scenario.answer + "\n")
        return Observation(text=text, reward=reward, done=True)
