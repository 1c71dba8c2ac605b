"""System calls that a process makes on our behalf: it notices nothing, whatever it was about."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.criu.carried.inject import standing
from sandbox.errors import RestoreFailed
from tests.support.programs import Program

GETPID, FCNTL, MKDIR = 39, 72, 83

# Refuses fcntl by a filter, counts SIGUSR1, and answers each line with how often it came; computes in a thread.
PROGRAM = """
import ctypes, os, signal, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 72), (0x06, 0, 0, 0x50000 | 77), (0x06, 0, 0, 0x7fff0000)]
buffer = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *one) for one in code))
filter = struct.pack('HxxxxxxP', len(code), ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0
seen = 0
def count(*_):
    global seen
    seen += 1
signal.signal(signal.SIGUSR1, count)
def compute():
    while True:
        assert sum(range(1000)) == 499500
threading.Thread(target=compute, daemon=True).start()
print('ready', flush=True)
for line in sys.stdin:
    assert libc.fcntl(0, 1) == -1 and ctypes.get_errno() == 77
    print(seen, flush=True)
"""


@pytest.fixture
def program() -> Iterator[Program]:
    with Program([sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process


def request(process: Program) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("how many\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def nothing() -> None:
    """There is no freezer in these tests: seizing stops the tasks as well."""


def test_calls_are_made_by_the_process_and_leave_no_trace(program: Program, tmp_path: Path) -> None:
    for number in range(1, 20):
        made = tmp_path / str(number)
        with standing([program.pid], thaw=nothing, freeze=nothing) as tasks:
            os.kill(program.pid, signal.SIGUSR1)  # comes in the middle, and is taken afterwards
            assert tasks.call(program.pid, GETPID) == program.pid
            assert tasks.call(program.pid, FCNTL, 0, 1) in (0, 1)  # no filter of its own refuses it
            assert tasks.call(program.pid, MKDIR, None, 0o700, data=bytes(made) + b"\0") == 0
            assert tasks.call(program.pid, MKDIR, None, 0o700, data=bytes(made) + b"\0") == -errno.EEXIST
        assert made.is_dir()
        assert request(program) == str(number)


def test_a_process_that_dies_meanwhile_is_said_to_have(program: Program) -> None:
    with (
        pytest.raises((RestoreFailed, ProcessLookupError)),
        standing([program.pid], thaw=nothing, freeze=nothing) as tasks,
    ):
        program.kill()
        tasks.call(program.pid, GETPID)


def test_nobody_is_traced_afterwards(program: Program) -> None:
    with standing([program.pid], thaw=nothing, freeze=nothing) as tasks:
        assert tasks.call(program.pid, GETPID) == program.pid
    for task in Path(f"/proc/{program.pid}/task").iterdir():
        assert "TracerPid:\t0\n" in (task / "status").read_text()
    assert request(program) == "0"
