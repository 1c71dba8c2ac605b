"""A service that passes a limit of its own meets it, and no other does; so after a restore and in a fork."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox import Client
from sandbox.container.cgroup import Cgroup
from sandbox.container.service_groups import UNIFIED, ServiceGroups
from sandbox.messages import Composition, Service
from sandbox.messages.services import ServiceLimits, ServiceState
from tests.support.compositions import ComposedSandbox, composed, shell
from tests.support.daemon_host import IMAGE

# Takes so many MiB when a file says so, and says what it has.
HOG = """
import os, time
held = []
while True:
    try:
        wanted = int(open("/wanted").read() or 0)
    except FileNotFoundError:
        wanted = 0
    while len(held) < wanted:
        held.append(bytes([1]) * (1 << 20))
        open("/held.new", "w").write(str(len(held)))
        os.rename("/held.new", "/held")
    time.sleep(0.02)
"""
# Tells how many processes it could have, and why no more, whenever it is asked.
FORKER = """
import os, time
while True:
    if os.path.exists("/go"):
        pids, why = [], None
        try:
            while len(pids) < 100:
                pid = os.fork()
                if not pid:
                    time.sleep(1e6)
                pids.append(pid)
        except OSError as error:
            why = error.errno
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        open("/forked.new", "w").write(f"{len(pids)} {why}")
        os.rename("/forked.new", "/forked")
        os.unlink("/go")
    time.sleep(0.02)
"""
BUSY = shell("while :; do :; done")


def python(program: str, **limits: object) -> Service:
    return Service(image=IMAGE, command=["python3", "-c", program], limits=ServiceLimits(**limits))  # type: ignore[arg-type]


COMPOSITION = Composition(
    services={
        "free": python(HOG),
        "hog": python(HOG, memory="64MiB"),
        "other": python(HOG, memory="64MiB"),
        "forker": python(FORKER, processes=8),
        "busy": Service(image=IMAGE, command=BUSY, limits=ServiceLimits(cpus=0.05)),
    },
    main="free",
)


@pytest.fixture
async def sb(host: Client) -> AsyncIterator[ComposedSandbox]:
    async with composed(host, COMPOSITION, memory="1GiB", processes=200) as sandbox:
        await sandbox.up()
        yield sandbox


async def until(sandbox: ComposedSandbox, command: str, service: str) -> str:
    """What it says, once it succeeds."""
    for _ in range(1200):
        done = await sandbox.run(command, service)
        if done.exit_code == 0:
            return done.stdout.decode().strip()
        await asyncio.sleep(0.05)
    raise AssertionError(done.stderr)


async def hold(sandbox: ComposedSandbox, service: str, mebibytes: int) -> None:
    await sandbox.says(f"echo {mebibytes} > /wanted.new; mv /wanted.new /wanted", service)
    await until(sandbox, f'test "$(cat /held)" = {mebibytes}', service)


async def killed(sandbox: ComposedSandbox, service: str) -> bool:
    """Whether it ends when it wants more than it may have; how much that is says what it held before."""
    await sandbox.says("echo 80 > /wanted.new; mv /wanted.new /wanted", service)
    for _ in range(1200):
        if (info := (await sandbox.services())[service]).state is ServiceState.EXITED:
            return info.exit_code == 137
        if (await sandbox.run('test "$(cat /held)" = 80', service)).exit_code == 0:
            return False
        await asyncio.sleep(0.05)
    raise AssertionError(info)


async def need_few_forks(sandbox: ComposedSandbox) -> None:
    """Eight with the program itself, and what asks for it."""
    await sandbox.says("rm -f /forked; touch /go", "forker")
    count, why = map(int, (await until(sandbox, "cat /forked", "forker")).split())
    assert 1 <= count <= 7 and why == errno.EAGAIN


# Of memory, in bytes, as programs look for it that size themselves by it.
LIMIT = """python3 -c '
lines = dict(line.strip().split(":", 2)[1:] for line in open("/proc/self/cgroup"))
v2 = "/sys/fs/cgroup" + lines.get("", "") + "/memory.max"
v1 = "/sys/fs/cgroup/memory" + lines.get("memory", "") + "/memory.limit_in_bytes"
print(int(open(v1 if "memory" in lines else v2).read()))'"""


async def each_meets_its_own(sandbox: ComposedSandbox) -> None:
    """hog ends, at the memory that it has in all; all others live."""
    assert [await sandbox.says(LIMIT, name) for name in ("free", "other")] == [str(1 << 30), str(64 << 20)]
    await need_few_forks(sandbox)
    assert await killed(sandbox, "hog")
    states = {name: info.state for name, info in (await sandbox.services()).items()}
    assert states == {
        name: ServiceState.EXITED if name == "hog" else ServiceState.RUNNING for name in COMPOSITION.services
    }
    assert not await killed(sandbox, "free")
    assert throttled(sandbox, "busy") > 0


def throttled(sandbox: ComposedSandbox, service: str) -> int:
    """Periods in which it had to wait for processor time."""
    groups = ServiceGroups(Cgroup(sandbox.id), COMPOSITION).of(service)
    text = (groups.get("cpu", groups.get(UNIFIED, Path())) / "cpu.stat").read_text()
    return int(dict(line.split() for line in text.splitlines())["nr_throttled"])


async def test_each_meets_its_own_limits(sb: ComposedSandbox) -> None:
    await each_meets_its_own(sb)
    # What starts in a service counts as its own.
    done = await sb.run("python3 -c 'x = bytes([1]) * (80 << 20)'", "other")
    assert (done.exit_code, done.oom_killed) == (137, True)
    assert (await sb.services())["other"].state is ServiceState.RUNNING


async def test_so_after_a_restore_and_in_a_fork(sb: ComposedSandbox) -> None:
    await hold(sb, "hog", 40)
    await hold(sb, "other", 40)
    (fork,) = await sb.fork(1)
    try:
        await each_meets_its_own(fork)
        assert (await sb.services())["hog"].state is ServiceState.RUNNING
        assert (await sb.restore()).verified
        await each_meets_its_own(sb)
        assert await until(sb, "cat /held", "other") == "40"
        assert await killed(sb, "other")
    finally:
        await fork.remove()


async def test_started_again_it_has_them_again(sb: ComposedSandbox) -> None:
    for _ in range(2):
        await sb.says("rm -f /wanted /held", "hog")
        await sb.act("hog", "restart")
        await hold(sb, "hog", 20)
        assert await killed(sb, "hog")
