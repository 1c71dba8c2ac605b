"""The torture itself: it runs each call once, and it fails when it is blind.

A bench that cannot miss anything would pass with any inspector: here the inspector's reads are blanked, field by
field, and the oracle's facts are taken away, and each time the torture must say so, and name a smallest program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.harness import leftovers
from daemon.verdict.judge import Judgement
from ebpf.inspector import Inspector
from sandbox import paths
from sandbox.container.cgroup import PARENT, hierarchy
from sandbox.errors import Invalid, Unsupported
from sandbox.messages import Effects, Verdict
from sandbox.tree.pool import BtrfsPool
from tests.conformance import inspector as bench
from tests.conformance import inspector_cost
from tests.crash.torture import oracle
from tests.crash.torture.cases import PLACES, WORK, Call, other_kinds
from tests.crash.torture.programs import Program, Series, Vocabulary, drawn, minimal, serieses
from tests.crash.torture.run import Arena, Case, Lane, Tally, build, calls, matrix


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: run `make setup`")
    return build(tmp_path_factory.mktemp("torture"))


@pytest.fixture(scope="module")
def inspector(pool: BtrfsPool) -> Iterator[Inspector]:
    if not paths.inspector_object().exists():
        pytest.skip(f"{paths.inspector_object()} is missing: run `make setup`")
    with Inspector.load() as loaded:
        yield loaded


@pytest.fixture
async def arena(pool: BtrfsPool, image: Path, inspector: Inspector, tmp_path: Path) -> AsyncIterator[Arena]:
    made = Arena(pool, image, tmp_path, inspector)
    try:
        yield made
    finally:
        made.close()


def item_call_once(result: list[Call], outcomes: set[str]) -> list[Case]:
    """One case for each call and outcome of these, and one more of those on processes; places and actors take turns."""
    by_word: dict[str, list[Case]] = {}
    for case in matrix(result):
        word = case.program[-1].rpartition(":")[2]
        if word.rpartition(".")[2] in outcomes and case.name.startswith(f"{word} by ") and case.way != "moved":
            by_word.setdefault(word, []).append(case)
    chosen: dict[str, Case] = {}
    for number, word in enumerate(sorted(by_word)):
        several = by_word[word]
        turn = [several[7 * number % len(several)]]
        turn += [case for case in several if case.name == f"{word} by setns"]
        chosen |= {case.name: case for case in turn}
    return [case for case in matrix(result) if case.name in chosen]


class Blind:
    """An inspector that does not see one kind of effects."""

    def __init__(self, inspector: Inspector, field: str) -> None:
        self._inspector, self._field = inspector, field

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inspector, name)

    def read(self, identity: int) -> Effects:
        observed = self._inspector.read(identity)
        return msgspec.structs.replace(observed, **{self._field: type(getattr(observed, self._field))()})


class Recorder(Tally):
    """Keeps what it is told, so that it can be judged again."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[tuple[Case, oracle.Changes, Effects]] = []

    def add(
        self,
        case: Case,
        changes: oracle.Changes,
        effects: Effects,
        judgement: Judgement | None = None,
        output: str = "",
    ) -> None:
        self.reported.append((case, changes, effects))
        super().add(case, changes, effects, judgement, output)


# --------------------------------------------------------------------------- every call


@pytest.mark.parametrize(
    "outcomes", [{"changed", "created"}, {"zero", "failed"}], ids=["changed+created", "failed+zero"]
)
async def test_no_call_is_missed(arena: Arena, image: Path, outcomes: set[str]) -> None:
    result = calls(image)
    chosen = item_call_once(result, outcomes)
    assert {case.program[0].partition(":")[2] for case in chosen} == {
        call.word for call in result if call.outcome in outcomes
    }
    tally = Tally()
    await arena.run_cases(chosen, tally)
    assert tally.cases == len(chosen)
    assert tally.false_negatives == []
    assert tally.unexpected == []


async def test_stores_through_mappings_older_than_the_mark_are_seen(arena: Arena, image: Path) -> None:
    chosen = [case for case in matrix(calls(image)) if case.name.startswith("store through a mapping")]
    assert len(chosen) == 4 * (len(PLACES) - 1)  # but the one that is read-only
    tally = Tally()
    await arena.run_cases(chosen[::3], tally)
    assert tally.false_negatives == []
    assert Verdict.NONE not in tally.verdicts  # in scratch, the survivor ran


async def test_metadata_of_every_kind_of_file_and_files_without_names_are_seen(arena: Arena) -> None:
    places = [place for place in PLACES.values() if place.kind not in ("scratch", "read-only")]
    chosen = [case for place in places for case in other_kinds(place) if case.way == "setns"]
    tally = Tally()
    await arena.run_cases(chosen, tally)
    assert tally.cases == len(chosen) > 5 * 9
    assert tally.false_negatives == []
    assert Verdict.NONE not in tally.verdicts


