"""A twin of the sandbox with the service in it, simulated: the same environment runs on it, a thousand times faster.

Owns: what the programs of this example would print and leave behind. Does not own: the environment, which is the real
one, and the shell's own commands (rollout.environments.shell). Guarantee: on every sequence of this example's commands
the twin prints what the sandbox prints (tests/examples/test_twin.py compares them on random sequences).
"""

from __future__ import annotations

import re

from rollout.environments.shell import TwinShell, answer
from sandbox.messages import ExecResult

SERVE = re.compile(r"\./serve( >log 2>&1| >/dev/null 2>&1)?( &)?")
LINE = re.compile(r"(\w+) (\S+)")


class Twin(TwinShell):
    """Answers `exec` like a sandbox in which FixTheService was laid down."""

    def __init__(self) -> None:
        super().__init__()
        self.listening: dict[int, str] = {}  # port -> the line that a service there answers

    def run(self, command: list[str]) -> ExecResult:
        return self._install(command[4:]) if command[0] == "/bin/sh" else self._request(command[-1])

    def shell(self, command: str) -> ExecResult:
        if match := SERVE.fullmatch(command):
            return self._serve(match[1], background=bool(match[2]))
        return super().shell(command)

    def program(self, name: str, arguments: list[str]) -> ExecResult | None:
        return self._request(arguments[0]) if name == "./ask" and len(arguments) == 1 else None

    def _install(self, fields: list[str]) -> ExecResult:
        configuration, serve, request, standby, *present = fields
        self.files = {"app.conf": configuration, "serve": serve, "ask": request, f"spare/{standby}": standby + "\n"}
        self.files.update({f"data/{name}": name + "\n" for name in present})
        self.listening = {}
        return answer()

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
            return answer(shown)
        return answer(shown, code=137 if lives else 1, timed_out=lives)

    def _request(self, port: str) -> ExecResult:
        line = self.listening.get(_number(port)) if port.isdecimal() else None
        return answer(line) if line is not None else answer("refused\n", code=1)


def _number(text: str) -> int:
    """A port as perl reads it: the digits at the front, 16 bits of them."""
    digits = re.match(r"\d*", text)
    return int(digits[0] or 0) % 65536 if digits else 0
