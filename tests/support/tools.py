"""Other people's tools that tests run unmodified: where `make setup-clients` put each, and what it is started with."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from sandbox import paths
from tests.support.daemon_host import Daemon, missing

ROOT = Path(__file__).resolve().parents[2]
LIST = [line for line in (ROOT / "scripts/clients.txt").read_text().splitlines() if not line.startswith("#")]
RESULTS = paths.prefix() / "clients/results"  # what the tests record of each tool, for the table of the page
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no look-up of prices over the network
    "HARBOR_TELEMETRY": "off",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),  # our plug-ins, as this checkout has them
}


def tool(name: str) -> Path:
    """The environment of a tool; skips the test where it is not installed."""
    if reason := missing():
        pytest.skip(reason)
    place = paths.prefix() / "clients" / name
    if not (place / "bin/python").exists():
        pytest.skip(f"{name} is not installed: run `make setup-clients`")
    return place


def record(name: str, calls: Mapping[str, str]) -> None:
    """What came of each call of a tool: passed, refused, absent or failed. Adds to what is recorded already."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{name}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **calls}, indent=1))


def environment(daemon: Daemon, home: Path, **more: str) -> dict[str, str]:
    """Variables for a tool whose sandboxes `daemon` has: nothing of ours but the way to it."""
    named = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    return {**named, **QUIET, "HOME": str(home), "PAGURUS_HOST": str(daemon.socket), **more}


def ran(program: list[str | Path], env: dict[str, str], cwd: Path, *, timeout: float = 500.0) -> str:
    """What a program prints; its end, where it failed."""
    done = subprocess.run(
        program, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout
