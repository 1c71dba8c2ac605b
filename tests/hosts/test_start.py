"""The script that a guest runs: what it makes of what a purged package left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.hosts.__main__ import START


@pytest.mark.parametrize(
    ("left", "result", "note"),
    [
        ("", "passed", ""),
        ("/run/pagurus", "failed", "/run/pagurus"),
        ("one\n/a 'path' with \"quotes\"", "failed", "one /a 'path' with quotes"),
    ],
)
def test_what_a_purge_left(tmp_path: Path, left: str, result: str, note: str) -> None:
    """The end of the script, with programs that find `left`."""
    begins, ends = START.index("left=$(ls"), START.index("[ $result = passed ]")
    script = START[begins:ends].replace("%%", "%").replace("/job/", f"{tmp_path}/")
    (tmp_path / "left").write_text(left)
    stubs = f"ls() {{ cat {tmp_path}/left; }}; pgrep() {{ false; }}; grep() {{ false; }}\n"
    subprocess.run(["bash", "-c", stubs + script], check=True)
    act = json.loads((tmp_path / "acts.jsonl").read_text())
    assert (act["result"], " ".join(act["note"].split())) == (result, note)
