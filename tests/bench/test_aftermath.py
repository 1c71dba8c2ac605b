"""Behind a bench that was killed nothing is left of what it made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.own_daemon import image, shims
from sandbox import procfs
from sandbox.container.cgroup import PARENT, hierarchy
from tests.support.daemon_host import missing
from tests.support.programs import END_TIMEOUT, Program

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

BENCH = """
import asyncio, os, subprocess, sys
from pathlib import Path
from bench.harness import aftermath
aftermath.guard()
from bench.harness.own_daemon import IMAGE, BenchHost

async def work(host):
    async with host.client() as client:
        sandbox = await client.create(IMAGE)
        await sandbox.exec("setsid sleep 1000000 >/dev/null 2>&1 &")
        away = subprocess.Popen(["setsid", "sleep", "1000000"])
        print(os.getpid(), away.pid, host.directory, host.run, sandbox.id, flush=True)
        if sys.argv[2] == "ends":
            os._exit(3)
        await asyncio.Event().wait()

host = BenchHost(aftermath.directory("pagurus-test-aftermath-", "/var/tmp"), Path(sys.argv[1]))
(host.directory / "mounted").mkdir()
subprocess.run(["mount", "-t", "tmpfs", "none", host.directory / "mounted"], check=True)
host.start()
try:
    asyncio.run(work(host))
except KeyboardInterrupt:
    host.clean()
    print("cleaned", flush=True)
    raise SystemExit(4)
"""


@pytest.mark.parametrize("end", ["ends", "group killed", "requested"])
def test_nothing_is_left(end: str) -> None:
    started = Program(
        [sys.executable, "-c", BENCH, image("debian"), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert started.stdout is not None
    bench, away, directory, run, sandbox = started.stdout.readline().split()
    if end != "ends":  # it may have ended by now
        assert os.getpgid(int(bench)) == started.pid and shims(Path(run))
    match end:
        case "group killed":
            os.killpg(started.pid, signal.SIGKILL)
        case "requested":
            started.terminate()
    said, complained = started.communicate(timeout=END_TIMEOUT)  # ends when all three processes have
    assert started.returncode == {"ends": 3, "group killed": -9, "requested": 4}[end], complained
    assert ("cleaned" in said) == (end == "requested")
    assert ("which are ended now" in complained) == (end in ("ends", "requested")), complained
    assert procfs.task_of(int(away)) is None
    assert not shims(Path(run))
    assert not Path(directory).exists() and not Path(run).exists()
    assert not any(directory in (mount.point, mount.source) or run in mount.point for mount in procfs.mounts())
    for root in {hierarchy().unified, *hierarchy().v1.values()}:
        assert not (root / PARENT / sandbox).exists()
