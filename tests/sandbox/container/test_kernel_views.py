"""What a sandbox sees of the kernel beside /proc, before and after a restore: /sys, and its own control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.container.cgroup import PARENT
from sandbox.container.container import Container
from sandbox.container.kernel_views import TARGETS
from sandbox.messages import Limits
from tests.support.checkpoint_support import Bench, shell
from tests.support.container_support import Maker

MEMORY = 256 << 20
CPUS = Path("/sys/devices/system/cpu/online").read_text()
LIMIT = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max"
HOLDER = """python3 -c '
import os, time
held = os.open("/sys/fs/cgroup/" + ("memory/memory.limit_in_bytes" if os.path.isdir("/sys/fs/cgroup/memory")
               else "memory.max"), os.O_RDONLY)
cpus = os.open("/sys/devices/system/cpu/online", os.O_RDONLY)
open("/tmp/ready", "w")
while not os.path.exists("/tmp/go"): time.sleep(0.01)
print(os.pread(held, 99, 0).decode().strip(), os.pread(cpus, 99, 0).decode().strip())
' </dev/null >/tmp/said 2>&1 & until [ -e /tmp/ready ]; do sleep 0.05; done"""


async def limited(maker: Maker) -> Container:
    return await maker.create(limits=Limits(memory=MEMORY, processes=100))


async def test_programs_see_their_own_limits(maker: Maker) -> None:
    container = await limited(maker)
    assert int(await shell(container, LIMIT)) == MEMORY
    assert await shell(container, "cat /sys/devices/system/cpu/online") == CPUS
    assert (await shell(container, "ls /sys/class/net")).split() == ["lo"]


async def test_no_other_group_is_seen_and_nothing_can_be_written(maker: Maker) -> None:
    container, other = await limited(maker), await limited(maker)
    observed = await shell(container, "find /sys/fs/cgroup")
    for name in (other.spec.id, container.spec.id, PARENT):
        assert name not in observed
    mounts = [line.split() for line in (await shell(container, "cat /proc/self/mountinfo")).splitlines()]
    views = {mount[4]: mount for mount in mounts if mount[4].startswith("/sys")}
    assert {"/sys", "/sys/fs/cgroup"} <= set(views)
    for mount in views.values():
        assert "ro" in mount[5].split(","), mount
        assert mount[3] == "/" or mount[4] not in TARGETS.values(), mount  # no path of the host
    for path in ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max", "/sys/kernel/mm/ksm/run"):
        assert (await container.exec(["sh", "-c", f"echo 1 > {path}"])).exit_code != 0
    assert await shell(container, "test ! -d /sys/firmware || ls /sys/firmware") == ""
    assert (await container.exec(["sh", "-c", "mount -o remount,rw /sys || umount /sys"])).exit_code != 0


async def test_views_survive_a_restore(bench: Bench) -> None:
    container = await limited(bench.maker)
    await shell(container, HOLDER)
    for _ in range(2):
        saved = await bench.save(container)
        await bench.kill_and_restore(container, saved, saved.dump)
        await container.limit()
        assert int(await shell(container, LIMIT)) == MEMORY
    await shell(container, "touch /tmp/go; until [ -s /tmp/said ]; do sleep 0.05; done")
    said = await shell(container, "cat /tmp/said")
    assert said.split() == [str(MEMORY), CPUS.strip()]


async def test_a_sandbox_without_views_is_restored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an older version has none, and its checkpoint neither: also where there are places for them."""
    with monkeypatch.context() as patch:
        patch.setattr("sandbox.container.kernel_views.make", lambda run_dir, cgroup: [])
        container = await limited(bench.maker)
    assert await shell(container, "ls /sys") == ""
    saved = await bench.save(container)
    await bench.kill_and_restore(container, saved, saved.dump)
    assert await shell(container, "ls /sys") == ""
    (container.spec.run_dir / "views").mkdir()
    for name in ("sys", "cgroup", "memory", "cpu", "cpuacct", "cpuset", "pids"):
        (container.spec.run_dir / "views" / name).mkdir()
    await bench.checkpointer.forget(container)
    await bench.kill_and_restore(container, saved, saved.dump)
    again = await bench.save(container)
    await bench.kill_and_restore(container, again, again.dump)
    assert await shell(container, "ls /sys") == ""
