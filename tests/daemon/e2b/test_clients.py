"""Clients of E2B as they come from PyPI, with three variables set and nothing else, against a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.daemon.e2b.conftest import Served
from tests.support.tools import LIST, record

ROOT = Path(__file__).parents[3]
VERSIONS = [line.split()[0].removeprefix("e2b-") for line in LIST if line.startswith("e2b-") and line[4].isdigit()]
CALLS = ROOT / "tests/support/e2b_calls.py"
ABSENT = {"2.10.0": {"snapshots", "fork", "no_volumes"}, "2.30.0": {"fork"}}  # what those versions do not have


def outcomes(served: Served, program: list[str | Path], cwd: Path, tool: str, **key: object) -> dict[str, str]:
    """What came of each call that `program` makes with the three variables set."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    environment = {**others, "E2B_API_KEY": served.key(**key), "E2B_API_URL": served.url, "E2B_SANDBOX_URL": served.url}
    ran = subprocess.run(program, env=environment, cwd=cwd, capture_output=True, text=True, timeout=900)
    made = {item["call"]: item["outcome"] for item in map(json.loads, ran.stdout.splitlines())}
    record(tool, {name: outcome if len(outcome) < 40 else "failed" for name, outcome in made.items()})
    fine = ("passed", "absent", "refused")
    failed = {name: outcome for name, outcome in made.items() if not outcome.startswith(fine)}
    assert not failed, "\n".join(failed.values())
    assert ran.returncode == 0, ran.stderr
    return made


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_of_a_client(served: Served, version: str) -> None:
    python = ROOT / f".prefix/clients/e2b-{version}/bin/python"
    if not python.exists():
        pytest.skip(f"e2b {version} is not installed: run `make setup-clients`")
    made = outcomes(served, [python, CALLS], ROOT, f"e2b-{version}")
    assert {name for name, outcome in made.items() if outcome.startswith("absent")} == ABSENT.get(version, set())
    assert len(made) >= 20


@pytest.mark.long  # eight builds
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", VERSIONS)
def test_templates_of_a_client(served: Served, version: str) -> None:
    python = ROOT / f".prefix/clients/e2b-{version}/bin/python"
    if not python.exists():
        pytest.skip(f"e2b {version} is not installed: run `make setup-clients`")
    made = outcomes(served, [python, CALLS.with_name("e2b_templates.py")], ROOT, f"e2b-{version}", scope="admin")
    assert len(made) == 8


def test_every_call_of_the_client_of_javascript(served: Served, tmp_path: Path) -> None:
    modules = ROOT / ".prefix/clients/js/node_modules"
    if not modules.exists():
        pytest.skip("e2b for JavaScript is not installed: run `make setup-clients` where there is npm")
    program = tmp_path / "calls.mjs"  # beside its modules, as node looks for them
    program.write_text(CALLS.with_suffix(".mjs").read_text())
    (tmp_path / "node_modules").symlink_to(modules)
    assert len(outcomes(served, ["node", program], tmp_path, "js")) == 8


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_code_interpreter(served: Served) -> None:
    python = ROOT / ".prefix/clients/e2b-code-interpreter/bin/python"
    if not python.exists():
        pytest.skip("the code interpreter of E2B is not installed: run `make setup-clients`")

    async def build() -> None:
        async with served.daemon.client() as host:
            file = ROOT / "examples/code_interpreter/Dockerfile"
            await host.images.build("code-interpreter", ROOT, file=file)

    asyncio.run(build())
    made = outcomes(served, [python, CALLS.with_name("e2b_code.py")], ROOT, "e2b-code-interpreter")
    assert len(made) == 7
