"""A daemon that dies at any instant loses no sandbox and no durable checkpoint (I5), and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import CheckpointFailed, PagurusError, SandboxDead, SandboxState, Verdict
from sandbox.container.cgroup import Cgroup
from sandbox.container.shim import SOCKET_NAME, Shim
from sandbox.messages import CheckpointState
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, missing, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SERVICE = f"setsid sleep 1000000 >/dev/null 2>&1 & {ASLEEP}"


@pytest.fixture
def daemon(own: Daemon) -> Daemon:
    return own


async def test_sandboxes_outlive_a_killed_daemon(daemon: Daemon) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE, name="survivor", env={"A": "1"})
        await sandbox.exec(SERVICE)
        before = await sandbox.durable(await sandbox.exec("echo kept > /kept"))
    daemon.kill()
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        sandbox = await host.get("survivor")
        assert sandbox.info.state is SandboxState.RUNNING
        assert (sandbox.info.turn, sandbox.info.head) == (2, before.id)
        assert (await host.checkpoint(before)).state is CheckpointState.DURABLE
        result = await sandbox.exec("cat /kept; echo $A; grep -l sleep /proc/[0-9]*/comm | wc -l")
        assert result.text == "kept\n1\n1\n"
        assert result.turn == 3
        assert result.verdict is Verdict.BOTH  # nobody watched while the daemon was dead
        await sandbox.exec("true")  # a call that the last daemon's dump had interrupted may still count once
        assert (await sandbox.exec("true")).verdict is Verdict.NONE
        await sandbox.kill()
        await sandbox.restore(before)
        assert (await sandbox.exec("cat /kept; grep -l sleep /proc/[0-9]*/comm | wc -l")).text == "kept\n1\n"


async def test_a_sandbox_that_died_meanwhile_is_dead_and_restorable(daemon: Daemon) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE)
        await sandbox.durable(await sandbox.exec("echo kept > /kept"))
    daemon.kill()
    os.kill(await _shim(daemon, sandbox.id), signal.SIGKILL)
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        sandbox = await host.get(sandbox.id)
        assert sandbox.info.state is SandboxState.DEAD
        with pytest.raises(SandboxDead):
            await sandbox.exec("true")
        await sandbox.restore()
        assert (await sandbox.exec("cat /kept")).text == "kept\n"


async def test_a_sandbox_that_a_checkpoint_held_still_goes_on(daemon: Daemon) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE)
        await sandbox.durable(await sandbox.exec(SERVICE))
    daemon.kill()
    Cgroup(sandbox.id).freeze()
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        sandbox = await host.get(sandbox.id)
        result = await sandbox.exec("echo on", timeout=240)
        assert (result.text, result.timed_out) == ("on\n", False)
        assert (await sandbox.durable(result)).state is CheckpointState.DURABLE


async def test_a_stop_leaves_sandboxes_running_unless_asked(daemon: Daemon) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE)
        result = await sandbox.exec("echo x > /x")
    assert await asyncio.to_thread(daemon.stop) == 0
    await asyncio.to_thread(daemon.start, "--stop-sandboxes")
    async with daemon.client() as host:
        assert (await host.checkpoint(result.checkpoint)).state is CheckpointState.DURABLE
        assert await (await host.get(sandbox.id)).files.read("/x") == b"x\n"
    await asyncio.to_thread(daemon.stop)
    assert _left(daemon) == []


async def test_a_shim_that_is_busy_is_not_taken_for_one_that_is_gone(tmp_path: Path) -> None:
    """Daemons that were killed have left it connections, and it is starting a program meanwhile."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as shim, contextlib.ExitStack() as dead:
        shim.bind(str(tmp_path / SOCKET_NAME))
        shim.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                former = dead.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                former.setblocking(False)
                former.connect(str(tmp_path / SOCKET_NAME))
        connecting = asyncio.ensure_future(Shim.connect(tmp_path))
        await asyncio.sleep(0)
        assert not connecting.done()
        shim.accept()[0].close()
        (await connecting).close()


@pytest.mark.parametrize(("socket", "says"), [(None, b"already listens"), ("other.sock", b"another daemon works in")])
async def test_a_second_daemon_is_refused(daemon: Daemon, tmp_path: Path, socket: str | None, says: bytes) -> None:
    environment = {**os.environ, "PAGURUS_STATE": str(daemon.state), "PAGURUS_RUN": str(daemon.run)}
    options = [] if socket is None else ["--socket", str(tmp_path / socket)]
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "daemon", *options, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    _, error = await other.communicate()
    assert other.returncode == 1
    assert says in error


async def test_only_the_daemons_user_may_connect(daemon: Daemon) -> None:
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600


