"""The inspector on the real kernel: every operation of the generator, judged, against the full comparison of the
sandbox; exact counts; marks; small maps; nested cgroups; a dump that must not look like work of the processes."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.verdict.judge import judge
from ebpf import layout
from ebpf.inspector import Inspector, Sizes
from sandbox import paths
from sandbox.container.container import Container
from sandbox.criu import rpc
from sandbox.criu.checkpointer import Checkpointer
from sandbox.errors import Unsupported
from sandbox.messages import Verdict
from sandbox.tree.pool import BtrfsPool
from tests.conformance import inspector as bench
from tests.crash.torture.programs import Vocabulary, drawn
from tests.crash.torture.run import Arena, Case, Tally, build, calls, cases, operations

ROOT = Path(__file__).resolve().parents[2]


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
def arena(pool: BtrfsPool, image: Path, inspector: Inspector, tmp_path: Path) -> Arena:
    return Arena(pool, image, tmp_path, inspector)


async def mark(arena: Arena, container: Container) -> None:
    """A mark once nobody runs: what has yet to begin its wait would count as having run since."""
    await arena.finalize(container)
    arena.mark(container)


CASES = {case.name: case for case in cases() if not case.name.endswith((" by child", " by thread"))}
SECTIONS = sorted({name.partition(":")[0] for name in CASES})


def test_every_operation_is_in_a_case() -> None:
    named = {word.rpartition(":")[2] for case in CASES.values() for word in case.program + case.setup}
    counted = {word for word, setup, *_ in bench.COUNTS for word in (word, *setup)}
    counted |= {word for word, _ in bench.RELATIVE_COUNTS} | {word for word, _, _ in bench.ENTERED_COUNTS}
    counted |= set(operations()["metadata of other kinds"])  # tests/conformance/test_inspector.py
    everything = {name for section in operations().values() for name in section}
    assert everything <= named | counted | {"noise"}
    assert len(list(cases())) >= 200


def test_the_layout_is_the_one_of_the_header() -> None:
    """An installed package has no header, so the layout is generated: it equals what the generator makes now."""
    made = subprocess.run([sys.executable, ROOT / "scripts" / "sync_layout.py"], capture_output=True, check=True).stdout
    assert made.decode() == Path(layout.__file__).read_text(), "run scripts/sync_layout.py --write"
    names = [field[0] for field in layout.SandboxLayout._fields_]
    assert names[:3] == ["cgroup_id", "files_epoch", "procs_epoch"]
    assert layout.BUCKETS & (layout.BUCKETS - 1) == 0


@pytest.mark.parametrize("section", SECTIONS)
async def test_no_effect_is_missed(arena: Arena, section: str) -> None:
    tally = Tally()
    await arena.run_cases([case for name, case in CASES.items() if name.startswith(f"{section}:")], tally)
    assert not tally.false_negatives
    assert not tally.false_positives


@pytest.mark.parametrize("count", [20, pytest.param(80, marks=pytest.mark.long)])
async def test_no_effect_of_random_programs_is_missed(arena: Arena, image: Path, count: int) -> None:
    tally = Tally()
    for number, series in enumerate(drawn(Vocabulary.of(calls(image)), seed=7, count=count)):
        await arena.run_cases(series.cases(number), tally)
    assert not tally.false_negatives
    assert tally.no_effect_cases > count / 8


async def test_counting_is_exact(arena: Arena) -> None:
    assert await bench.count(arena) == {}


async def test_absurdly_small_maps_miss_nothing(pool: BtrfsPool, image: Path, tmp_path: Path) -> None:
    chosen = list(CASES.values())[::5]
    with Inspector.load(sizes=Sizes(sandboxes=1, inodes=4, numbers=4, explanations=4096)) as tiny:
        tally = Tally()
        await Arena(pool, image, tmp_path, tiny).run_cases(chosen, tally)
    assert not tally.false_negatives
    assert tally.cases == len(chosen)


async def test_one_sandbox_too_many_is_refused_and_unknown(inspector: Inspector) -> None:
    with Inspector.load(sizes=Sizes(sandboxes=1, inodes=16, explanations=4096)) as small:
        small.watch(1 << 60)
        with pytest.raises(Unsupported, match="1 sandboxes are watched already"):
            small.watch(2 << 60)
        judgement = judge(small.read(2 << 60))
        assert judgement.verdict is Verdict.BOTH
        assert judgement.safest
        small.unwatch(1 << 60)
        small.watch(2 << 60)
        assert judge(small.read(2 << 60)).verdict is Verdict.NONE


async def test_each_half_has_its_own_mark(arena: Arena) -> None:
    async with arena.sandbox() as container:
        identity = container.cgroup.id
        await mark(arena, container)
        effects = await arena.judged(container, ("create", "start_survivor"))
        assert judge(effects).verdict is Verdict.BOTH
        arena.inspector.mark(identity, files=True, processes=False)
        assert judge(arena.inspector.read(identity)).verdict is Verdict.PROCESSES
        arena.inspector.mark(identity, files=False, processes=True)
        assert judge(arena.inspector.read(identity)).verdict is Verdict.NONE


async def test_a_taint_lasts_until_its_half_is_marked(arena: Arena) -> None:
    async with arena.sandbox() as container:
        identity = container.cgroup.id
        await mark(arena, container)
        arena.inspector.taint(identity, "the host wrote files", files=True, processes=False)
        judgement = judge(arena.inspector.read(identity))
        assert (judgement.verdict, judgement.reason) == (Verdict.FILES, "the host wrote files")
        arena.inspector.mark(identity, files=False, processes=True)
        assert judge(arena.inspector.read(identity)).verdict is Verdict.FILES
        arena.inspector.mark(identity)
        assert judge(arena.inspector.read(identity)).verdict is Verdict.NONE


async def test_explanations_name_file_process_and_call(arena: Arena) -> None:
    async with arena.sandbox() as container:
        await mark(arena, container)
        effects = await arena.judged(container, ("make_directory", "write_existing"))
        text = "\n".join(effects.reasons)
        assert "mkdir /work/made.d by effects[" in text
        assert "content of /work/file by effects[" in text


async def test_tasks_of_a_nested_cgroup_count(arena: Arena) -> None:
    """Moved there while they live, as an agent with its own cgroups does; and born there."""
    async with arena.sandbox() as container:
        await arena.do(container, "start_fifo_reader")
        nested = container.cgroup.path / "nested"
        nested.mkdir()
        survivor = next(pid for pid in container.tasks() if pid != container.init_pid)
        try:
            (nested / "cgroup.procs").write_text(str(survivor))
            await mark(arena, container)
            assert arena.inspector.read(container.cgroup.id).survivors == 1
            await arena.do(container, "fill_fifo")
            effects = arena.inspector.read(container.cgroup.id)
            assert effects.survivors_ran == 1
            assert judge(effects).verdict.processes
        finally:
            (container.cgroup.path / "cgroup.procs").write_text(str(survivor))
            nested.rmdir()


@pytest.mark.parametrize("kind", ["start_survivor", "start_server", "start_fifo_reader", "start_signal_taker"])
async def test_a_dump_is_not_work_of_the_processes(arena: Arena, kind: str, tmp_path: Path) -> None:
    """The parasite, the interruption and the thaw leave the verdict `none`; real work afterwards does not."""
    if not paths.criu().exists():
        pytest.skip(f"{paths.criu()} is missing: run `make setup`")
    try:
        checkpointer = Checkpointer(state=tmp_path / "state", run=tmp_path / "run", notes=arena.inspector.notes)
    except rpc.Unsupported as error:
        pytest.skip(str(error))
    await checkpointer.prepare()
    try:
        async with arena.sandbox() as container:
            await arena.do(container, kind)
            await arena.finalize(container)
            for number in range(2):
                await checkpointer.capture(
                    container,
                    tmp_path / "run" / "captures" / str(number),
                    on_frozen=lambda: arena.mark(container),
                )
                effects = await arena.judged(container, ("nothing", "read_survivor"))
                assert effects.survivors == 1
                assert judge(effects).verdict is Verdict.NONE, effects
            await arena.do(container, "fill_fifo", "connect_server", "signal_survivor")
            assert judge(arena.inspector.read(container.cgroup.id)).verdict.processes
            await checkpointer.forget(container)
    finally:
        await checkpointer.close()
        await asyncio.to_thread(_unmount_below, tmp_path)


async def test_a_survivor_that_only_computes_ran(arena: Arena) -> None:
    tally = Tally()
    await arena.run_cases([Case("spin", ("nothing",), ("start_spinner",))], tally)
    assert not tally.false_negatives
    assert tally.verdicts == {Verdict.PROCESSES: 1}


async def test_a_process_outside_is_not_counted(arena: Arena) -> None:
    async with arena.sandbox() as quiet, arena.sandbox() as busy:
        await mark(arena, quiet)
        await mark(arena, busy)
        await arena.do(busy, "create", "start_survivor")
        assert judge(arena.inspector.read(quiet.cgroup.id)).verdict is Verdict.NONE
        assert judge(arena.inspector.read(busy.cgroup.id)).verdict is Verdict.BOTH


async def test_a_second_inspector_sees_what_lives_already_as_new(arena: Arena) -> None:
    """As after a restart of the daemon: nothing that lives is taken for captured."""
    async with arena.sandbox() as container:
        await arena.do(container, "start_survivor")
        with Inspector.load() as second:
            second.watch(container.cgroup.id)
            effects = second.read(container.cgroup.id)
            assert effects.survivors_new == effects.survivors == 1
            second.mark(container.cgroup.id)
            await arena.do(container, "nothing")
            assert judge(second.read(container.cgroup.id)).verdict is Verdict.NONE
            await arena.do(container, "kill_survivor")
            assert judge(second.read(container.cgroup.id)).verdict is Verdict.PROCESSES


def _unmount_below(directory: Path) -> None:
    import subprocess

    for line in Path("/proc/self/mounts").read_text().splitlines():
        where = line.split()[1]
        if where.startswith(str(directory)):
            subprocess.run(["umount", where], check=False)
