"""Machines that jobs take turns on: what each did when, by tables; what jobs used and cost; asked of a coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator import phases as module
from coordinator.gantt import NOBODY, OTHER, RETAINED, SILENT, GroupMoment, chart, doing
from coordinator.phases import SharedCapacity, parse_share
from coordinator.state import CoordinatorState
from rollout.plan import SharePlan
from rollout.service.phases import PhaseClient as Clients
from rollout.store import stages
from sandbox.errors import Invalid
from sandbox.messages.cluster import JobShape, PastPhase, PhaseKind
from tests.coordinator.test_phases import request, served, there
from tests.support.cluster import Cluster


def phase(
    job: str, requested: float, begun: float | None = None, ended: float | None = None, *machines: int,
    kind: PhaseKind = "rollout", silent: float = 0.0, group: int = 0,
) -> PastPhase:  # fmt: skip
    return PastPhase(
        job=job, kind=kind, number=0, group=group, machines=list(machines or (0,)), requested=requested, begun=begun,
        ended=ended, silent=silent,
    )  # fmt: skip


A, B = phase("a", 0, 0, 5), phase("b", 0, None, None, 0, 1)


@pytest.mark.parametrize(
    ("moment", "reported"),
    [
        (GroupMoment(works=[A], waits=[B]), "a"),
        (GroupMoment(), NOBODY),
        (GroupMoment(there=False), ""),
        (GroupMoment(waits=[B]), RETAINED),
        (GroupMoment(works=[phase("c", 0, 0, 5, 1)], waits=[B]), OTHER),
        (GroupMoment(works=[phase("c", 0, 0, 5, 2)], waits=[B]), RETAINED),
        (GroupMoment(silent=[A], waits=[B]), SILENT),
        (GroupMoment(waits=[phase("b", 0, None, None, 1)]), NOBODY),
    ],
)
def test_why_a_machine_stands_still(moment: GroupMoment, reported: str) -> None:
    assert doing(0, moment) == reported


def test_lanes_are_of_machines_coloured_by_job() -> None:
    existing = [
        phase("a", 0, 0, 10), phase("b", 4, 10, 16, silent=2), phase("a", 10, 10, 13, kind="train"),
        phase("a", 14, 18, None), phase("c", 3, 3, 9, group=4),
    ]  # fmt: skip
    said = chart(existing, 20, 3600)
    tables = {
        title: re.findall(r"</i> ([^<]*)<td>([\d.]+) s", rows)
        for title, rows in re.findall(r"<h2>(.*?)</h2>.*?<table>(.*?)</table>", said, re.DOTALL)
    }
    assert tables == {
        "Group 0: rollout machines": [
            ("a", "12.0"), ("b", "4.0"), (SILENT, "2.0"), (RETAINED, "2.0"), ("no job was there", "0.0")
        ],
        "Group 0: training machines": [(NOBODY, "17.0"), ("a", "3.0"), ("no job was there", "0.0")],
        "Group 4: rollout machines": [("c", "6.0"), ("no job was there", "14.0")],
    }  # fmt: skip
    assert "rollout machine 0: b, 4.00 s" in said
    late = chart(existing, 20, 1)
    assert "1 s, from left to right" in late and "rollout machine 0: b" not in late


def test_a_job_s_name_cannot_leave_its_place() -> None:
    said = chart([phase("<script>x</script>", 0, 0, 5)], 5, 60)
    assert "<script" not in said and "&lt;script&gt;" in said


async def test_a_job_is_told_what_it_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = now = 4e9  # what is older than 30 days is forgotten
    clock = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now, monotonic=lambda: 0.0))
    shared = SharedCapacity(rollout=3, train=2, rollout_price=1.5, train_price=4)
    wide = JobShape(rollout=10, train=10, slowdown=3.0, rollout_nodes=2, train_nodes=2)
    async with served(tmp_path, shared, clock=lambda: clock, ttl=30.0) as phases:
        assert (await request(phases, "a", "rollout", 0, wide)).state == "begun"
        now += 1800
        assert (await request(phases, "a", "train", 0, wide)).state == "begun"
        now += 900
        (reported,) = await phases.all()
        assert (reported.rollout_hours, reported.train_hours, reported.cost) == (
            1.0,
            0.5,
            3.5,
        )  # the second one still goes on
        await request(phases, "a", "rollout", 1, wide)
        await request(phases, "b", "rollout", 0, wide)
        now, clock = now + 60, 40.0
        await phases.poll()  # both are silent; only a had begun
        past = {(item.job, item.kind, item.number): item for item in await phases.past()}
        first, last = past["a", "rollout", 0], past["a", "rollout", 1]
        assert (first.machines, first.ended, first.silent) == ([0, 1], begun + 1800, 0.0)
        assert (past["a", "train", 0].machines, last.ended, last.silent) == ([0, 1], now, 40.0)
        now += 3600
        await phases.leave("a")
        assert [item.job for item in await there(phases)] == ["b"]
        (left,) = [item for item in await phases.all() if item.job == "a"]
        assert (left.state, left.number, left.since) == ("left", 1, now - 3600)
        assert left.rollout_hours == pytest.approx(1 + 2 * 60 / 3600)  # not the hour in which others had its machines
    async with served(tmp_path) as phases:  # without prices
        assert [item.cost for item in await phases.all()] == [None, None]


async def test_who_waits_is_told_and_old_phases_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAST", 3)
    async with served(tmp_path) as phases:
        for number in range(3):
            await request(phases, "a", "rollout", number)
            await request(phases, "a", "train", number)
        await request(phases, "b", "train", 0)
        result = [(item.job, item.kind, item.number, item.begun is None) for item in await phases.past()]
    assert result == [("b", "train", 0, True)] + [
        ("a", kind, number, False) for kind, number in (("train", 2), ("rollout", 2), ("train", 1))
    ]


async def test_a_state_of_before_gets_what_it_lacks(tmp_path: Path) -> None:
    async with served(tmp_path) as phases:
        await request(phases, "a", "rollout", 0)
    state = CoordinatorState(tmp_path / "cluster.sqlite")
    for column in ("party", "machines", "silent"):
        await state.all_or_none([(f"ALTER TABLE phases DROP COLUMN {column}", ())])
    await state.close()
    async with served(tmp_path) as phases:
        assert await phases.past() == [] and [item.rollout_hours for item in await phases.all()] == [0.0]
        await request(phases, "a", "train", 0)
        assert [item.kind for item in await phases.past()] == ["train"]


@pytest.mark.parametrize("given", ["rollout=1,rollout_price=-1", "train=1,train_price=nan", "price=1"])
def test_prices_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(Invalid, match="--share"):
        parse_share(given)


async def test_a_real_coordinator_s_machines_are_drawn(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "--share", "rollout=1,train=1,rollout_price=3600,train_price=1")
    plan = SharePlan(rollout=10, train=10, slowdown=3.0, at=str(cluster.socket))
    runs = [tmp_path / "a", tmp_path / "<b>"]

    def pagurus(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagurus", "cluster", "turns", *arguments]
        environment = {**os.environ, "PAGURUS_HOST": str(cluster.socket)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    try:
        await asyncio.to_thread(cluster.start)
        ran = await asyncio.to_thread(pagurus, "--gantt", str(tmp_path / "none.html"))
        assert ran.returncode and "no job has taken a turn" in ran.stderr and not (tmp_path / "none.html").exists()
        async with Clients(plan, runs[0]) as first, Clients(plan, runs[1]) as second:
            await first.begin("rollout", 0)
            await first.begin("train", 0)
            await second.begin("rollout", 0)
            ran = await asyncio.to_thread(pagurus, "--gantt", str(tmp_path / "page.html"))
            assert ran.returncode == 0 and ran.stdout.strip() == str(tmp_path / "page.html"), ran.stderr
            await first.leave()
        said = (tmp_path / "page.html").read_text()
        for shown in ("rollout machine 0: ", "training machine 0: ", "Group 0: rollout machines", "a, ", "&lt;b&gt;, "):
            assert shown in said
        noted = [(item.role, item.stage) for item in stages.read(runs[0] / "roles")]
        assert noted == [(role, stage) for role in ("rollout", "trainer") for stage in (stages.REQUESTS, stages.TURN)]
        for arguments, jobs in (("--json",), runs[1:]), (("--json", "--all"), runs[::-1]):
            reported = json.loads((await asyncio.to_thread(pagurus, *arguments)).stdout)
            assert [item["job"] for item in reported] == list(map(str, jobs))
            for item in reported:
                hours = item["rollout_hours"], item.get("train_hours", 0.0)
                assert item["cost"] == pytest.approx(3600 * hours[0] + hours[1]) and hours[0] > 0
        ran = await asyncio.to_thread(pagurus)
        assert "rollout machine-h" in ran.stdout and str(runs[1]) in ran.stdout
    finally:
        await asyncio.to_thread(cluster.clean)
