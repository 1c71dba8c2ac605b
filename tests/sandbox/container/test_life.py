"""How a sandbox comes, dies, is adopted and goes, and that nothing of it is left on the host."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from sandbox.container.container import Container, ContainerSpec
from sandbox.errors import Conflict, Invalid, SandboxDead, Unsupported
from tests.support.container_support import Maker, shell, traces, zombie


async def test_dead_pid_1_is_noticed(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    waiting = asyncio.create_task(sb.wait_dead())
    os.kill(sb.init_pid or 0, 9)
    await waiting
    assert not sb.alive
    with pytest.raises(SandboxDead, match="pagurus restore"):
        await sb.exec(["true"])


async def test_what_a_dump_would_have_to_copy_is_known_before(maker: Maker) -> None:
    sb = await maker.create()
    assert sb.cgroup.anonymous() < 1 << 24
    await shell(sb, "head -c 64M /dev/zero | tail -c 64M | (head -c 1 > /full; sleep 1000) 2>&1 & true")
    await shell(sb, "while ! [ -s /full ]; do sleep 0.01; done")
    assert 1 << 26 <= sb.cgroup.anonymous() < 1 << 27


async def test_kill_remount_start(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "echo first > /mark; sleep 1000 & true")
    await sb.kill()
    assert (sb.alive, sb.tasks(), sb.init_pid) == (False, [], None)
    await sb.remount(maker.tree(f"{sb.spec.id}-2"))
    await sb.start()
    assert await shell(sb, "cat /mark 2>&1 || true") == "cat: /mark: No such file or directory\n"
    await sb.kill()
    await sb.kill()  # nothing left: nothing to do


async def test_adoption_after_the_daemon_died(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkfifo /in /out; (while read x < /in; do echo to nobody; echo $x > /out; done) & true")
    assert sb._shim is not None
    sb._shim.close()  # what a killed daemon looks like to the shim
    adopted = await Container.adopt(sb.spec)
    maker.made.append(adopted)
    assert adopted.init_pid == sb.init_pid
    assert await shell(adopted, "echo word > /in; cat /out") == "word\n"
    await adopted.destroy()
    with pytest.raises(SandboxDead):
        await Container.adopt(sb.spec)


_DAEMON = """
import asyncio, pickle, sys
from sandbox.container.container import Container
async def main():
    sb = await Container.adopt(pickle.loads(sys.stdin.buffer.read()))
    print("adopted", flush=True)
    script = "head -c 3000000 /dev/zero; echo > /half; cat /go; head -c 3000000 /dev/zero; echo survived > /out"
    await sb.exec(["sh", "-c", script])
asyncio.run(main())
"""


async def test_commands_outlive_a_killed_daemon(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkfifo /half /go /out")
    assert sb._shim is not None
    sb._shim.close()
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", _DAEMON, stdin=PIPE, stdout=PIPE)
    assert daemon.stdin is not None and daemon.stdout is not None
    daemon.stdin.write(pickle.dumps(sb.spec))
    daemon.stdin.close()
    assert await daemon.stdout.readline() == b"adopted\n"
    assert sb.init_pid is not None
    half = Path(f"/proc/{sb.init_pid}/root/half")
    assert await asyncio.to_thread(half.read_bytes) == b"\n"
    daemon.kill()
    await daemon.wait()
    adopted = await Container.adopt(sb.spec)
    maker.made.append(adopted)
    assert await shell(adopted, "echo > /go; cat /out") == "survived\n"


async def test_destroy_leaves_nothing(maker: Maker) -> None:
    gc.collect()  # what other tests left to it
    descriptors = len(os.listdir("/proc/self/fd"))
    sb = await maker.create()
    await shell(sb, "sleep 1000 & setsid sleep 1001 & true")
    assert traces(sb.spec.id, sb.spec.run_dir)
    await sb.destroy()
    assert traces(sb.spec.id, sb.spec.run_dir) == []
    await sb.destroy()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("broken", ["image", "tree", "uid_base", "run_dir"])
async def test_create_is_all_or_nothing(maker: Maker, tmp_path: Path, broken: str) -> None:
    spec = maker.spec()
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    fields[broken] = {"image": Path("/no/image"), "tree": tmp_path, "uid_base": 0, "run_dir": Path("/proc/no")}[broken]
    bad = ContainerSpec(**fields)
    with pytest.raises((Unsupported, Invalid, OSError)):
        await Container.create(bad)
    assert traces(bad.id, bad.run_dir) == []
    good = await Container.create(spec)
    maker.made.append(good)
    with pytest.raises(Conflict):
        await Container.create(spec)
    assert await shell(good, "echo unharmed") == "unharmed\n"


async def test_killed_shim_is_cleaned_up(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    os.kill(sb.shim_pid, 9)
    await sb.destroy()
    assert traces(sb.spec.id, sb.spec.run_dir) == []


async def test_unreachable_shim_is_cleaned_up(maker: Maker, either_hierarchy: str) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    shim_pid = sb.shim_pid
    assert sb._shim is not None
    sb._shim.close()
    (sb.spec.run_dir / "shim.sock").unlink()
    lost = Container(sb.spec)
    await lost.destroy()
    assert zombie(shim_pid)
    assert traces(sb.spec.id, sb.spec.run_dir) == []
