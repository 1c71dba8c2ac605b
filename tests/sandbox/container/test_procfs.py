"""What processes call themselves is no word of the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sandbox import procfs
from tests.support.programs import Program

NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
print("named", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["NSpid:\t1", "x) Z 1 1 (y", "a\nNSpid:\t1", "State:\tZ (dead)"])
def test_a_name_is_taken_for_nothing_else(name: str) -> None:
    command = [sys.executable, "-c", NAMED, name]
    with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"named\n"
        task = procfs.task_of(running.pid)
        assert task is not None and task.parent == os.getpid()
        assert procfs.inner_pid(running.pid) == running.pid
        assert procfs.inner_pid(f"{running.pid}/task/{running.pid}") == running.pid
        assert not procfs.is_doomed(running.pid)
        assert len(procfs.descriptors(running.pid)) == 3
        running.destroy()
    assert procfs.task_of(running.pid) is None
    assert procfs.inner_pid(running.pid) is None
    assert procfs.is_doomed(running.pid)
