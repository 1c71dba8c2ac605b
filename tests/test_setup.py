"""`make setup` where a step fails: the real script, with steps of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(os.geteuid() != 0, reason="set-up needs root")
def test_a_step_that_fails_ends_the_others(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    shutil.copytree(ROOT / "scripts", scripts)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "ready").mkdir()
    waiting = '#!/bin/sh\nsleep 1000 & echo $! >"$(dirname "$0")/../ready/$(basename "$0")"\nsleep 1000\necho went on\n'
    failing = """#!/bin/sh
while [ "$(cat "$(dirname "$0")"/../ready/* 2>/dev/null | wc -l)" != 2 ]; do sleep 0.05; done
exit 3
"""
    steps = {"system.sh": "#!/bin/sh\n", "criu.sh": failing, "python.sh": waiting, "image.sh": waiting}
    for name, text in steps.items():
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    existing = {**os.environ, "PAGURUS_PREFIX": str(tmp_path / "prefix"), "PAGURUS_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        ["bash", str(scripts / "setup.sh")], env=existing, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3 and "went on" not in done.stdout, done.stderr
    left = [Path("/proc", path.read_text().strip()) for path in (tmp_path / "ready").iterdir()]
    until = time.monotonic() + 60  # they were told to end; a busy machine may take a moment
    while any((path / "fd/0").exists() for path in left) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(left) == 2 and not any((path / "fd/0").exists() for path in left)
