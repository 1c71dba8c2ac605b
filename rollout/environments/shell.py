"""For environments whose actions are commands of a shell: their turns, what a policy reads, a shell that is simulated.

Guarantee: the twin prints what coreutils and sed of Debian print for the commands that it knows, on names and texts of
plain words; it knows nothing of other commands (tests/examples/test_twin.py compares the two).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from rollout.environments.base import AgentSandbox, Environment, Observation
from sandbox.messages import ExecResult

T = TypeVar("T")

PROMPT = "$ "
TOO_LONG = "refused\n"  # a command that is longer than a policy may write
OUTPUT_LIMIT = 160  # characters of a command's output that the policy gets to see
SED = re.compile(r"sed -i s/([^/ ]*)/([^/ ]*)/ (\S+)")


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


class ShellEnvironment(Environment):
    """Each action is one command; `exit` ends the episode, and so does turn number `max_turns`.

    A subclass has `reset` (which sets `turns` to 0), `execute` and `earned`.
    """

    def __init__(self) -> None:
        self.turns = 0

    @abstractmethod
    async def execute(self, sandbox: AgentSandbox, command: str) -> ExecResult:
        """One command of the agent."""

    @abstractmethod
    async def earned(self, sandbox: AgentSandbox) -> float:
        """The reward of an episode that has ended, found out in the sandbox without ending a turn."""

    async def step(self, sandbox: AgentSandbox, action: str) -> Observation:
        self.turns += 1
        if action.strip() == "exit":
            return await self._end(sandbox, "")
        if "\0" in action:  # no program can be given such an argument, so no shell ever sees it
            return Observation(text=f"sh: a command holds a NUL byte\n{PROMPT}")
        result = await self.execute(sandbox, action)
        if self.turns >= self.max_turns:
            return await self._end(sandbox, observe(result))
        return Observation(text=observe(result))

    async def cut(self, sandbox: AgentSandbox, action: str) -> Observation:
        self.turns += 1
        return await self._end(sandbox, "") if self.turns >= self.max_turns else Observation(text=TOO_LONG + PROMPT)

    async def _end(self, sandbox: AgentSandbox, text: str) -> Observation:
        return Observation(text=text, reward=await self.earned(sandbox), done=True)


def immediate(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits. Example: ``immediate(env.step(Twin(), "ls data"))``."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    work.close()
    raise RuntimeError("the twin waited for something")


def answer(text: str = "", *, error: str = "", code: int = 0, timed_out: bool = False) -> ExecResult:
    """Of a command that was simulated."""
    return ExecResult(exit_code=code, stdout=text.encode(), stderr=error.encode(), duration=0.0, timed_out=timed_out)


class TwinShell:
    """Answers `exec` like a sandbox with these files: ``cat``, ``ls``, ``cp``, ``rm`` and ``sed -i s/a/b/`` on names
    below the working directory. A subclass adds programs and what lays the files down."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    async def exec(self, command: str | list[str], **_: Any) -> ExecResult:
        return self.run(command) if isinstance(command, list) else self.shell(command.strip())

    def run(self, command: list[str]) -> ExecResult:
        """A command of the environment's own."""
        raise NotImplementedError(command)

    def program(self, name: str, arguments: list[str]) -> ExecResult | None:
        """A program of the subclass; None: there is none of this name."""
        return None

    def shell(self, command: str) -> ExecResult:
        if match := SED.fullmatch(command):
            return self._edit(*match.groups())
        name, *arguments = command.split(" ")
        existing: dict[tuple[str, int], Callable[..., ExecResult]] = {
            ("cat", 1): self._cat,
            ("ls", 1): self._list,
            ("cp", 2): self._copy,
            ("rm", 1): self._remove,
        }
        if (result := existing.get((name, len(arguments)))) is not None:
            return result(*arguments)
        answered = self.program(name, arguments)
        return answer(error=f"/bin/sh: 1: {name}: not found\n", code=127) if answered is None else answered

    def _cat(self, path: str) -> ExecResult:
        if path.endswith("/*") and (inside := self._inside(path[:-2])):
            return answer("".join(self.files[f"{path[:-1]}{name}"] for name in inside))
        if path not in self.files:
            return answer(error=f"cat: {_quoted(path)}: No such file or directory\n", code=1)
        return answer(self.files[path])

    def _list(self, directory: str) -> ExecResult:
        names = self._inside(directory)
        if not names:
            return answer(error=f"ls: cannot access '{directory}': No such file or directory\n", code=2)
        return answer("".join(name + "\n" for name in names))

    def _inside(self, directory: str) -> list[str]:
        prefix = directory.rstrip("/") + "/"
        return sorted(path.removeprefix(prefix) for path in self.files if path.startswith(prefix))

    def _edit(self, old: str, new: str, path: str) -> ExecResult:
        if path not in self.files:
            return answer(error=f"sed: can't read {path}: No such file or directory\n", code=2)
        lines = self.files[path].split("\n")
        self.files[path] = "\n".join(line.replace(old, new, 1) for line in lines)
        return answer()

    def _copy(self, source: str, target: str) -> ExecResult:
        if source not in self.files:
            return answer(error=f"cp: cannot stat '{source}': No such file or directory\n", code=1)
        if source == target:
            return answer(error=f"cp: '{source}' and '{target}' are the same file\n", code=1)
        self.files[target] = self.files[source]
        return answer()

    def _remove(self, path: str) -> ExecResult:
        if path not in self.files:
            return answer(error=f"rm: cannot remove '{path}': No such file or directory\n", code=1)
        del self.files[path]
        return answer()


def _quoted(path: str) -> str:
    """As `cat` names a file: in quotes where a shell would expand the name."""
    return f"'{path}'" if "*" in path else path
