"""The environment: a database migration that stopped half-way, finished by shell commands in a real sandbox.

Owns: the ticket, what a column is worth. Does not own: turns and observations (rollout.environments.shell), sandboxes
(it is handed one per episode), checkpoints, tokens.
Guarantee: the reward is read from the files when the episode ends, by a command of the environment's own. A column is
worth 0.2 if its rows and the schema have the wanted name and the untouched values; the rest, 0.4, is for a migration
that is whole (every step done, no lock) and that the agent has checked. A column that was renamed to a wrong name
stays wrong: no later migration names it again.
An episode's state is in the sandbox and in what `snapshot` tells: a sandbox may be restored under it at any turn, and
another process may go on with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout import Observation
from rollout.environments.shell import PROMPT, ShellEnvironment
from sandbox.messages import ExecResult

from .scenario import DIRECTORY, STEPS, Scenario, scenario

LONGEST = 20.0  # seconds for a command
AUDIT = ["/bin/sh", "-c", "cat schema; echo --; cat rows; echo --; cat done; [ ! -e lock ] || echo locked"]


class FinishTheMigration(ShellEnvironment):
    """Example: ``await env.reset(sandbox, seed=7)``, then ``await env.step(sandbox, "cat steps/*")``."""

    image = "debian"
    max_turns = 14

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.scenario: Scenario | None = None
        self.checked = False

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.seed, self.scenario = seed, scenario(seed)
        self.turns, self.checked = 0, False
        result = await sandbox.exec(self.scenario.install, cwd=DIRECTORY, timeout=LONGEST)
        if result.exit_code != 0:
            raise RuntimeError(f"the migration could not be laid down: {result.stderr[:200]!r}")
        return Observation(text=self.scenario.ticket + PROMPT)

    async def execute(self, sandbox: Any, command: str) -> ExecResult:
        assert self.scenario is not None, "reset() comes first"
        result: ExecResult = await sandbox.exec(command, cwd=DIRECTORY, timeout=LONGEST)
        if command.strip() == "./check":
            self.checked = result.text == self.scenario.target
        return result

    async def earned(self, sandbox: Any) -> float:
        assert self.scenario is not None
        result = await sandbox.exec(AUDIT, cwd=DIRECTORY, timeout=LONGEST, ends_turn=False)
        return worth(self.scenario, result.text, checked=self.checked)

    def snapshot(self) -> bytes:
        assert self.scenario is not None, "reset() comes first"
        return msgspec.json.encode((self.seed, self.turns, self.checked))

    def load(self, state: bytes) -> None:
        self.seed, self.turns, self.checked = msgspec.json.decode(state)
        self.scenario = scenario(self.seed)


def worth(case: Scenario, audit: str, *, checked: bool) -> float:
    """The reward for what the audit shows. Example: 0.4 for two right columns of a migration that is locked."""
    schema, rows, done = (*audit.split("--\n"), "", "")[:3]

    def right(n: str) -> bool:
        target = [line for line in case.rows_after.splitlines() if line.startswith(n)]
        return (
            f"{n} {case.new[int(n) - 1]}" in schema.splitlines()
            and [line for line in rows.splitlines() if line.startswith(n)] == target
        )

    columns = sum(right(n) for n in STEPS)
    complete = columns == len(STEPS) and done.split() == list(STEPS) and checked
    return (2 * columns + 4 * complete) / 10
