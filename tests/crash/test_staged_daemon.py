"""The daemon of `pagurus bench recovery` notes where it is; what it watches must exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sandbox import paths

PROGRAM = """
import sys
from pathlib import Path
from tests.crash.staged_daemon import Notes, watch
from sandbox.database import WriterThread
before = WriterThread._commit
watch(Notes(Path(sys.argv[1])))
assert WriterThread._commit is not before
"""


def test_all_that_it_watches_exists(tmp_path: Path) -> None:
    place = tmp_path / "stages"
    place.write_bytes(bytes(64))
    subprocess.run([sys.executable, "-c", PROGRAM, place], check=True, cwd=paths.CHECKOUT)
