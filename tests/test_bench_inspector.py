"""The torture itself: it runs each call once on every tier that loads, and it fails when it is blind.

A bench that cannot miss anything would pass with any inspector: here the inspector's reads are blanked, field by
field, and the oracle's facts are taken away, and each time the torture must say so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import _leftovers, _oracle, _overhead
from bench import inspector as bench
from bench._torture import Arena, Case, Tally, build, calls, matrix, programs
from bench._torture_cases import ACTORS, GROUP, PLACES, Call, other_kinds
from daemon.judge import Judgement
from ebpf.inspector import Inspector
from sandbox import paths
from sandbox.cgroup import PARENT, hierarchy
from sandbox.messages import Effects, Verdict
from sandbox.pool import Pool


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: run `make setup`")
    return build(tmp_path_factory.mktemp("torture"))


def tiers() -> list[str | None]:
    return bench.tiers() if paths.inspector_object().exists() else [None]


@pytest.fixture(scope="module", params=tiers(), ids=str)
def inspector(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Inspector]:
    if not paths.inspector_object().exists():
        pytest.skip(f"{paths.inspector_object()} is missing: run `make setup`")
    with bench.load(request.param) as loaded:
        yield loaded


@pytest.fixture
async def arena(pool: Pool, image: Path, inspector: Inspector, tmp_path: Path) -> AsyncIterator[Arena]:
    made = Arena(pool, image, tmp_path, inspector)
    try:
        yield made
    finally:
        made.close()


def each_call_once(found: list[Call], outcomes: set[str]) -> list[Case]:
    """One case for each call and outcome of these; places and actors take turns."""
    chosen = {(call.name, call.outcome) for call in found if call.outcome in outcomes}
    actors, places = itertools.cycle(ACTORS), itertools.cycle(PLACES)
    wanted = {f"{name}.{outcome} by {next(actors)} in {next(places)}" for name, outcome in sorted(chosen)} | {
        f"{name}.{outcome} by {actor}" for name, outcome in chosen for actor in ("setns",)
    }
    return [case for case in matrix(found) if case.name in wanted]


class Recorder(Tally):
    """Keeps what it is told, so that it can be judged again."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Case, _oracle.Changes, Effects]] = []

    def add(
        self,
        case: Case,
        changes: _oracle.Changes,
        effects: Effects,
        judgement: Judgement | None = None,
        output: str = "",
    ) -> None:
        self.told.append((case, changes, effects))
        super().add(case, changes, effects, judgement, output)


# --------------------------------------------------------------------------- every call


@pytest.mark.parametrize("outcomes", [{"changed", "created"}, {"zero", "failed"}], ids=str)
async def test_no_call_is_missed(arena: Arena, image: Path, outcomes: set[str]) -> None:
    found = calls(image)
    chosen = each_call_once(found, outcomes)
    assert {case.program[0].partition(":")[2] for case in chosen} == {
        call.word for call in found if call.outcome in outcomes
    }
    tally = Tally()
    await arena.run_cases(chosen, tally)
    assert tally.cases == len(chosen)
    assert tally.false_negatives == []
    assert tally.unexpected == []


async def test_stores_through_mappings_older_than_the_mark_are_seen(arena: Arena, image: Path) -> None:
    chosen = [case for case in matrix(calls(image)) if case.name.startswith("store through a mapping")]
    assert len(chosen) == 4 * len(PLACES)
    tally = Tally()
    await arena.run_cases(chosen[::3], tally)
    assert tally.false_negatives == []
    assert Verdict.NONE not in tally.verdicts


async def test_metadata_of_every_kind_of_file_and_files_without_names_are_seen(arena: Arena) -> None:
    chosen = [case for where in PLACES for case in other_kinds(where) if case.way == "setns"]
    tally = Tally()
    await arena.run_cases(chosen, tally)
    assert tally.cases == len(chosen) > 4 * 9
    assert tally.false_negatives == []
    assert Verdict.NONE not in tally.verdicts


async def test_random_programs_over_all_places_and_actors(arena: Arena, image: Path) -> None:
    tally = Tally()
    await arena.run_cases(programs(11, 60, calls(image)), tally)
    assert tally.cases == 60
    assert tally.false_negatives == []


# --------------------------------------------------------------------------- a blind torture fails

# Words that an inspector without this field of Effects must miss. (Older tasks that ran or ended are seen twice: by
# what woke or killed them as well.)
SEEN_BY = {
    "data_writes": "write.changed",
    "name_changes": "mkdir.created",
    "metadata_changes": "chmod.changed",
    "ipc_changes": "shmget.created",
    "signals": "tgkill.changed",
    "foreign_writes": "prlimit.changed",
    "survivors_new": "fork.created",
    "channels": "sendto.changed",
    "mounts": "mount_bind.created",
    "uring_requests": "uring_mkdirat.created",
}


