"""Programs that torchrun starts, and the JSON that one of them prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run(module: str, ranks: int, *arguments: str, around: Sequence[str] = (), **env: str) -> dict[str, Any]:
    """The object that `module` printed as `ranks` processes of one thread each. `around`: a command that runs them."""
    ended = subprocess.run(
        [
            *(*around, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("-m", module, *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or not lines:
        raise RuntimeError(f"the ranks of {module} failed: {ended.stderr[-1000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
