"""A disk that fills up: refused before it is full, nothing torn when it is, and a way back from it always."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.checkpoints import capture
from sandbox import CheckpointFailed, Client, Limits, NoSpace, Verdict, procfs
from sandbox.messages import CheckpointState
from sandbox.tree import btrfs
from sandbox.tree.pool import RESERVE, BtrfsPool
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, asleep, missing, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SIZE = 1200 << 20  # too large for mixed block groups: data can take every chunk from the tree blocks


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[BtrfsPool]:
    pool = BtrfsPool(tmp_path, size=SIZE).ensure()
    try:
        yield pool
    finally:
        pool.close()


def fill(directory: Path) -> None:
    """Take every chunk of the pool, and every byte of them."""
    number = 0
    for size in (256 << 20, 16 << 20, 1 << 20, 4096):
        while True:
            try:
                fd = os.open(directory / str(number), os.O_CREAT | os.O_WRONLY)
            except OSError:
                return
            number += 1
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError:
                break
            finally:
                os.close(fd)


def test_a_pool_without_a_chunk_left_refuses_and_can_still_go_back(pool: BtrfsPool) -> None:
    pool.need()
    tree = pool.sandboxes / "a"
    pool.create_tree(tree)
    (tree / "upper" / "kept").write_text("kept")
    btrfs.snapshot(tree, pool.checkpoints / "c", readonly=True)
    assert pool.usage().total == SIZE
    fill(tree / "upper")
    with pytest.raises(NoSpace, match=r"MiB more are needed"):
        pool.need()
    assert pool.tight()
    assert pool.extend()
    assert not pool.tight()
    assert pool.usage().total == SIZE + RESERVE
    btrfs.snapshot(pool.checkpoints / "c", pool.sandboxes / "b", readonly=False)
    assert (pool.sandboxes / "b" / "upper" / "kept").read_text() == "kept"
    assert not pool.extend()  # once
    assert not pool.give_back()  # not yet
    pool.close()
    pool.ensure()  # what it has grown by is there after a restart as well
    assert pool.usage().total == SIZE + RESERVE
    for path in (tree / "upper").iterdir():
        path.unlink()
    btrfs.sync(pool.path)
    assert pool.give_back()
    assert pool.usage().total == SIZE == pool.file.stat().st_size
    pool.need()
    assert (pool.sandboxes / "b" / "upper" / "kept").read_text() == "kept"


async def test_a_sandbox_that_fills_the_pool_harms_no_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    try:
        pool = await asyncio.to_thread(BtrfsPool(daemon.state, size=SIZE).ensure)
        await asyncio.to_thread(daemon.start)
        async with daemon.client() as host, host.create(IMAGE, limits=Limits(disk=None)) as sandbox:
            await sandbox.exec(f"setsid sleep 1000000 >/dev/null 2>&1 & {ASLEEP}")
            before = await sandbox.durable(await sandbox.exec("echo kept > /kept"))
            flood = await sandbox.exec(
                "for s in 256M 16M 1M 4K; do while fallocate -l $s /flood.$s.$((n += 1)) 2>/dev/null; do :; done; done",
                timeout=240,
            )
            assert flood.verdict in (Verdict.FILES, Verdict.BOTH)
            with pytest.raises(CheckpointFailed, match=r"MiB more are needed"):
                await sandbox.captured(flood)
            with pytest.raises(NoSpace, match=r"Retention"):
                await host.create(IMAGE)
            # The sandbox goes on, says what happened, and the way back works though not a chunk is left.
            on = await sandbox.exec("cat /kept; pgrep -c sleep")
            assert on.text == "kept\n1\n"
            assert "MiB more are needed" in (on.checkpoint_error or "")
            assert (await host.store.verify(before))[0].damage == []
            assert (await host.checkpoint(before)).state is CheckpointState.DURABLE
            await sandbox.restore(before, verify=True)
            after = await sandbox.durable(await sandbox.exec("ls / | grep -c flood; echo new > /new"))
            assert after.state is CheckpointState.DURABLE
            (child,) = await host.fork(after, 1)
            assert child.sandbox is not None, child.error
            await child.sandbox.remove()
            await until(lambda: pool.usage().free > 512 << 20, "the flooded tree is gone")
    finally:
        daemon.clean()


async def test_memory_for_captures_that_is_full_says_how_much_is_missing(host: Client, daemon: Daemon) -> None:
    def resize(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(daemon.run / "captures")], check=True)

    async with host.create(IMAGE) as sandbox:
        before = await sandbox.durable(await sandbox.exec(f"setsid sleep 1000000 >/dev/null 2>&1 & {ASLEEP}"))
        shared = "x = mmap.mmap(-1, 150 << 20); x.write(os.urandom(150 << 20))"  # asked for only once it was dumped
        hold = f'import mmap, os, time; {shared}; open("/up", "w"); time.sleep(1e6)'
        await asyncio.to_thread(resize, "100M")
        grown = await sandbox.exec(
            f"setsid python3 -c '{hold}' >/dev/null 2>&1 & until [ -e /up ]; do :; done; {asleep('python3')}"
        )
        with pytest.raises(CheckpointFailed, match=r"MiB are free now, the processes hold 1[5-9]\d MiB"):
            await sandbox.captured(grown)
        on = await sandbox.exec("pgrep -c python3")
        assert on.text == "1\n"
        assert "memory for captures was full" in (on.checkpoint_error or "")
        assert (await host.checkpoint(before)).state is CheckpointState.DURABLE
        await asyncio.to_thread(resize, "50%")
        after = await sandbox.durable(await sandbox.exec("true"))  # it was owed
        await sandbox.restore(after, verify=True)
        assert (await sandbox.exec("pgrep -c python3")).text == "1\n"


def test_no_capture_takes_the_last_memory_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "memory", lambda: {"MemAvailable": 1 << 30})
    capture._need_memory(tmp_path, 1 << 20, (1 << 30) - capture.MEMORY_RETAINED)
    with pytest.raises(NoSpace, match=r"memory is too full for the capture: 1\.0 MiB more"):
        capture._need_memory(tmp_path, 1 << 20, (1 << 30) - capture.MEMORY_RETAINED + (1 << 20))


def test_the_memory_of_the_host_is_read() -> None:
    memory = procfs.memory()
    assert 0 < memory["MemAvailable"] <= memory["MemTotal"]


async def test_memory_in_checkpoints_has_a_limit_that_is_the_sandboxs_own(host: Client) -> None:
    hold = 'import os, time; x = os.urandom(16 << 20); open("/up", "w"); time.sleep(1e6)'
    turn = f"pkill python3; rm -f /up; setsid python3 -c '{hold}' >/dev/null 2>&1 & until [ -e /up ]; do :; done"
    async with host.create(IMAGE, limits=Limits(checkpoints="24MiB")) as sandbox, host.create(IMAGE) as neighbour:
        made = [await sandbox.durable(await sandbox.exec(turn)) for _ in range(2)]
        assert all(item.state is CheckpointState.DURABLE for item in made)
        with pytest.raises(CheckpointFailed, match=r"hold 3[2-9] MiB of memory, and its limit is 24 MiB.*retention"):
            await sandbox.captured(await sandbox.exec(turn))
        on = await sandbox.exec("cat /proc/loadavg > /now; pgrep -c python3")
        assert on.text == "1\n" and "its limit is 24 MiB" in (on.checkpoint_error or "")
        assert (await neighbour.durable(await neighbour.exec(turn))).state is CheckpointState.DURABLE
        await host.store.remove(made[0])
        again = await sandbox.captured(await sandbox.exec(turn))
        assert again.state in (CheckpointState.CAPTURED, CheckpointState.DURABLE)
