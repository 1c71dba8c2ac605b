"""Long work in processes of its own: its answers, its errors, its end when nobody wants it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from daemon import aside
from daemon.aside import Aside
from daemon.checkpoints.queue import CheckpointQueue
from daemon.checkpoints.schedule import CheckpointStage
from sandbox.container.cgroup import ASIDE
from sandbox.errors import NotFound, PagurusError, TooMany

LIMITS = {CheckpointStage.READ: 2}


@pytest_asyncio.fixture
async def work() -> AsyncIterator[Aside]:
    queue = CheckpointQueue(LIMITS)
    made = Aside(queue)
    yield made
    await queue.close()
    await made.close()


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def read(path: str) -> str:
    return Path(path).read_text()


async def test_answers_and_errors_come_back(work: Aside) -> None:
    assert await work.run(os.path.basename, "/a/b", sandbox="s") == "b"
    first = await work.run(os.getpid, sandbox="s")
    assert first == await work.run(os.getpid, sandbox="s") != os.getpid()  # one process, and not ours
    assert f":/{ASIDE}\n" in read(f"/proc/{first}/cgroup")  # behind sandboxes for the processors
    with pytest.raises(FileNotFoundError):
        await work.run(os.stat, "/nothing/here", sandbox="s")
    with pytest.raises(NotFound, match="no such thing") as caught:
        await work.run(refuse, sandbox="s")
    assert (caught.value.hint, caught.value.sandbox) == ("look elsewhere", "s-1")
    with pytest.raises(PagurusError, match="Local: here"):
        await work.run(raise_local, sandbox="s")
    with pytest.raises(PagurusError, match="more to read than fits"):
        await work.run(bytearray, 1 << 40, sandbox="s")
    assert await work.run(os.getpid, sandbox="s") == first


def refuse() -> None:
    raise NotFound("no such thing", hint="look elsewhere", sandbox="s-1")


def raise_local() -> None:
    class Local(Exception):
        pass

    raise Local("here")


async def test_it_stands_behind_everybody(work: Aside) -> None:
    pid = await work.run(os.getpid, sandbox="s")
    assert os.getpriority(os.PRIO_PROCESS, pid) == aside.NICE
    assert read(f"/proc/{pid}/oom_score_adj") == "500\n"
    assert os.getpgid(pid) == pid


async def test_who_gives_up_ends_it_at_once_with_all_that_it_started(work: Aside, tmp_path: Path) -> None:
    said = tmp_path / "pids"
    script = f"echo $$ > {said}; sleep 1000 & echo $! >> {said}; wait"
    task = asyncio.ensure_future(work.run(subprocess.run, ["sh", "-c", script], sandbox="s"))
    await until(lambda: said.exists() and said.read_text().count("\n") == 2)
    pids = [int(line) for line in said.read_text().split()]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not any(map(alive, pids)))
    assert await work.run(os.path.basename, "/a/b", sandbox="s") == "b"  # the next has another process


async def test_a_queued_job_that_is_given_up_never_starts(work: Aside, tmp_path: Path) -> None:
    first = asyncio.ensure_future(work.run(time.sleep, 1000, sandbox="s"))
    second = asyncio.ensure_future(work.run(os.mkdir, tmp_path / "made", sandbox="s"))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await work.run(os.path.basename, "/a/b", sandbox="s") == "b"
    assert not (tmp_path / "made").exists()


async def test_a_process_that_is_killed_is_an_error_of_its_job(work: Aside, tmp_path: Path) -> None:
    with pytest.raises(PagurusError, match="was killed"):
        await work.run(os.kill, await work.run(os.getpid, sandbox="s"), signal.SIGKILL, sandbox="s")
    assert await work.run(os.path.basename, "/a/b", sandbox="s") == "b"


async def test_one_sandbox_leaves_room_for_the_others(work: Aside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "MAX_QUEUED", 3)
    mine = [asyncio.ensure_future(work.run(time.sleep, 1000, sandbox="mine")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TooMany, match="3 requests"):
        await work.run(time.sleep, 0, sandbox="mine")
    assert await work.run(os.path.basename, "/a/b", sandbox="other") == "b"
    for task in mine:
        task.cancel()
    await asyncio.gather(*mine, return_exceptions=True)
    assert await work.run(os.path.basename, "/a/b", sandbox="mine") == "b"


async def test_an_idle_process_ends(work: Aside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "IDLE", 0.05)
    pid = await work.run(os.getpid, sandbox="s")
    await until(lambda: not alive(pid))


async def test_it_ends_with_the_daemon(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, time\nfrom daemon.aside import Aside\n"
        "from daemon.checkpoints.queue import CheckpointQueue\n"
        "from daemon.checkpoints.schedule import CheckpointStage\n"
        "async def main():\n"
        " work = Aside(CheckpointQueue({CheckpointStage.READ: 1}))\n"
        " print(await work.run(os.getpid, sandbox='s'), flush=True)\n"
        " await work.run(time.sleep, 1000, sandbox='s')\n"
        "asyncio.run(main())"
    )
    daemon = await asyncio.create_subprocess_exec(aside.sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert daemon.stdout is not None
    pid = int(await daemon.stdout.readline())
    assert alive(pid)
    daemon.kill()
    await daemon.wait()
    await until(lambda: not alive(pid))
