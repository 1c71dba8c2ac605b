"""Programs that trace others work; what is traced at a dump is waited for, or named."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from sandbox.container.container import Container
from sandbox.container.unstoppable import need_stoppable
from sandbox.errors import CheckpointFailed
from tests.support.checkpoint_support import Bench, shell

FAULTLESS = "#include <stdlib.h>\nint main(void) { free(malloc(1)); return 0; }\n"
LEAKING = "#include <stdlib.h>\nint main(void) { volatile char *p = malloc(77); p = 0; return 0; }\n"

# Traces a child: seized, and stopped if asked to, until there is a file /tmp/enough.
TRACER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    while True: time.sleep(1)
assert libc.ptrace(0x4206, child, None, None) == 0, os.strerror(ctypes.get_errno())
if sys.argv[1] == "stopped":
    libc.ptrace(0x4207, child, None, None)
    os.waitpid(child, 0x40000000)
open("/tmp/traced", "w").close()
while not os.path.exists("/tmp/enough"): time.sleep(0.01)
if sys.argv[1] == "running":
    libc.ptrace(0x4207, child, None, None)
    os.waitpid(child, 0x40000000)
libc.ptrace(17, child, None, None)
open("/tmp/free", "w").close()
while True: time.sleep(1)
"""


async def trace(sb: Container, how: str) -> None:
    script = 'python3 -c "$0" "$1" </dev/null >/dev/null 2>&1 & until [ -e /tmp/traced ]; do sleep 0.01; done'
    done = await sb.exec(["/bin/sh", "-c", script, TRACER, how], timeout=240)
    assert done.exit_code == 0, done


@pytest.mark.parametrize("how", ["stopped", "running"])
async def test_what_is_traced_is_named_and_dumped_once_it_is_free(bench: Bench, how: str) -> None:
    sb = await bench.maker.create()
    await trace(sb, how)
    with pytest.raises(
        CheckpointFailed, match=r"process \d+ \[python3\] of the sandbox is traced by \d+ \[python3\]"
    ) as caught:
        await need_stoppable(sb)
        await bench.save(sb)
    assert "detach the debugger" in caught.value.hint
    await shell(sb, "touch /tmp/enough; until [ -e /tmp/free ]; do sleep 0.01; done")
    await bench.save(sb)


async def test_who_is_traced_for_a_moment_is_waited_for(bench: Bench) -> None:
    sb = await bench.maker.create()
    await trace(sb, "stopped")
    waiting = asyncio.create_task(need_stoppable(sb))
    await asyncio.sleep(0)
    await shell(sb, "touch /tmp/enough; until [ -e /tmp/free ]; do sleep 0.01; done")
    await waiting
    await bench.save(sb)


async def test_sanitizers_run(bench: Bench, tmp_path: Path) -> None:
    """LeakSanitizer traces the program that it looks through."""
    sb = await bench.maker.create()
    for name, source in (("faultless", FAULTLESS), ("leaking", LEAKING)):
        (tmp_path / f"{name}.c").write_text(source)
        command = ["gcc", "-O0", "-fsanitize=address", "-static-libasan", f"{name}.c", "-o", name]
        await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, check=True)
        program = (tmp_path / name).read_bytes()
        done = await sb.exec(["/bin/sh", "-c", f"cat > /tmp/{name}; chmod +x /tmp/{name}"], stdin=program)
        assert done.exit_code == 0
    done = await sb.exec(["/tmp/faultless"])
    assert (done.exit_code, done.stderr) == (0, b"")
    done = await sb.exec(["/tmp/leaking"])
    assert done.exit_code == 1 and b"77 byte(s) leaked in 1 allocation(s)" in done.stderr, done
