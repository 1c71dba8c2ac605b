"""A twin of the sandbox with the service in it, simulated: the same environment runs on it, a thousand times faster.

Owns: what the commands of this example would print and leave behind. Does not own: the environment, which is
the real one. Guarantee: on every sequence of this example's commands the twin prints what the sandbox prints
(tests/examples/test_twin.py compares them on random sequences); it knows nothing of other commands.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine
from typing import Any, TypeVar

from sandbox.messages import ExecResult

T = TypeVar("T")

SED = re.compile(r"sed -i s/([^/ ]*)/([^/ ]*)/ (\S+)")
SERVE = re.compile(r"\./serve( >log 2>&1| >/dev/null 2>&1)?( &)?")
LINE = re.compile(r"(\w+) (\S+)")


def immediate(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits. Example: ``immediate(env.step(Twin(), "ls data"))``."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("the twin waited for something")


class Twin:
    """Answers `exec` like a sandbox in which FixTheService was laid down."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.listening: dict[int, str] = {}  # port -> the line that a service there answers

    async def exec(self, command: str | list[str], **_: Any) -> ExecResult:
        if isinstance(command, list):
            return self._install(command[4:]) if command[0] == "/bin/sh" else self._ask(command[-1])
        return self._shell(command.strip())

    def _install(self, fields: list[str]) -> ExecResult:
        configuration, serve, ask, spare, *present = fields
        self.files = {"app.conf": configuration, "serve": serve, "ask": ask, f"spare/{spare}": spare + "\n"}
        self.files.update({f"data/{name}": name + "\n" for name in present})
        self.listening = {}
        return _done()

    def _shell(self, command: str) -> ExecResult:
        if match := SERVE.fullmatch(command):
            return self._serve(match[1], background=bool(match[2]))
        if match := SED.fullmatch(command):
            return self._edit(*match.groups())
        program, *arguments = command.split(" ")
        if program == "cat" and len(arguments) == 1:
            return self._cat(arguments[0])
        if program == "ls" and len(arguments) == 1:
            return self._list(arguments[0])
        if program == "cp" and len(arguments) == 2:
            return self._copy(*arguments)
        if program == "./ask" and len(arguments) == 1:
            return self._ask(arguments[0])
        return _done(error=f"/bin/sh: 1: {program}: not found\n", code=127)

    def _cat(self, path: str) -> ExecResult:
        if path not in self.files:
            return _done(error=f"cat: {path}: No such file or directory\n", code=1)
        return _done(self.files[path])

    def _list(self, folder: str) -> ExecResult:
        prefix = folder.rstrip("/") + "/"
        names = sorted(path.removeprefix(prefix) for path in self.files if path.startswith(prefix))
        if not names:
            return _done(error=f"ls: cannot access '{folder}': No such file or directory\n", code=2)
        return _done("".join(name + "\n" for name in names))

    def _edit(self, old: str, new: str, path: str) -> ExecResult:
        if path not in self.files:
            return _done(error=f"sed: can't read {path}: No such file or directory\n", code=2)
        lines = self.files[path].split("\n")
        self.files[path] = "\n".join(line.replace(old, new, 1) for line in lines)
        return _done()

    def _copy(self, source: str, target: str) -> ExecResult:
        if source not in self.files:
            return _done(error=f"cp: cannot stat '{source}': No such file or directory\n", code=1)
        if source == target:
            return _done(error=f"cp: '{source}' and '{target}' are the same file\n", code=1)
        self.files[target] = self.files[source]
        return _done()

    def _serve(self, redirect: str | None, *, background: bool) -> ExecResult:
        values = {m[1]: m[2] for line in self.files["app.conf"].split("\n") if (m := LINE.match(line))}
        port = _number(values.get("port") or "8000")
        data = self.files.get(f"data/{values.get('data', '')}")
        if data is None:
            said, lives = "no data\n", False
        elif port in self.listening:
            said, lives = "busy\n", False
        else:
            said, lives = "ready\n", True
        if redirect == " >log 2>&1":
            self.files["log"] = said
        if lives and data is not None and background:
            self.listening[port] = f"{values.get('greet', '')} {data.rstrip()}\n"
        shown = said if redirect is None else ""
        if background:
            return _done(shown)
        return _done(shown, code=137 if lives else 1, timed_out=lives)

    def _ask(self, port: str) -> ExecResult:
        line = self.listening.get(_number(port)) if port.isdecimal() else None
        return _done(line) if line is not None else _done("refused\n", code=1)


def _number(text: str) -> int:
    """A port as perl reads it: the digits at the front, 16 bits of them."""
    digits = re.match(r"\d*", text)
    return int(digits[0] or 0) % 65536 if digits else 0


def _done(text: str = "", *, error: str = "", code: int = 0, timed_out: bool = False) -> ExecResult:
    return ExecResult(exit_code=code, stdout=text.encode(), stderr=error.encode(), duration=0.0, timed_out=timed_out)