async def test_an_inspector_that_sees_nothing_is_found_out(arena: Arena, image: Path) -> None:
    words = {f"main:{word}" for word in SEEN_BY.values()} | {f"main:{name}.zero" for name in ("write", "fork", "open")}
    chosen = [
        case for case in matrix(calls(image))
        if set(case.program) <= words and case.way == "setns" and case.place == PLACES["overlay upper"]
    ]  # fmt: skip
    seen = Recorder()
    await arena.run_cases(chosen, seen)
    assert seen.false_negatives == []
    blind = Tally()
    for case, changes, _ in seen.told:
        blind.add(case, changes, Effects())
    assert len(blind.false_negatives) == len(SEEN_BY)
    assert blind.no_effect_cases == len(chosen) - len(SEEN_BY)
    for field, word in SEEN_BY.items():
        partly = Tally()
        for case, changes, effects in seen.told:
            blanked = msgspec.structs.replace(effects, **{field: type(getattr(effects, field))()})
            partly.add(case, changes, blanked)
        assert any(word in line for line in partly.false_negatives), f"nobody misses {field}"


@pytest.mark.parametrize(
    ("fact", "word"),
    [
        ("_content", "write.changed"),
        ("_attributes", "setxattr.changed"),
        ("_data", "fallocate_punch.changed"),
        ("_flags", "ioctl_setflags.changed"),
    ],
)
async def test_an_oracle_that_lacks_a_fact_is_found_out(
    arena: Arena, image: Path, fact: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the call promises must differ; what differs besides is kept away, as a broken oracle would."""
    case = next(case for case in matrix(calls(image)) if case.program == (f"main:{word}",) and case.way == "setns")
    good, broken = Tally(), Tally()
    await arena.run_cases([case], good)
    assert good.unexpected == []
    monkeypatch.setattr(_oracle, fact, lambda *_: ())
    if fact != "_content":  # punching and flags move the time; a write moves it as well, so that fact stays
        monkeypatch.setattr(_oracle, "_content", lambda *_: ())
    monkeypatch.setattr(_oracle, "_File", lambda _, rest: rest)  # without times
    await arena.run_cases([case], broken)
    assert len(broken.unexpected) == 1


# --------------------------------------------------------------------------- what the bench says


def test_a_program_is_the_same_alone_and_among_others() -> None:
    everything = list(programs(5, 40))
    for index in (0, 7, 39):
        start = index - index % GROUP
        alone = list(programs(5, index + 1, first=start))
        assert alone == everything[start : index + 1]
        assert alone[-1].name == f"program 5:{index}"
    assert list(programs(6, 40)) != everything


def test_names_of_cases_are_unique(image: Path) -> None:
    names = [case.name for case in matrix(calls(image))]
    assert len(names) == len(set(names))
    assert len(names) > 10_000


def test_only_repeats_a_case_alone(
    pool: Pool,
    image: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PAGURUS_STATE", str(pool.state))
    monkeypatch.setenv("PAGURUS_RUN", str(tmp_path))
    assert bench.main(["--json", "--only", "mkdirat.created by child in tmpfs"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["cases"] == 1
    assert result["verdicts"].keys() <= {"processes", "both"}
    assert "differs: ['tmpfs /tmpfs/fresh']" in printed.err


DIES = """
import argparse, asyncio, os, signal
from bench import _leftovers, inspector as bench
from sandbox.pool import Pool

async def main():
    pool = Pool().ensure()
    with _leftovers.run(pool) as place:
        made = bench.Bench(argparse.Namespace(quick=True, json=False), place, pool)
        with bench.load() as inspector, made.arena(inspector) as arena:
            async with arena.sandbox() as container:
                await arena.do(container, "start_survivor")
                await arena.do(container, "create", way="setns")
                arena.mark(container)
                os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def named(parent: Path, pattern: str) -> list[Path]:
    return list(parent.glob(pattern))


async def test_what_a_killed_run_left_is_removed_by_the_next(
    pool: Pool,
    inspector: Inspector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PAGURUS_STATE": str(pool.state)}
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, env=environment)
    assert await dead.wait() == -signal.SIGKILL
    (folder,) = named(tmp_path, "pagurus-inspector-*")
    tag = folder.name.removeprefix("pagurus-inspector-")
    parents = (hierarchy().unified / PARENT, pool.sandboxes, pool.checkpoints)
    assert all(named(parent, f"{tag}-*") for parent in parents)
    (group,) = named(parents[0], f"{tag}-*")
    assert len(_oracle.processes_below(group)) == 2
    with _leftovers.run(pool) as alive:
        (alive.folder / "kept").touch()
        assert await _leftovers.remove() == [tag]
        assert (alive.folder / "kept").exists()
    assert not any(named(parent, f"{tag}-*") for parent in parents)
    assert named(tmp_path, "pagurus-inspector-*") == []
    assert await _leftovers.remove() == []


@settings(max_examples=10)
@given(st.lists(st.floats(0.5, 2), min_size=3, max_size=40), st.floats(0.9, 1.2))
def test_the_estimate_of_exact_pairs_is_their_ratio(without: list[float], ratio: float) -> None:
    found = _overhead.estimate([ratio * value for value in without], without)
    assert found.ratio == pytest.approx(ratio)
    assert found.low == pytest.approx(ratio)
    assert found.high == pytest.approx(ratio)


def test_a_few_disturbed_pairs_do_not_move_the_estimate() -> None:
    without = [1.0] * 23
    attached = [1.01] * 20 + [3.0, 4.0, 5.0]
    found = _overhead.estimate(attached, without)
    assert found.ratio == pytest.approx(1.01)
    assert found.high < 1.02
