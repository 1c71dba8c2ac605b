"""A small program for the inspector's tests, in the image of the generator: `/probe NAME` does one thing N times.

Not a test module.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.crash.torture.run import build

SOURCE = Path(__file__).with_name("ebpf_probe.c")


def image_with_probe(directory: Path) -> Path:
    """The generator's image with `/probe` in it; skips where nothing compiles."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: run `make setup`")
    image = build(directory)
    command = ["cc", "-O1", "-static", "-pthread", "-o", str(image / "probe"), str(SOURCE), "-lrt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the probe does not compile (libc6-dev is missing?): {done.stderr[-500:]}")
    return image
