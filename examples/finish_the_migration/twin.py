"""A twin of the sandbox with the migration in it, simulated: the same environment runs on it without sandboxes.

Owns: what `./migrate` and `./check` print and leave behind. Does not own: the environment, which is the real one, and
the shell's own commands (rollout.environments.shell). Guarantee: on every sequence of this example's commands the twin
prints what the sandbox prints (tests/examples/test_twin.py compares them on random sequences).
"""

from __future__ import annotations

import re

from rollout.environments.shell import TwinShell, answer
from sandbox.messages import ExecResult

from .environment import AUDIT
from .scenario import STEPS

STEP = re.compile(r"\d (\w+) (\w+)\n", re.ASCII)
ROW = re.compile(r"(\d \w+) \w+", re.ASCII)


class Twin(TwinShell):
    """Answers `exec` like a sandbox in which FinishTheMigration was laid down."""

    def run(self, command: list[str]) -> ExecResult:
        return self._audit() if command == AUDIT else self._install(command[4:])

    def program(self, name: str, arguments: list[str]) -> ExecResult | None:
        programs = {"./migrate": self._migrate, "./check": self._check}
        return programs[name]() if name in programs and name.removeprefix("./") in self.files else None

    def _install(self, fields: list[str]) -> ExecResult:
        migrate, check, schema, rows, standby, text, lock, *steps = fields
        self.files = {"migrate": migrate, "check": check, "schema": schema, "rows": rows, "done": ""}
        if standby != "-":
            self.files[f"spare/{standby}"] = text
        if lock != "-":
            self.files["lock"] = ""
        self.files.update({f"steps/{n}": step for n, step in zip(steps[::2], steps[1::2], strict=True)})
        return answer()

    def _audit(self) -> ExecResult:
        shown = [self.files.get(name, "") for name in ("schema", "rows", "done")]
        return answer("--\n".join(shown) + ("locked\n" if "lock" in self.files else ""))

    def _migrate(self) -> ExecResult:
        if "lock" in self.files:
            return answer("locked\n", code=1)
        self.files["lock"] = ""
        said = ""
        for n in STEPS:
            if n in self.files.get("done", "").splitlines():
                continue
            trouble = self._apply(n)
            said += f"{n} {trouble or 'ok'}\n"
            if trouble:
                return answer(said, code=1)
        del self.files["lock"]
        return answer(said)

    def _apply(self, n: str) -> str:
        """Step n; what keeps it from being done."""
        if f"steps/{n}" not in self.files:
            return "missing"
        step = STEP.fullmatch(self.files[f"steps/{n}"])
        if step is None:
            return "unreadable"
        old, new = step.groups()
        schema, count = re.subn(rf"^{n} {old}$", f"{n} {new}", self.files.get("schema", ""), count=1, flags=re.M)
        if not count or "rows" not in self.files:
            return f"no {old}"
        rows = re.sub(rf"^{n} {old} ", f"{n} {new} ", self.files["rows"], flags=re.M)
        self.files.update(schema=schema, rows=rows, done=self.files.get("done", "") + f"{n}\n")
        return ""

    def _check(self) -> ExecResult:
        if "lock" in self.files:
            return answer("locked\n", code=1)
        if "rows" not in self.files:
            return answer(code=1)
        result = {match[1] for line in self.files["rows"].split("\n") if (match := ROW.fullmatch(line))}
        return answer("".join(f"{item}\n" for item in sorted(result)))