async def test_what_changes_in_scratch_is_seen_and_makes_no_checkpoint(arena: Arena, image: Path) -> None:
    words = ("map_store.changed", "write.created", "rename.changed", "chmod.changed", "unlink.changed")
    chosen = [
        case for case in matrix(calls(image))
        if case.place.kind == "scratch" and case.program[0].partition(":")[2] in words and case.way == "exec"
    ]  # fmt: skip
    observed = Recorder()
    await arena.run_cases(chosen, observed)
    assert observed.false_negatives == observed.false_positives == []
    assert (observed.cases, observed.scratch) == (3 * len(words), 3 * len(words))
    blind = Tally()
    for case, changes, _ in observed.reported:
        blind.add(case, changes, Effects())
    assert len(blind.false_negatives) == len(chosen)
    assert "not seen in scratch: ['scratch /bind/" in blind.false_negatives[0]


async def test_calls_that_a_read_only_mount_refuses_are_no_effect(arena: Arena, image: Path) -> None:
    chosen = [case for case in matrix(calls(image)) if case.place.kind == "read-only"]
    tally = Tally()
    await arena.run_cases(chosen[::5], tally)
    assert tally.false_positives == tally.false_negatives == tally.unexpected == []
    assert tally.verdicts == {Verdict.NONE: len(chosen[::5])}


@pytest.mark.parametrize("programs", [15, pytest.param(60, marks=pytest.mark.long)])
def test_random_programs_over_all_places_and_actors(
    pool: BtrfsPool, image: Path, inspector: Inspector, tmp_path: Path, programs: int
) -> None:
    """Whatever of a program is missed, what fails here in the end is the smallest one."""
    arena = Arena(pool, image, tmp_path, inspector)
    lane = Lane(arena)
    with asyncio.Runner() as runner:

        @settings(max_examples=programs)
        @given(serieses(Vocabulary.of(calls(image))))
        def nothing_is_missed(series: Series) -> None:
            tally = Tally()
            runner.run(lane.run(series.cases(), tally))
            assert tally.false_negatives == [], f"--only {shlex.quote(series.text)}"

        try:
            nothing_is_missed()
        finally:
            runner.run(lane.close())
            arena.close()


@pytest.mark.parametrize(
    ("text", "differs"),
    [
        # A survivor that maps what lies behind the end of a file.
        ("program in overlay upper: exec main:map_mremap.orphan main:start_survivor", "memory"),
        # Bytes that wait in a FIFO, wherever it is.
        ("program in tmpfs at /dev/shm: exec main:start_fifo_holder; exec main:fill_fifo", "descriptors"),
        ("program in bind mount: exec main:start_fifo_holder; setns main:fill_fifo", "descriptors"),
    ],
)
async def test_what_a_survivor_holds_is_part_of_the_truth(arena: Arena, image: Path, text: str, differs: str) -> None:
    observed = Recorder()
    await arena.run_cases(Series.parse(text, Vocabulary.of(calls(image))).cases(), observed)
    assert observed.false_negatives == []
    *_, (_, changes, _) = observed.reported
    assert any(fact.startswith("process ") and fact.endswith(differs) for fact in changes.processes)


@pytest.mark.parametrize(
    "text",
    [
        # The same bytes, and a time that nobody set.
        "program in overlay upper: exec main:map_by_direct_read.changed main:utime.failed",
        # A mount over one of two mounts of the same directory.
        "program in read-only bind: setns main:fail_mount",
    ],
)
async def test_what_is_no_difference_is_not_missed(arena: Arena, image: Path, text: str) -> None:
    tally = Tally()
    await arena.run_cases(Series.parse(text, Vocabulary.of(calls(image))).cases(), tally)
    assert tally.false_negatives == []


# --------------------------------------------------------------------------- a blind torture fails

