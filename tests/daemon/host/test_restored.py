"""What the processes of a restored sandbox do belongs to its next turn, from their first instruction on."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox import Client, Verdict
from tests.support.checkpoint_support import Bench, shell
from tests.support.daemon_host import IMAGE, asleep, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

LATE = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
class Time(ctypes.Structure): _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
libc.clock_nanosleep(0, 1, ctypes.byref(Time(int(sys.argv[1]), 0)), None)  # until an instant, not for a time
open("/late", "a").write("x")
time.sleep(1e6)
"""


@pytest.mark.parametrize("verify", [False, True])
async def test_before_anything_runs_there_is_a_moment_for_the_mark(bench: Bench, verify: bool) -> None:
    for timeout in (3, 20, 140):  # seconds in which it falls asleep and is saved
        sb = await bench.maker.create()
        when = int(time.time()) + timeout
        await shell(sb, f"cat > /late.py <<'END'\n{LATE}\nEND\nsetsid python3 /late.py {when} >/dev/null 2>&1 &")
        await shell(sb, asleep("python3"))
        saved = await bench.save(sb)
        await sb.kill()
        if not (sb.tree / "upper" / "late").exists():
            break
    await sb.remount(bench.snapshot(saved.tree, readonly=False))
    await asyncio.sleep(max(0.0, when + 0.1 - time.time()))
    written = sb.tree / "upper" / "late"
    async with bench.checkpointer.restored(sb, saved.dump, verify=verify):
        await asyncio.sleep(0.3)  # its time is over: it would write at once
        assert not written.exists()
    await shell(sb, "until [ -s /late ]; do :; done")
    assert written.read_text() == "x"


async def test_what_a_restored_process_does_at_once_belongs_to_the_next_turn(host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        await sandbox.files.write("/late.py", LATE)
        for timeout in (4, 20, 140):  # seconds in which it falls asleep and is captured
            when = int(time.time()) + timeout
            begun = await sandbox.exec(f"setsid python3 /late.py {when} >/dev/null 2>&1 & {asleep('python3')}")
            await sandbox.captured(begun)
            if (await sandbox.exec("kill $(pgrep python3); rm /late")).exit_code:
                break
        await asyncio.sleep(max(0.0, when + 0.1 - time.time()))
        for verify in (False, True):
            await sandbox.restore(begun.checkpoint, verify=verify)  # its time is over: it goes on at once
            turn = await sandbox.exec(f"until [ -s /late ]; do :; done; {asleep('python3')}; cat /late")
            assert (turn.stdout, turn.verdict) == (b"x", Verdict.BOTH), verify
        assert (await sandbox.exec("true")).verdict is Verdict.NONE
