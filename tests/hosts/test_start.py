"""What is made of a package that leaves something, of a command that fails, and of what a bench says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.hosts import benches

SCRIPT = Path(__file__).with_name("package.sh")


def act_of(directory: Path, script: str) -> dict[str, str]:
    """The result that a line of the script notes."""
    subprocess.run(["bash", "-c", f"JOB={directory}; . {SCRIPT}; {script}"], check=True)
    result: dict[str, str] = json.loads((directory / "acts.jsonl").read_text())
    return result


@pytest.mark.parametrize(
    ("left", "result", "note"),
    [
        ("", "passed", ""),
        ("/run/pagurus", "failed", "/run/pagurus"),
        ("5%\r10%", "failed", "5% 10%"),
        ("one\n/a 'path' with \"quotes\"", "failed", "one /a 'path' with quotes"),
    ],
)
def test_what_a_purge_left(tmp_path: Path, left: str, result: str, note: str) -> None:
    (tmp_path / "left").write_text(left)
    stubs = "pgrep() { false; }; grep() { cat " + str(tmp_path / "left") + "; }"
    found = act_of(tmp_path, f'{stubs}; act "purged, it leaves nothing" "$(what_is_left {tmp_path}/none)"')
    assert (found["result"], " ".join(found["note"].split())) == (result, note)


def test_a_command_that_fails_is_a_failed_act(tmp_path: Path) -> None:
    found = act_of(tmp_path, 'fails() { echo "no room" >&2; false; }; act "removed" "$(failure fails)"')
    assert (found["result"], found["note"]) == ("failed", "fails failed: no room")
    (tmp_path / "acts.jsonl").unlink()
    assert act_of(tmp_path, 'act "removed" "$(failure true)"')["result"] == "passed"


def test_a_bench_is_judged_by_its_failures_and_its_end() -> None:
    bench = next(item for item in benches.BENCHES if item.name == "isolation")
    good = '{"acts": 3, "contained": 3, "not_contained": {}}'
    assert benches.judged(bench, 0, good) == (True, "3 acts: contained 3")
    assert benches.judged(bench, 1, good)[0] is False
    bad = '{"acts": 3, "contained": 2, "not_contained": {"raw socket": "it was opened"}}'
    assert benches.judged(bench, 0, bad) == (False, "3 acts: contained 2; raw socket: it was opened")
    assert benches.judged(bench, 137, "Killed") == (False, "exit status 137, no result")