# Words that an inspector without this field of Effects must miss. (Older tasks that ran or ended are seen twice: by
# what woke or killed them as well.)
OBSERVED_BY = {
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
    words = {f"main:{word}" for word in OBSERVED_BY.values()} | {
        f"main:{name}.zero" for name in ("write", "fork", "open")
    }
    chosen = [
        case for case in matrix(calls(image))
        if set(case.program) <= words and case.way == "setns" and case.place is WORK
    ]  # fmt: skip
    observed = Recorder()
    await arena.run_cases(chosen, observed)
    assert observed.false_negatives == []
    blind = Tally()
    for case, changes, _ in observed.reported:
        blind.add(case, changes, Effects())
    assert len(blind.false_negatives) == len(OBSERVED_BY)
    assert blind.no_effect_cases == len(chosen) - len(OBSERVED_BY)
    for field, word in OBSERVED_BY.items():
        partly = Tally()
        for case, changes, effects in observed.reported:
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
    monkeypatch.setattr(oracle, fact, lambda *_: ())
    if fact != "_content":  # punching and flags move the time; a write moves it as well, so that fact stays
        monkeypatch.setattr(oracle, "_content", lambda *_: ())
    monkeypatch.setattr(oracle, "_File", lambda _, rest: rest)  # without times
    await arena.run_cases([case], broken)
    assert len(broken.unexpected) == 1


# --------------------------------------------------------------------------- random programs


VOCABULARY = Vocabulary(
    harmless=("nothing", "read", *(f"quiet{n}.zero" for n in range(12))),
    changing=("write", "chmod.changed", *(f"call{n}.changed" for n in range(12))),
    living=("fork",),
)


@given(serieses(VOCABULARY))
def test_the_text_of_a_series_says_all_of_it(series: Series) -> None:
    assert Series.parse(series.text, VOCABULARY) == series
    *_, last = cases = series.cases(3)
    assert (last.name, last.group) == (series.text, 3)
    assert [case.name for case in cases] == [
        Series(series.place, series.programs[: n + 1]).text for n in range(len(series.programs))
    ]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("program in attic: exec main:read", "no place 'attic'"),
        ("program in tmpfs: crawl main:read", "not a program: 'crawl main:read'"),
        ("program in tmpfs: exec", "not a program: 'exec'"),
        ("program in tmpfs: exec main:read;", "not a program: ''"),
        ("program in tmpfs: exec main:sing", "no call 'main:sing'"),
        ("program in tmpfs: exec aunt:read", "no call 'aunt:read'"),
    ],
)
def test_a_text_that_is_no_series_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(Invalid, match=wrong):
        Series.parse(text, VOCABULARY)


def test_a_seed_draws_as_many_different_programs_as_asked_for_and_always_the_same() -> None:
    result = drawn(VOCABULARY, 5, 400)
    programs = [(series.place, program) for series in result for program in series.programs]
    assert 400 <= len(set(programs)) < 405
    assert len(programs) < 1.1 * len(set(programs))
    assert list(drawn(VOCABULARY, 5, 400).items()) == list(result.items())
    assert {series.place for series in result} == set(PLACES.values())
    assert {program.way for _, program in programs} == {"exec", "setns", "nested"}
    assert not result.keys() >= set(list(drawn(VOCABULARY, 6, 100)))
    assert drawn(VOCABULARY, 5, 0) == {}


def test_without_hypothesis_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(Unsupported, match="make setup"):
        drawn(VOCABULARY, 1, 10)
    assert drawn(VOCABULARY, 1, 0) == {}


# --------------------------------------------------------------------------- a missed program is made small


def holds(series: Series, *target: str) -> bool:
    """Whether these calls are made in this order, each in a program of its own."""
    rest = iter(series.programs)
    return all(any(word in {item.partition(":")[2] for item in one.words} for one in rest) for word in target)


@pytest.mark.parametrize(
    ("target", "smallest"),
    [
        (("chmod.changed",), "program in overlay upper: exec main:chmod.changed"),
        (("write", "chmod.changed"), "program in overlay upper: exec main:write; exec main:chmod.changed"),
    ],
)
def test_what_is_missed_is_shrunk_to_nothing_but_its_cause(target: tuple[str, ...], smallest: str) -> None:
    result = drawn(VOCABULARY, 2, 1200)
    missed = [series for series in result if holds(series, *target) and len(series.programs) > 3]
    assert missed
    for series in missed[:3]:
        tried: list[Series] = []

        def judged_wrongly(one: Series, tried: list[Series] = tried) -> bool:
            tried.append(one)
            return holds(one, *target)

        small = minimal(VOCABULARY, series, result[series], judged_wrongly)
        assert small is not None
        assert small.text == smallest
        assert tried[0] == series
        assert len(tried) < 500


def test_what_matters_of_place_way_and_actor_is_kept() -> None:
    result = drawn(VOCABULARY, 2, 1200)

    def judged_wrongly(one: Series) -> bool:
        return one.place.name == "tmpfs" and any(
            program.way == "nested" and word.startswith("thread:call")
            for program in one.programs
            for word in program.words
        )

    series = next(one for one in result if judged_wrongly(one))
    small = minimal(VOCABULARY, series, result[series], judged_wrongly)
    assert small is not None
    assert small == Series(PLACES["tmpfs"], (Program("nested", small.programs[0].words[:1]),))


def test_a_miss_that_does_not_come_again_is_said_to_be_none() -> None:
    result = drawn(VOCABULARY, 2, 100)
    series = list(result)[20]
    assert minimal(VOCABULARY, series, result[series], lambda _: False) is None
    first = iter([True])
    assert minimal(VOCABULARY, series, result[series], lambda _: next(first, False)) == series


