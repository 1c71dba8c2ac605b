"""How many processes the sandboxes of a host may have together."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.auth.budget import SMALL, UNSAID, bounded, crowds, excess, overfull, reserved
from sandbox import Client, Limits, TooMany
from sandbox.container.cgroup import process_budget
from sandbox.messages import Mount
from sandbox.tree import btrfs
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, asleep


def limits(processes: int | None) -> Limits:
    return Limits(processes=processes)


@pytest.mark.parametrize(
    ("target", "others", "said"),
    [
        pytest.param(SMALL, [5000] * 10, "", id="a small one always has room"),
        pytest.param(1000, [], "", id="a large one where there is room"),
        pytest.param(5000 + SMALL, [], "", id="all of the half"),
        pytest.param(5001 + SMALL, [], "5257 processes are too many: .* have 0 reserved of 5000", id="one more"),
        pytest.param(2000 + SMALL, [3001 + SMALL, SMALL], "3001 reserved of 5000", id="beside another"),
        pytest.param(None, [5000], "1024 processes are too many", id="no limit is one"),
    ],
)
def test_who_has_room(target: int | None, others: list[int], said: str) -> None:
    result = excess(limits(target), map(limits, others), 10_000)
    assert bool(result) == bool(said)
    if said:
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(result)


@pytest.mark.parametrize(
    ("limit", "mine", "owners", "said"),
    [
        pytest.param(None, 50, 50, "", id="half of the room"),
        pytest.param(None, 1, 51, "half of what", id="more, all of an owner's together"),
        pytest.param("10MiB", 9, 9, "", id="below its limit"),
        pytest.param("10MiB", 10, 10, "its limit is 10 MiB", id="at its limit"),
        pytest.param("1GiB", 51, 51, "half of what", id="a limit of its own is no right"),
    ],
)
def test_memory_in_checkpoints(limit: str | None, mine: int, owners: int, said: str) -> None:
    result = overfull(Limits(checkpoints=limit), mine << 20, owners << 20, 100 << 20)
    assert said in result and bool(result) == bool(said)


@pytest.mark.parametrize(
    ("held", "target", "waits"),
    [
        pytest.param(0, 90, False, id="a single one, however large"),
        pytest.param(30, 20, False, id="half of the room"),
        pytest.param(30, 21, True, id="more"),
        pytest.param(51, 0, True, id="of which nothing is known"),
    ],
)
def test_memory_for_captures(held: int, target: int, waits: bool) -> None:
    assert crowds(held, target, 100) is waits


@given(st.lists(st.one_of(st.none(), st.integers(1, 1 << 22))), st.integers(1, 1 << 22))
def test_large_ones_never_have_more_than_half(requested: list[int | None], budget: int) -> None:
    made: list[Limits] = []
    for processes in requested:
        if not excess(limits(processes), made, budget):
            made.append(limits(processes))
    assert sum(map(reserved, made)) <= budget // 2
    assert sum((bounded(item).processes or 0) for item in made) <= budget // 2 + SMALL * len(made)


async def test_a_few_sandboxes_cannot_have_all_processes(host: Client) -> None:
    all_of_them = process_budget()
    with pytest.raises(TooMany, match="processes are too many") as refused:
        await host.create(IMAGE, limits=Limits(processes=all_of_them))
    assert "lower Limits.processes" in str(refused.value)
    async with host.create(IMAGE, limits=Limits(processes=None)) as made:
        assert made.info.limits.processes == UNSAID
        assert (await made.exec("echo well")).text == "well\n"
        (child,) = await made.fork(1)
        assert child.sandbox.info.limits.processes == UNSAID
        await child.sandbox.remove()


async def test_no_restore_and_no_scratch_adds_to_the_disk_limit(host: Client) -> None:
    limit = Limits(disk="24MiB")
    write = "dd if=/dev/urandom of=%s bs=1M count=%d oflag=sync 2>&1 | grep -c exceeded || true"
    async with host.create(IMAGE, limits=limit, mounts=[Mount.scratch("/scratch", size="4096GiB")]) as made:
        assert (await made.exec(write % ("/scratch/a", 10))).text == "0\n"
        first = await made.captured(await made.exec(write % ("/b", 8)))
        for _ in range(3):
            await made.restore(first)
            assert (await made.exec("ls -s --block-size=1M /b")).text == "8 /b\n"
        assert (await made.exec(write % ("/c", 10))).text == "1\n"  # as full as it was
        full = await made.captured(await made.exec(f"sleep 1000 & {ASLEEP}"))
        await made.restore(full, verify=True)  # which a full sandbox can be brought back to
        await made.exec("rm /scratch/a /c")
        assert (await made.exec(write % ("/scratch/a", 4))).text == "0\n"


async def test_a_full_sandbox_is_brought_back_whenever_the_file_system_commits(host: Client, daemon: Daemon) -> None:
    """A deleted file that is held is made again, and the times of its directory, before the limit counts."""
    held = "(exec 5>/held; head -c 8000000 /dev/urandom >&5; rm /held; exec sleep 1000) >/dev/null 2>&1 &"
    full = "dd if=/dev/urandom of=/fill bs=1M; while echo $((n += 1)) > /root/$n; do :; done"
    restored = asyncio.Event()

    async def commit() -> None:
        while not restored.is_set():
            await asyncio.to_thread(btrfs.sync, daemon.state / "pool")

    async with host.create(IMAGE, limits=Limits(disk="24MiB")) as made, asyncio.TaskGroup() as alongside:
        await made.exec(f"{held} {asleep('sleep')}; {full}")
        before = await made.captured(await made.checkpoint())
        alongside.create_task(commit())
        try:
            for _ in range(4):
                await made.restore(before, verify=True)
        finally:
            restored.set()
