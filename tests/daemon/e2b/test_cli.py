"""E2B's program for the command line, as it comes from npm, with three variables set and nothing else."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.daemon.e2b.conftest import Served
from tests.support.daemon_host import IMAGE
from tests.support.programs import Program
from tests.support.tools import record

E2B = Path(__file__).parents[3] / ".prefix/clients/cli/node_modules/.bin/e2b"


class Shell:
    """The program with its variables."""

    def __init__(self, served: Served, home: Path) -> None:
        others = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
        self.env = {**others, "HOME": str(home), "NO_COLOR": "1", "TERM": "xterm"}
        self.env |= {"E2B_API_KEY": served.key(), "E2B_API_URL": served.url, "E2B_SANDBOX_URL": served.url}

    def run(self, *words: str, status: int = 0) -> str:
        ran = subprocess.run([E2B, *words], env=self.env, capture_output=True, text=True, timeout=240)
        assert ran.returncode == status, (words, ran)
        return ran.stdout

    def sandboxes(self, *words: str) -> list[dict[str, object]]:
        said = self.run("sandbox", "list", "--format", "json", *words)
        result: list[dict[str, object]] = json.loads(said) if said.strip().startswith("[") else []
        return result

    def terminal(self, *words: str, said: bytes) -> bytes:
        """What it prints at a terminal, into which `said` is typed."""
        ours, theirs = pty.openpty()
        printed = b""
        with Program([E2B, *words], env=self.env, stdin=theirs, stdout=theirs, stderr=theirs):
            os.close(theirs)
            try:
                while b"$ " not in printed and b"# " not in printed:
                    printed += os.read(ours, 4096)
                os.write(ours, said)
                while part := os.read(ours, 4096):
                    printed += part
            except OSError:  # it has ended
                pass
            finally:
                os.close(ours)
        return printed


@pytest.mark.timeout(600)
def test_the_verbs_of_the_command_line(served: Served, tmp_path: Path) -> None:
    if not E2B.exists():
        pytest.skip("@e2b/cli is not installed: run `make setup-clients` where there is npm")
    shell = Shell(served, tmp_path)
    id = shell.run("sandbox", "create", IMAGE, "--detach").split()[-1]
    assert [item["sandboxId"] for item in shell.sandboxes()] == [id]
    assert f"Sandbox ID: {id}" in shell.run("sandbox", "info", id)
    assert shell.run("sandbox", "exec", id, "--", "echo", "hi") == "hi\n"
    shell.run("sandbox", "exec", id, "exit 3", status=3)
    assert "42" in shell.terminal("sandbox", "connect", id, said=b"echo $((6 * 7)); exit\n").decode()
    assert "CPU" in shell.run("sandbox", "metrics", id)
    assert "Logs for sandbox" in shell.run("sandbox", "logs", id)
    shell.run("sandbox", "exec", id, "echo saved > /tmp/state")
    made = shell.run("sandbox", "snapshot", "create", id)
    assert "Created snapshot c-" in made
    snapshot = next(word for word in made.split() if word.startswith("c-"))
    assert snapshot in shell.run("sandbox", "snapshot", "list")
    shell.run("sandbox", "pause", id)
    assert [item["state"] for item in shell.sandboxes("--state", "paused")] == ["paused"]
    shell.run("sandbox", "resume", id)
    other = shell.run("sandbox", "create", snapshot, "--detach").split()[-1]
    assert shell.run("sandbox", "exec", other, "cat /tmp/state") == "saved\n"
    shell.run("sandbox", "kill", id, other)
    assert shell.sandboxes() == []
    assert "No templates found" in shell.run("template", "list")
    verbs = "create list info exec connect metrics logs snapshot pause resume kill templates"
    record("cli", dict.fromkeys(verbs.split(), "passed"))
