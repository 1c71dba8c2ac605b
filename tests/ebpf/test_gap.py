"""kill -9 of the daemon: what a sandbox does while nobody looks is in the next checkpoint all the same.

Nothing of the inspector is pinned. The next daemon loads it anew, counts every task that it finds as new, and taints
both halves of each sandbox that it adopts: the gap gets the safest verdict.
"""

from __future__ import annotations

from pathlib import Path

from sandbox.messages import Verdict
from tests.support.daemon_host import IMAGE, Daemon, init_of, tasks_of, until


def root_of(sandbox: str) -> Path:
    return Path(f"/proc/{init_of(sandbox)}/root")


async def test_a_writer_at_work_in_the_gap_is_captured(own: Daemon) -> None:
    async with own.client() as client:
        sb = await client.create(IMAGE)
        loop = "mkdir /work; while :; do echo x >> /work/log; sleep 0.02; done"
        await sb.exec(f"setsid sh -c '{loop}' > /dev/null 2>&1 < /dev/null &")
        before = await sb.exec("true")
        await client.checkpoint(before.checkpoint, wait="captured")
    log = root_of(sb.id) / "work/log"
    await until(log.exists)
    own.kill()
    at_kill = log.stat().st_size
    await until(lambda: log.stat().st_size > at_kill + 20)
    in_gap = log.stat().st_size
    own.start()
    async with own.client() as client:
        sb = await client.get(sb.id)
        result = await sb.exec("true")
        assert result.verdict is Verdict.BOTH
        assert "restarted" in (result.reason or "")
        await client.checkpoint(result.checkpoint, wait="captured")
        await sb.restore(result.checkpoint)
        collected = await sb.exec("wc -c < /work/log")
        assert int(collected.stdout) >= in_gap


async def test_a_process_that_comes_and_goes_in_the_gap_leaves_its_file_captured(own: Daemon) -> None:
    """Nothing is left of it but the file; no task of the sandbox has an epoch that could tell."""
    async with own.client() as client:
        sb = await client.create(IMAGE)
        wait = "mkfifo /gate; read line < /gate; echo done > /made; rm /gate"
        await sb.exec(f"setsid sh -c '{wait}' > /dev/null 2>&1 < /dev/null &")
        await client.checkpoint((await sb.exec("true")).checkpoint, wait="captured")
    root = root_of(sb.id)
    await until(lambda: (root / "gate").is_fifo())
    own.kill()
    (root / "gate").write_bytes(b"go\n")
    await until(lambda: (root / "made").exists() and len(tasks_of(sb.id)) == 1)
    own.start()
    async with own.client() as client:
        sb = await client.get(sb.id)
        result = await sb.exec("true")
        assert result.verdict is Verdict.BOTH
        await client.checkpoint(result.checkpoint, wait="captured")
        await sb.exec("rm /made")
        await sb.restore(result.checkpoint)
        assert (await sb.exec("cat /made")).stdout == b"done\n"
        assert (await sb.exec("true")).verdict is Verdict.NONE  # and the gap is closed


async def test_a_quiet_sandbox_is_captured_once_more_and_then_no_more(own: Daemon) -> None:
    async with own.client() as client:
        sb = await client.create(IMAGE)
        # Else the next daemon takes the checkpoint that was promised, gap and all, before anybody asks.
        await client.checkpoint((await sb.exec("echo 1 > /one")).checkpoint, wait="captured")
    own.kill()
    own.start()
    async with own.client() as client:
        sb = await client.get(sb.id)
        assert (await sb.exec("true")).verdict is Verdict.BOTH
        assert (await sb.exec("true")).verdict is Verdict.NONE
        assert (await sb.exec("echo 2 > /two")).verdict is Verdict.FILES