@pytest.mark.parametrize("round_", range(4))
async def test_killed_under_load_nothing_is_lost_and_nothing_left(daemon: Daemon, round_: int) -> None:
    """Several sandboxes work; the daemon is killed after a prime count of answers, then everything is checked."""
    answers = 0
    enough = asyncio.Event()
    durable: dict[str, tuple[str, bytes]] = {}

    async def work(host, number: int) -> None:
        nonlocal answers
        with contextlib.suppress(PagurusError):  # the daemon dies in the middle of it
            sandbox = await host.create(IMAGE, name=f"n{number}")
            while True:
                with contextlib.suppress(CheckpointFailed):  # too busy a machine: its next turn captures that as well
                    result = await sandbox.exec(f"echo {answers} >> /log; cat /log")
                    answers += 1
                    if answers >= (3, 7, 13, 29)[round_]:
                        enough.set()
                    if answers % 5 == 0:
                        await sandbox.exec(SERVICE)
                    info = await sandbox.durable(result)
                    durable[sandbox.id] = (info.id, result.stdout)

    async with daemon.client(timeout=0) as host:
        tasks = [asyncio.ensure_future(work(host, number)) for number in range(4)]
        await asyncio.wait({*tasks, ready := asyncio.ensure_future(enough.wait())}, return_when="FIRST_COMPLETED")
        assert ready.done(), tasks
        daemon.kill()
        await asyncio.gather(*tasks)
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        infos = {info.id: info for info in await host.sandboxes()}
        assert set(durable) <= set(infos)
        assert {info.state for info in infos.values()} <= {SandboxState.RUNNING}
        for identity, (checkpoint, log) in durable.items():
            sandbox = await host.get(identity)
            assert (await sandbox.files.read("/log")).startswith(log)
            assert (await host.checkpoint(checkpoint)).state is CheckpointState.DURABLE
            await sandbox.restore(checkpoint)
            assert await sandbox.files.read("/log") == log
        for info in await host.sandboxes():
            await (await host.get(info.id)).remove()
        await until(lambda: not _left(daemon), "what is not needed any more is removed")
    await asyncio.to_thread(daemon.stop)
    assert _left(daemon) == []
    with contextlib.closing(sqlite3.connect(daemon.state / "catalogue.sqlite")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_content_without_a_row_is_collected(daemon: Daemon) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE)
        retained = await sandbox.durable(await sandbox.exec("echo x > /x"))
    daemon.kill()
    stray = daemon.state / "pool" / "checkpoints" / "c-stray"
    subprocess.run(["btrfs", "subvolume", "create", stray], check=True, capture_output=True)  # noqa: ASYNC221
    (daemon.state / "checkpoints" / "c-stray.dump").write_bytes(b"half")
    (daemon.run / "sandboxes" / "s-stray").mkdir()
    (daemon.run / "sandboxes" / "file").write_text("of nobody")
    await asyncio.to_thread(daemon.start)
    assert [path.name for path in (daemon.state / "pool" / "checkpoints").iterdir()] == [retained.id]
    assert not list((daemon.state / "checkpoints").glob("c-stray*"))
    assert not (daemon.run / "sandboxes" / "s-stray").exists()
    assert not (daemon.run / "sandboxes" / "file").exists()


async def test_a_checkpoint_whose_content_is_gone_is_not_offered(daemon: Daemon) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE)
        first = await sandbox.durable(await sandbox.exec("echo 1 > /x"))
        second = await sandbox.durable(await sandbox.exec("echo 2 > /x"))
        await sandbox.kill()
    await asyncio.to_thread(daemon.stop)
    pool = subprocess.run(  # noqa: ASYNC221
        ["btrfs", "subvolume", "delete", daemon.state / "pool" / "checkpoints" / second.id], capture_output=True
    )
    assert pool.returncode == 0, pool.stderr
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        assert (await host.checkpoint(second)).state is CheckpointState.FAILED
        sandbox = await host.get(sandbox.id)
        assert (await sandbox.restore()).checkpoint == first.id
        assert await sandbox.files.read("/x") == b"1\n"


async def _shim(daemon: Daemon, sandbox: str) -> int:
    shim = await Shim.connect(daemon.run / "sandboxes" / sandbox)
    (pid, *_), fds = await shim.call("hello")
    for fd in fds:
        os.close(fd)
    shim.close()
    return int(pid)


def _left(daemon: Daemon) -> list[str]:
    """What a host without sandboxes should not have."""
    with contextlib.closing(sqlite3.connect(daemon.state / "catalogue.sqlite")) as database:
        rows = [row[0] for row in database.execute("SELECT id FROM sandboxes UNION SELECT id FROM checkpoints")]
    trees = [path.name for kind in ("sandboxes", "checkpoints") for path in (daemon.state / "pool" / kind).iterdir()]
    dumps = [path.name for path in (daemon.state / "checkpoints").iterdir()]
    runs = [path.name for path in (daemon.run / "sandboxes").iterdir() if path.name != "empty"]
    captures = [path.name for path in (daemon.run / "captures").glob("[!.]*")]
    return [*rows, *trees, *dumps, *runs, *captures]
