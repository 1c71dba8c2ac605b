"""Sizes, hierarchies and limits of control groups."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.container import cgroup
from sandbox.container.cgroup import Cgroup, Hierarchy, hierarchy, parse_bytes
from sandbox.errors import Invalid, Unsupported
from sandbox.messages import Limits
from sandbox.procfs import is_doomed


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1k", 1024), ("1KiB", 1024), (" 512 MiB ", 512 << 20), ("1.5GiB", 3 << 29), (7, 7), ("2G", 2 << 30)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1TB1", "-1", "0", 0, -5, "1 2", "1e9", "0.1"])
def test_not_sizes(text: str | int) -> None:
    with pytest.raises(Invalid, match="not a size"):
        parse_bytes(text)


@given(st.integers(1, 1 << 20), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_sizes_round_trip(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}") == count << {"KiB": 10, "MiB": 20, "GiB": 30}[unit]


@pytest.fixture
def group() -> Cgroup:
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    return Cgroup(f"test-{secrets.token_hex(6)}")


async def test_create_limit_lift_remove(group: Cgroup) -> None:
    group.create()
    try:
        with pytest.raises(FileExistsError):
            group.create()
        assert group.id == os.stat(hierarchy().unified / "pagurus" / group.name).st_ino
        for memory in ("64MiB", "256MiB", "32MiB"):  # up and down
            group.apply(Limits(memory=memory, cpus=0.5, processes=9))
            if not group.pure:
                assert int((group.v1["memory"] / "memory.limit_in_bytes").read_text()) == parse_bytes(memory)
                assert (group.v1["cpu"] / "cpu.cfs_quota_us").read_text() == "50000\n"
                assert (group.v1["pids"] / "pids.max").read_text() == "10\n"
        group.lift()
        if not group.pure:
            assert int((group.v1["memory"] / "memory.limit_in_bytes").read_text()) > 1 << 50
            assert (group.v1["pids"] / "pids.max").read_text() == "max\n"
            assert "a *:* rwm" not in (group.v1["devices"] / "devices.list").read_text()
        assert (group.pids(), group.cpu_usage_usec(), group.oom_kills()) == ([], 0, 0)
        await group.wait_empty()
    finally:
        await group.remove()
    await group.remove()
    assert not group.exists()


@pytest.mark.parametrize("held", [True, False])
async def test_room_for_a_helper_lets_nobody_run_whom_a_restore_holds(group: Cgroup, held: bool) -> None:
    group.create()
    try:
        limits = Limits(processes=9)
        group.apply(limits)
        if held:
            group.freeze()
        async with group.capacity(limits, group.thaw):
            pass
        assert (group.path / "cgroup.freeze").read_text().strip() == str(int(held))
    finally:
        await group.remove()


async def test_only_processes_of_the_group_are_killed(group: Cgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a process ends and its number goes to somebody else's between the list and the signal."""
    group.create()
    ours, other = [await asyncio.create_subprocess_exec("sleep", "1000000") for _ in range(2)]
    try:
        group.join(ours.pid)
        listed = group.pids
        stale = [[ours.pid, other.pid]]
        monkeypatch.setattr(group, "pids", lambda: stale.pop() if stale else listed())
        group.kill()
        assert await ours.wait() == -signal.SIGKILL
        await group.wait_empty()
        assert not is_doomed(other.pid)
    finally:
        for process in (ours, other):
            if process.returncode is None:
                process.kill()
                await process.wait()
        await group.remove()


def test_half_made_groups_are_removed(group: Cgroup) -> None:
    if group.pure:
        pytest.skip("a pure v2 host makes one group")
    last = list(group.v1.values())[-1]
    group.create()
    for path in (group.path, *list(dict.fromkeys(group.v1.values()))[:-1]):
        path.rmdir()
    with pytest.raises(FileExistsError):
        group.create()
    assert not group.path.exists()
    last.rmdir()


def test_pure_host_without_controllers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where v1 holds the controllers, a v2 hierarchy taken for pure has none: an error, not missing limits."""
    (tmp_path / "pagurus").mkdir()
    for directory in (tmp_path, tmp_path / "pagurus"):
        (directory / "cgroup.controllers").write_text("cpuset hugetlb\n")
        (directory / "cgroup.subtree_control").write_text("")
    monkeypatch.setattr(cgroup, "hierarchy", lambda: Hierarchy(tmp_path))
    with pytest.raises(Unsupported, match="cpu, memory, pids"):
        cgroup.prepare_host.__wrapped__()


def test_pure_host_gets_v2_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "pagurus" / "one"
    directory.mkdir(parents=True)
    for name in ("memory.max", "memory.swap.max", "cpu.max", "cpu.weight", "pids.max", "memory.events"):
        (directory / name).write_text("")
    monkeypatch.setattr(cgroup, "hierarchy", lambda: Hierarchy(tmp_path))
    made = Cgroup("one")
    assert made.joined() == [tmp_path / "pagurus" / "_shims"]
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    made.apply(Limits(cpus=1.5, memory="1MiB", processes=7))
    names = ("memory.max", "memory.swap.max", "cpu.max", "cpu.weight", "pids.max")
    values = {name: (directory / name).read_text() for name in names}
    assert values == {
        "memory.max": "1048576\n",
        "memory.swap.max": "0\n",
        "cpu.max": "150000 100000\n",
        "cpu.weight": "150\n",
        "pids.max": "7\n",
    }
    made.lift()
    assert (directory / "memory.max").read_text() == "max\n"
    assert (directory / "cpu.weight").read_text() == "400\n"  # of a host of four processors
    (directory / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert made.oom_kills() == 2
    assert made.anonymous() == 0
    (directory / "memory.stat").write_text("anon 4096\nfile 8192\n")
    assert made.anonymous() == 4096
