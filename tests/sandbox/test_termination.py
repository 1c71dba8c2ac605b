"""What asks a program to end ends it, however it was started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sandbox.paths import CHECKOUT
from tests.support.programs import END_TIMEOUT, Program, in_background, in_foreground

SHOWN = "from sandbox.termination import termination_signals; print(*(each.name for each in termination_signals()))"
WORK = """
import asyncio
from pagurus.common import carry_out

async def work():
    try:
        print("begun", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleaned", flush=True)

try:
    carry_out(work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_what_was_ignored_at_the_start_ends_nothing() -> None:
    program = [sys.executable, "-c", SHOWN]
    options = {"cwd": CHECKOUT, "stdout": subprocess.PIPE, "text": True}
    with Program(in_foreground(program), **options) as usual, Program(in_background(program), **options) as background:
        assert usual.communicate(timeout=END_TIMEOUT)[0] == "SIGTERM SIGINT SIGHUP\n"
        assert background.communicate(timeout=END_TIMEOUT)[0] == "SIGTERM\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_work_is_cleaned_up(number: signal.Signals) -> None:
    with Program(
        in_foreground([sys.executable, "-c", WORK]), cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "begun\n"
        program.send_signal(number)
        assert program.communicate(timeout=END_TIMEOUT)[0] == "cleaned\ninterrupted\n"


@pytest.mark.parametrize("started", [in_foreground, in_background])
@pytest.mark.parametrize("module", ["work", "coordinator"])
def test_sigterm_ends_it_however_it_was_started(
    tmp_path: Path, module: str, started: Callable[[Sequence[str]], list[str]]
) -> None:
    words = {
        "work": ["-c", WORK],
        "coordinator": ["-m", "coordinator", "--state", str(tmp_path / "state"), "--run", str(tmp_path / "run")],
    }
    command = started([sys.executable, *words[module]])
    log = tmp_path / "log"
    with log.open("wb") as out, Program(command, cwd=CHECKOUT, stdout=out, stderr=out) as program:
        begun = tmp_path / "run" / "cluster.sock" if module == "coordinator" else log
        deadline = time.monotonic() + 10 * END_TIMEOUT
        while not begun.exists() or not (begun != log or log.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.01)
            assert program.poll() is None, log.read_text()
        if started is in_background:
            program.send_signal(signal.SIGHUP)
            program.send_signal(signal.SIGINT)
        program.terminate()
        assert program.wait(END_TIMEOUT) == 0, log.read_text()
