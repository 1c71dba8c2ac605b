"""The examples of the README run as they stand there, and print what their comments say."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_host import Daemon, missing

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
SYNCHRONOUS = [source for source in EXAMPLES if "sandbox.sync" in source]
ASYNCHRONOUS = [source for source in EXAMPLES if "Client()" in source and source not in SYNCHRONOUS]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon where `Client()` looks for it."""
    if reason := missing():
        pytest.skip(reason)
    daemon = Daemon(tmp_path_factory.mktemp("readme") / "host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGURUS_RUN", str(daemon.run))
        try:
            yield daemon.start()
        finally:
            daemon.clean()


def promised(source: str) -> list[str]:
    """What the comments behind calls of `print` say, in order; ``...`` stands for anything."""
    return re.findall(r"print\(.*\).*?# (\S.*)$", source, re.MULTILINE)


def printed(source: str) -> str:
    """Run one example, top-level ``await`` included; returns what it printed."""
    code = compile(source, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    last_seen, names = io.StringIO(), {"__name__": "example"}
    with contextlib.redirect_stdout(last_seen):
        outcome = eval(code, names)
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
    return last_seen.getvalue()


@pytest.mark.parametrize("source", ASYNCHRONOUS + SYNCHRONOUS)
def test_an_example_prints_what_it_promises(local: Daemon, source: str) -> None:
    said = printed(source)
    assert promised(source)
    for line in promised(source):
        assert re.search(re.escape(line).replace(r"\.\.\.", r"\w+"), said), (line, said)
    assert printed("from sandbox.sync import Client\nwith Client() as host: print(host.sandboxes())") == "[]\n"


def test_both_ways_are_shown() -> None:
    assert ASYNCHRONOUS and SYNCHRONOUS


@pytest.mark.parametrize("source", [item for item in EXAMPLES if item not in ASYNCHRONOUS + SYNCHRONOUS])
def test_every_other_example_runs_alone(source: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tour_of_the_command_line_runs_as_printed(local: Daemon, tmp_path: Path) -> None:
    """Every line of README's tour but those that need a terminal or probe the whole host."""
    text = (ROOT / "README.md").read_text()
    tour = text[text.index("## The program") :].split("```sh\n")[1].split("```")[0]
    lines = [line for line in tour.splitlines() if not line.startswith(("pagurus doctor", "pagurus shell"))]
    assert len(lines) == 8
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in lines:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stderr)
        if "--why" in line:
            assert "page" in done.stdout
    assert (tmp_path / "page").read_text() == "hello\n"
    emptied = """
from sandbox.sync import Client
with Client() as host:
    for each in host.sandboxes():
        host.get(each.id).remove()
"""
    assert printed(emptied) == ""