def test_a_miss_of_a_batch_that_is_drawn_otherwise_now_stays_as_it_was() -> None:
    series = Series(WORK, (Program("exec", ("main:read", "main:sung")), Program("exec", ("main:write",))))
    assert minimal(VOCABULARY, series, "2/0", lambda one: one == series) == series
    assert minimal(VOCABULARY, series, "2/0", lambda _: False) is None


async def test_a_blind_inspector_is_shown_by_a_smallest_program(
    inspector: Inspector, pool: BtrfsPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SHRUNK", 1)
    blind: Any = Blind(inspector, "metadata_changes")
    with leftovers.run(pool) as place:
        made = bench.Bench(argparse.Namespace(quick=True, json=True), place, pool)
        metadata = tuple(call.word for call in made.calls if (call.family, call.outcome) == ("metadata", "changed"))
        made.vocabulary = Vocabulary(made.vocabulary.harmless[:50], metadata, ())
        made.programs = drawn(made.vocabulary, 1, 40)
        chosen = [case for number, series in enumerate(made.programs) for case in series.cases(number)]
        tally = Tally()
        await made.tortured(blind, chosen, "random programs", tally, how=" --tiny")
        assert tally.missed
        (command,) = made.minimal
        *_, text, how = shlex.split(command)
        assert how == "--tiny"
        smallest = Series.parse(text, made.vocabulary)
        (program,) = smallest.programs
        (word,) = program.words
        assert (smallest.place, word.partition(":")[0]) == (WORK, "main")
        for observed, missed in ((blind, 1), (inspector, 0)):
            again = Tally()
            with made.arena(observed) as arena:
                await arena.run_cases(smallest.cases(), again)
            assert len(again.false_negatives) == missed


# --------------------------------------------------------------------------- what the bench does besides


def test_names_of_cases_are_unique(image: Path) -> None:
    names = [case.name for case in matrix(calls(image))]
    assert len(names) == len(set(names))
    assert len(names) > 10_000


def test_only_repeats_a_case_alone(
    pool: BtrfsPool,
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
from tests.conformance import inspector as bench
from bench.harness import leftovers
from ebpf.inspector import Inspector
from sandbox.tree.pool import BtrfsPool

async def main():
    pool = BtrfsPool().ensure()
    with leftovers.run(pool) as place:
        made = bench.Bench(argparse.Namespace(quick=True, json=False), place, pool)
        with Inspector.load() as inspector, made.arena(inspector) as arena:
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
    pool: BtrfsPool,
    inspector: Inspector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PAGURUS_STATE": str(pool.state)}
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, env=environment)
    assert await dead.wait() == -signal.SIGKILL
    (directory,) = named(tmp_path, "pagurus-inspector-*")
    tag = directory.name.removeprefix("pagurus-inspector-")
    parents = (hierarchy().unified / PARENT, pool.sandboxes, pool.checkpoints)
    assert all(named(parent, f"{tag}-*") for parent in parents)
    (group,) = named(parents[0], f"{tag}-*")
    assert len(oracle.processes_below(group)) == 2
    with leftovers.run(pool) as alive:
        (alive.directory / "kept").touch()
        assert await leftovers.remove() == [tag]
        assert (alive.directory / "kept").exists()
    assert not any(named(parent, f"{tag}-*") for parent in parents)
    assert named(tmp_path, "pagurus-inspector-*") == []
    assert await leftovers.remove() == []


async def test_only_repeats_a_program_by_its_text(
    pool: BtrfsPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGURUS_STATE", str(pool.state))
    monkeypatch.setenv("PAGURUS_RUN", str(tmp_path))
    text = "program in bind mount: setns main:mkdirat.created; exec child:chmod.changed main:write_lower"
    code = await asyncio.to_thread(bench.main, ["--json", "--only", text])
    printed = capsys.readouterr()
    assert code == 0
    result = json.loads(printed.out)
    assert result["verdicts"] == {"none": 1, "files": 1}
    assert result["scratch"] == 1
    assert "differs: ['scratch /bind/fresh']" in printed.err


@settings(max_examples=10)
@given(st.lists(st.floats(0.5, 2), min_size=3, max_size=40), st.floats(0.9, 1.2))
def test_the_estimate_of_exact_pairs_is_their_ratio(without: list[float], ratio: float) -> None:
    result = inspector_cost.estimate([ratio * value for value in without], without)
    assert result.ratio == pytest.approx(ratio)
    assert result.low == pytest.approx(ratio)
    assert result.high == pytest.approx(ratio)


def test_a_few_disturbed_pairs_do_not_move_the_estimate() -> None:
    without = [1.0] * 23
    attached = [1.01] * 20 + [3.0, 4.0, 5.0]
    result = inspector_cost.estimate(attached, without)
    assert result.ratio == pytest.approx(1.01)
    assert result.high < 1.02
