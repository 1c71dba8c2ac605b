"""What jobs cost, by tables; a coordinator's answers with prices and without."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coordinator.decide.cost import cost, so_far
from coordinator.jobs.keeper import Jobs, parse_prices
from coordinator.jobs.store import JobRow, JobStore
from sandbox.errors import Invalid
from sandbox.messages.cluster import JobRequest
from tests.support.cluster import Cluster

PRICES = {"GPU": 2.5, "CPU": 0.05}


@pytest.mark.parametrize(
    ("seconds", "amounts", "prices", "reported"),
    [
        (3600, {"GPU": 1}, PRICES, 2.5),
        (1800, {"GPU": 2, "CPU": 8}, PRICES, 2.7),
        (7200, {"pool": 3}, PRICES, 0.0),  # nothing of it has a price
        (7200, {"GPU": 0.5, "pool": 3}, PRICES, 2.5),
        (0, {"GPU": 1}, PRICES, 0.0),
        (3600, {"GPU": 1}, {}, 0.0),
    ],
)
def test_a_cost_is_hours_times_amounts_times_prices(
    seconds: float, amounts: dict[str, float], prices: dict[str, float], reported: float
) -> None:
    assert cost(seconds, amounts, prices) == pytest.approx(reported)


@pytest.mark.parametrize(
    ("started", "ended", "seconds"),
    [(None, None, 0), (None, 50.0, 0), (40.0, None, 60), (40.0, 55.0, 15), (200.0, None, 0)],
)
def test_a_job_holds_its_room_from_its_start_to_its_end(
    started: float | None, ended: float | None, seconds: float
) -> None:
    assert so_far(started, ended, now=100.0) == seconds


@pytest.mark.parametrize(
    "given", [["GPU"], ["GPU=much"], ["GPU=-1"], ["GPU=0"], ["GPU=nan"], ["GPU=inf"], ["no name=1"], ["CPU=1", "CPU=2"]]
)
def test_prices_that_are_none_are_refused(given: list[str]) -> None:
    with pytest.raises(Invalid) as refused:
        parse_prices(given)
    assert refused.value.hint


def test_a_coordinator_does_not_start_with_prices_that_are_none(tmp_path: Path) -> None:
    directories = ["--state", str(tmp_path / "state"), "--run", str(tmp_path / "run")]
    ran = subprocess.run(
        [sys.executable, "-m", "coordinator", *directories, "--price", "GPU=-2"], capture_output=True, text=True
    )
    assert ran.returncode == 1 and "GPU=2.5" in ran.stderr, ran.stderr


def test_a_real_coordinator_tells_costs(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "--price", "GPU=2.5", "--price", "CPU=0.05")
    (tmp_path / "state").mkdir(mode=0o700)
    store = JobStore(tmp_path / "state")
    job = store.submit(JobRequest(run="/a", needs={"GPU": 2, "CPU": 4}), "")
    store.change(job.id, state="running", started_at=time.time() - 3600)
    store.change(job.id, state="failed")
    store.close()
    command = [sys.executable, "-m", "pagurus", "jobs", "--all"]
    environment = {**os.environ, "PAGURUS_HOST": str(cluster.socket), "COLUMNS": "200"}
    try:
        cluster.start()
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        reported = subprocess.run(
            [*command, "--json"], env=environment, capture_output=True, text=True, check=True
        ).stdout
    finally:
        cluster.clean()
    assert "5.20" in said and json.loads(reported)[0]["cost"] == pytest.approx(5.2, rel=0.001)


async def test_a_book_is_not_closed_under_who_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite ends the process otherwise, such as a coordinator that is stopped as soon as it has begun."""
    jobs, reads, may = Jobs(tmp_path), threading.Event(), threading.Event()
    read, closed = JobStore.unfinished, list[bool]()

    def slow(store: JobStore) -> list[JobRow]:
        reads.set()
        may.wait()
        return read(store)  # of a database that is closed, it raises

    monkeypatch.setattr(JobStore, "unfinished", slow)
    running = asyncio.create_task(jobs.run())
    await asyncio.to_thread(reads.wait)
    running.cancel()
    closing = asyncio.create_task(jobs.close())
    closing.add_done_callback(lambda _: closed.append(may.is_set()))
    for _ in range(10):
        await asyncio.sleep(0)
    may.set()
    await closing
    assert closed == [True] and running.cancelled()


async def test_jobs_tell_what_they_have_cost(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    begun = store.submit(JobRequest(run="/a", needs={"GPU": 2, "CPU": 4}), "")
    waits = store.submit(JobRequest(run="/b", needs={"GPU": 1}), "")
    parts = {"trainer_needs": {"GPU": 8.0}, "engine_needs": {"GPU": 1.0}, "engines": 4}
    apart = store.submit(JobRequest(run="/c", needs={"CPU": 8.0}, **parts), "")
    store.change(apart.id, state="running", started_at=time.time() - 1800)
    store.change(apart.id, state="done")
    store.change(begun.id, state="running", started_at=time.time() - 1800)
    store.change(begun.id, state="done")
    store.close()
    priced, free = Jobs(tmp_path, prices=parse_prices(["GPU=2.5", "CPU=0.05"])), Jobs(tmp_path)
    reported = {item.id: item.cost for item in await priced.all()}
    assert reported[waits.id] == 0 and reported[begun.id] == (await priced.job(begun.id)).cost == pytest.approx(
        2.6, rel=0.01
    )
    assert reported[apart.id] == pytest.approx(15.2, rel=0.01)  # its trainer's and its engines' too
    assert [item.cost for item in await free.all()] == [None, None, None]
    await priced.close()
    await free.close()
