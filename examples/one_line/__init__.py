"""OneLine: a chat model writes one line of shell, sees what it printed, and writes a better one.

Owns: the questions, how a command is found in an answer, the reward. Does not own: sandboxes, turns, tokens.
Guarantee: the reward follows from what the last line printed in the sandbox: 1 where it is what the question's own
command prints there, a quarter where the line ran without an error and printed something, else 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollout import Environment, Observation

FENCE = re.compile(r"```(?:\w+)?\n?(.*?)(?:```|$)", re.DOTALL)
SHOWN = 400  # characters of what a line printed
LONGEST = 10.0  # seconds for a line
QUESTIONS = (
    ("List the names of the files in /etc/apt, one on each line.", "ls /etc/apt"),
    ("Print the number of lines of /etc/passwd.", "wc -l < /etc/passwd"),
    ("Print the first line of /etc/passwd.", "head -n 1 /etc/passwd"),
    ("Print the name of the user who runs the shell.", "whoami"),
    ("Print the working directory.", "pwd"),
    ("Print the file /etc/hostname.", "cat /etc/hostname"),
    ("Print the word hello.", "echo hello"),
    ("Print the lines of /etc/passwd that contain root.", "grep root /etc/passwd"),
)


def command(content: str) -> str:
    """The line in an answer: what stands in its first fence, or all of it.

    >>> command("Sure:\\n```bash\\nls /etc\\n```\\nThat lists it."), command(" ls ")
    ('ls /etc', 'ls')
    """
    result = FENCE.search(content)
    return (result[1] if result else content).strip()


class OneLine(Environment):
    image = "debian"
    system = "You write one line of shell that does what the user asks. Answer with the line alone."
    max_turns = 2

    async def reset(self, sandbox: Any, seed: int) -> Observation:
        self.turns = 0
        question, self.solution = QUESTIONS[seed % len(QUESTIONS)]
        return Observation(text=question)

    def read_action(self, content: str, calls: Sequence[tuple[str, str]]) -> str:
        return command(content)

    async def cut(self, sandbox: Any, action: str) -> Observation:
        """A line stands at the beginning of an answer that explains it at length."""
        return await self.step(sandbox, action)

    async def step(self, sandbox: Any, action: str) -> Observation:
        self.turns += 1
        if "\0" in action:  # no shell can be given that
            return Observation(text="a line holds a NUL byte", done=self.turns == self.max_turns)
        result = await sandbox.exec(action, timeout=LONGEST)
        text = (result.stdout + result.stderr).decode("utf-8", "replace")[:SHOWN]
        if self.turns < self.max_turns:
            return Observation(text=f"It printed:\n{text}\nWrite the line again, better if you can.")
        target = await sandbox.exec(self.solution, timeout=LONGEST)
        ran = result.exit_code == 0 and bool(result.stdout.strip())
        right = ran and result.stdout.split() == target.stdout.split()
        return Observation(text=text, reward=1.0 if right else 0.25 if ran else 0.0, done=True)


ENVIRONMENT = OneLine
