"""A flipped byte anywhere is found, named, and shared with nothing that comes later."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox import Client, Conflict, Sandbox, Verdict
from sandbox.messages import CheckpointInfo
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, asleep, missing, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

HOLDER = 'python3 -c \'import os, time; x = os.urandom(2 << 20); open("/up", "w"); time.sleep(1e6)\' >/dev/null 2>&1'


async def stored(daemon: Daemon, sandbox: Sandbox) -> CheckpointInfo:
    """A durable checkpoint of files and processes whose files have been hashed."""
    await sandbox.files.write("/needle", f"{sandbox.id} has a needle in its file " * 300)
    result = await sandbox.exec(
        f"setsid {HOLDER} & while [ ! -e /up ]; do sleep 0.01; done; {asleep('python3')}; rm /up"
    )
    info = await sandbox.durable(result)
    await until((daemon.state / "checkpoints" / f"{info.id}.tree").exists, "its files are hashed")
    return info


async def _parts(stream: list[bytes]) -> AsyncIterator[bytes]:
    for part in stream:
        yield part


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0x20]))


async def damage(host: Client, info: CheckpointInfo) -> str:
    (report,) = await host.store.verify(info)
    return "; ".join(report.damage)


async def test_what_is_whole_is_said_to_be_whole(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        info = await stored(daemon, sandbox)
        shared = await sandbox.checkpoint("the same content", wait="durable")
        reports = {report.checkpoint: report for report in await host.store.verify()}
        assert {info.id, shared.id, "catalogue"} <= set(reports)
        assert all(not report.damage and not report.notes for report in reports.values())
        assert reports[info.id].files >= 3
        assert reports[shared.id].pages == reports[info.id].pages
        statistics = await host.statistics()
        assert statistics.stages["hash"]["started"] >= 2  # the pages of its dump, and its files
        assert statistics.stages["compress"]["started"] >= 1
        assert (statistics.store["hashed"] >= 1, statistics.store["damaged"]) == (True, 0)


async def test_a_flipped_byte_is_found_wherever_it_lies(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        info = await stored(daemon, sandbox)
        packed = daemon.state / "checkpoints" / f"{info.id}.dump"
        digest = daemon.state / "checkpoints" / f"{info.id}.tree"
        for path, word in ((packed, "process images"), (digest, "changed on disk")):
            for place in (0, 40, path.stat().st_size // 2, path.stat().st_size - 1):
                flip(path, place)
                assert word in await damage(host, info), (path, place)
                flip(path, place)
        assert await damage(host, info) == ""

        pool = daemon.state / "pool.btrfs"
        with open(pool, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as disk:  # noqa: ASYNC230
            place = disk.find(f"{sandbox.id} has a needle in its file ".encode() * 20)
        assert place > 0
        flip(pool, place + 2000)
        assert "needle cannot be read" in await damage(host, info)
        flip(pool, place + 2000)
        assert await damage(host, info) == ""


async def test_damaged_pages_are_named_and_shared_with_nobody(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        info = await stored(daemon, sandbox)
        stream = [part async for part in host.store.stream(info)]
        segment = max((daemon.state / "pages").glob("*.segment"))
        size = segment.stat().st_size
        flip(segment, size - (1 << 20))  # among the two random MiB, which came last but for some
        assert "damaged" in await damage(host, info)
        assert "damaged" in ((await host.checkpoint(info)).error or "")
        environment = {**os.environ, "PAGURUS_RUN": str(daemon.run)}
        program = [sys.executable, "-m", "pagurus", "checkpoint", "verify"]
        result = await asyncio.to_thread(
            subprocess.run, [*program, info.id], capture_output=True, text=True, env=environment
        )
        assert (result.returncode, info.id in result.stderr) == (1, True)
        # It is refused before anything is killed, and the living sandbox stores all of it anew with its next turn.
        for act in (sandbox.restore(info), host.fork(info)):
            with pytest.raises(Conflict, match="damaged"):
                await act
        with pytest.raises(Conflict, match="not whole"):
            await host.store.receive(_parts(stream))
        turn = await sandbox.exec("true")
        assert turn.verdict is Verdict.BOTH
        redo = await sandbox.durable(turn)
        assert await damage(host, redo) == ""
        await sandbox.restore(redo, verify=True)
        # The same pages, dumped anew by a sandbox in which they still live: none of the damaged ones is used.
        async with host.create(IMAGE) as other:
            second = await stored(daemon, other)
            assert await damage(host, second) == ""
            complete = await asyncio.to_thread(
                subprocess.run, [*program, second.id, "--json"], capture_output=True, text=True, env=environment
            )
            assert complete.returncode == 0
            assert json.loads(complete.stdout)[0]["checkpoint"] == second.id
            await other.restore(second, verify=True)
        flip(segment, size - (1 << 20))
        assert await damage(host, info) == ""  # it is whole again, and said to be
        assert (await host.checkpoint(info)).error is None
        await sandbox.restore(info, verify=True)


async def test_a_dump_after_the_damage_stores_its_pages_anew(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        info = await stored(daemon, sandbox)
        segment = max((daemon.state / "pages").glob("*.segment"))
        flip(segment, segment.stat().st_size - (1 << 20))
        assert "damaged" in await damage(host, info)
        again = await sandbox.durable(await sandbox.exec(f"setsid sleep 1000000 >/dev/null 2>&1 & {ASLEEP}"))
        assert again.stored_bytes > 100_000  # a block at least had to be stored once more
        assert await damage(host, again) == ""
        await sandbox.restore(again, verify=True)
