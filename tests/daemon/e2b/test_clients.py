"""Clients of E2B as they come from PyPI, with three variables set and nothing else, against a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.daemon.e2b.conftest import Served

ROOT = Path(__file__).parents[3]
VERSIONS = [line for line in (ROOT / "scripts/clients.txt").read_text().splitlines() if not line.startswith("#")]
CALLS = ROOT / "tests/support/e2b_calls.py"
ABSENT = {"2.10.0": {"snapshots", "fork"}, "2.30.0": {"fork"}}  # what those versions do not have


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_of_a_client(served: Served, version: str) -> None:
    python = ROOT / f".prefix/clients/e2b-{version}/bin/python"
    if not python.exists():
        pytest.skip(f"e2b {version} is not installed: run `make setup-clients`")
    others = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    environment = {
        **others,
        "E2B_API_KEY": served.key(),
        "E2B_API_URL": served.url,
        "E2B_SANDBOX_URL": served.url,
    }
    ran = subprocess.run([python, CALLS], env=environment, capture_output=True, text=True, timeout=240)
    outcomes = {each["call"]: each["outcome"] for each in map(json.loads, ran.stdout.splitlines())}
    failed = {name: outcome for name, outcome in outcomes.items() if not outcome.startswith(("passed", "absent"))}
    assert not failed, "\n".join(failed.values())
    assert ran.returncode == 0, ran.stderr
    absent = {name for name, outcome in outcomes.items() if outcome.startswith("absent")}
    assert absent == ABSENT.get(version, set())
    assert len(outcomes) >= 20
