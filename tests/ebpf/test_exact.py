"""What the inspector counts, exactly: 23 of each kind; what nets to zero; the agent's own process; the census."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from daemon.verdict.assess import poll
from daemon.verdict.ignore import checked
from daemon.verdict.judge import judge
from ebpf.inspector import Inspector
from sandbox import paths
from sandbox.container.container import Container
from sandbox.errors import NotFound
from sandbox.messages import Effects, IgnoreRules, Verdict
from sandbox.tree.pool import BtrfsPool
from tests.crash.torture.run import Arena
from tests.support.daemon_host import until
from tests.support.ebpf_support import image_with_probe


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_with_probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="module")
def inspector(pool: BtrfsPool) -> Iterator[Inspector]:
    if not paths.inspector_object().exists():
        pytest.skip(f"{paths.inspector_object()} is missing: run `make setup`")
    with Inspector.load() as loaded:
        yield loaded


@pytest.fixture
def arena(pool: BtrfsPool, image: Path, inspector: Inspector, tmp_path: Path) -> Arena:
    return Arena(pool, image, tmp_path, inspector)


async def probe(container: Container, word: str, times: int = 1) -> None:
    done = await container.exec(["/probe", "/work", str(times), word], timeout=120)
    assert done.exit_code == 0, (word, done.exit_code, done.stderr)


async def observed(arena: Arena, container: Container, word: str, times: int = 1) -> Effects:
    await probe(container, word, times)
    return arena.inspector.read(container.cgroup.id)


def agent_of(container: Container) -> int | None:
    """The process that calls itself an agent: its leader."""
    for tid in container.tasks():
        with suppress(OSError):  # ended meanwhile
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{tid}/status").read_text().splitlines())
            if lines["Name"].strip() == "agent of mine" and lines["PPid"].strip() == str(container.init_pid):
                return int(lines["Tgid"])
    return None


async def mark(arena: Arena, container: Container) -> None:
    """A mark once nobody runs: what has yet to begin its wait would count as having run since."""
    await arena.finalize(container)
    arena.mark(container)


@asynccontextmanager
async def agent_at_work(arena: Arena, word: str = "agent") -> AsyncIterator[tuple[Container, int]]:
    async with arena.sandbox() as container:
        await probe(container, word)
        pid = agent_of(container)
        assert pid is not None
        arena.inspector.exclude(container.cgroup.id, pid)
        # What it had started by then ends first.
        await until(
            lambda: "agent of mine" not in {task.name for task in arena.inspector.tasks(container.cgroup.id)},
        )
        arena.mark(container)
        yield container, pid


# --------------------------------------------------------------------------- counting

COUNTED: list[tuple[str, str, Callable[[Effects], int]]] = [
    ("directory", "nothing", lambda e: e.name_changes),
    ("node", "nothing", lambda e: e.name_changes),
    ("symlink", "nothing", lambda e: e.name_changes),
    ("socket_name", "nothing", lambda e: e.name_changes),
    ("link", "nothing", lambda e: e.name_changes),
    ("data", "nothing", lambda e: e.data_writes),
    ("xattr", "nothing", lambda e: e.metadata_changes),
    ("owner", "nothing", lambda e: e.metadata_changes),
    ("truncate", "nothing", lambda e: e.metadata_changes),
    ("times", "nothing", lambda e: e.metadata_changes),
    ("times", "nothing", lambda e: e.times_set),
    ("foreign_old", "quiet", lambda e: e.foreign_writes),
    ("limits_old", "quiet", lambda e: e.foreign_writes),
    ("nice_all", "quiet", lambda e: e.foreign_writes),
    ("channels_both", "start_server", lambda e: e.channels),  # as many to a listener of its own, which are none
    ("channels_old", "start_server", lambda e: e.channels),
    ("mqueue_left", "nothing", lambda e: e.ipc_changes),
    ("shm_left", "nothing", lambda e: e.ipc_changes),
    ("sem_left", "nothing", lambda e: e.ipc_changes),
]


async def test_twenty_three_of_a_kind_count_twenty_three(arena: Arena) -> None:
    wrong = {}
    async with arena.sandbox() as container:
        for word, before, count in COUNTED:
            await arena.do(container, "kill_all", "reset")
            await (arena.do if before.startswith("start_") else probe)(container, before)
            if word == "data":
                done = await container.exec(["/effects", "/work", "count_creates"], timeout=120)
                assert done.exit_code == 0
                word = "data"
                for number in range(23):
                    os.rename(
                        f"/proc/{container.init_pid}/root/work/c{number}",
                        f"/proc/{container.init_pid}/root/work/n{number}",
                    )
            await mark(arena, container)
            effects = await observed(arena, container, word, 23)
            if count(effects) != 23:
                wrong[word] = count(effects)
    assert wrong == {}


@pytest.mark.parametrize("word", ["foreign", "limits"])
async def test_what_is_done_to_a_child_that_is_gone_is_nothing(arena: Arena, word: str) -> None:
    async with arena.sandbox() as container:
        await mark(arena, container)
        effects = await observed(arena, container, word, 23)
        assert effects.foreign_writes == 0
        assert judge(effects).verdict is Verdict.NONE


@pytest.mark.parametrize(
    ("word", "expected"), [("channels", 0), ("unix_pair", 0), ("share_port", 1), ("channels_old", 1)]
)
async def test_a_connection_counts_when_somebody_older_may_be_at_its_other_end(
    arena: Arena, word: str, expected: int
) -> None:
    async with arena.sandbox() as container:
        await arena.do(container, "start_server")
        await mark(arena, container)
        effects = await observed(arena, container, word)
        assert effects.survivors == 1
        assert effects.channels == expected, effects
        assert judge(effects).verdict is (Verdict.PROCESSES if expected else Verdict.NONE)


async def test_truncation_of_a_file_opened_for_reading_is_seen(arena: Arena) -> None:
    async with arena.sandbox() as container:
        await mark(arena, container)
        assert judge(await observed(arena, container, "truncate_read_only")).verdict is Verdict.FILES


# --------------------------------------------------------------------------- IPC


async def test_ipc_objects_made_and_removed_are_nothing(arena: Arena) -> None:
    async with arena.sandbox() as container:
        await mark(arena, container)
        effects = await observed(arena, container, "ipc_gone", 3)
        assert effects.ipc_changes == 0
        assert judge(effects).verdict is Verdict.NONE


@pytest.mark.parametrize("word", ["shm_left", "sem_left", "mqueue_left"])
async def test_an_ipc_object_that_stays_is_something(arena: Arena, word: str) -> None:
    async with arena.sandbox() as container:
        await mark(arena, container)
        assert judge(await observed(arena, container, word)).verdict is Verdict.PROCESSES
        await mark(arena, container)
        assert judge(await observed(arena, container, "nothing")).verdict is Verdict.NONE
        # Something was there before: what was done to it cannot be told from what is gone.
        assert judge(await observed(arena, container, "ipc_gone")).verdict is Verdict.PROCESSES


async def test_one_object_for_another_is_something(arena: Arena) -> None:
    async with arena.sandbox() as container:
        await probe(container, "ipc_seven")
        await mark(arena, container)
        assert judge(await observed(arena, container, "ipc_swap")).verdict is Verdict.PROCESSES


async def test_a_removed_segment_goes_with_the_last_process_that_maps_it(arena: Arena) -> None:
    async with arena.sandbox() as container:
        await mark(arena, container)
        assert judge(await observed(arena, container, "ipc_held")).verdict is Verdict.NONE


# --------------------------------------------------------------------------- the agent's own process


async def test_an_agent_at_work_is_no_survivor(arena: Arena) -> None:
    async with agent_at_work(arena) as (container, _):
        for word in ("nothing", "ipc_gone", "channels"):
            effects = await observed(arena, container, word)
            assert effects.excluded >= 4
            for _ in range(3):  # a child that just begins may not be known as the agent's yet; it is gone at once
                if effects.survivors:
                    await asyncio.sleep(0.05)
                    effects = arena.inspector.read(container.cgroup.id)
            assert effects.survivors == 0, effects
            assert judge(effects).verdict is Verdict.NONE, effects


async def test_beside_an_agent_everything_else_counts(arena: Arena) -> None:
    async with agent_at_work(arena, "parent") as (container, _):
        effects = await observed(arena, container, "quiet")
        assert (effects.survivors, effects.survivors_new) == (1, 1)
        assert judge(effects).verdict.processes
        await mark(arena, container)
        assert judge(await observed(arena, container, "nothing")).verdict is Verdict.NONE
        assert judge(await observed(arena, container, "directory")).verdict is Verdict.FILES


async def test_the_end_of_an_agent_is_no_effect(arena: Arena) -> None:
    async with agent_at_work(arena) as (container, pid):
        os.kill(pid, 9)
        await until(lambda: container.tasks() == [container.init_pid])
        effects = await observed(arena, container, "nothing")
        assert effects.excluded == 0
        assert judge(effects).verdict is Verdict.NONE, effects


async def test_what_an_agent_starts_counts(arena: Arena) -> None:
    async with agent_at_work(arena, "parent") as (container, pid):
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: len(container.tasks()) == 3)  # pid 1, the agent, and what it started
        effects = arena.inspector.read(container.cgroup.id)
        assert (effects.survivors_new, effects.excluded) == (1, 1)
        assert judge(effects).verdict is Verdict.PROCESSES


@pytest.mark.parametrize("word", ["talk_by_pipe", "talk_by_write", "talk_by_send", "talk_by_fifo"])
async def test_what_an_agent_says_to_an_older_process_changes_that(arena: Arena, word: str) -> None:
    """It waits in the other's pipe or socket, which the dump holds."""
    async with agent_at_work(arena, word) as (container, pid):
        os.kill(pid, signal.SIGSTOP)
        await arena.finalize(container)
        arena.mark(container)
        assert judge(await observed(arena, container, "nothing")).verdict is Verdict.NONE
        os.kill(pid, signal.SIGCONT)
        await until(lambda: arena.inspector.read(container.cgroup.id).channels > 0)
        effects = arena.inspector.read(container.cgroup.id)
        assert (effects.survivors, effects.survivors_ran, effects.signals) == (1, 0, 0)
        assert judge(effects).verdict is Verdict.PROCESSES


async def test_what_an_ignored_process_says_to_another_one_counts(arena: Arena) -> None:
    rules = checked(IgnoreRules(processes=["agent of mine"]))
    async with arena.sandbox() as container:
        await probe(container, "talk_by_pipe")
        await until(lambda: "deaf" in {task.name for task in arena.inspector.tasks(container.cgroup.id)})
        arena.mark(container)
        await until(lambda: any(task.spoke for task in arena.inspector.tasks(container.cgroup.id)))
        effects, judgement = poll(arena.inspector, container, rules)
        assert (effects.ignored, effects.survivors_ran, effects.channels) == (1, 0, 1)
        assert judgement.verdict is Verdict.PROCESSES


async def test_a_signal_to_a_process_whose_first_thread_has_ended_counts(arena: Arena) -> None:
    async with arena.sandbox() as container:
        await probe(container, "leaderless")
        arena.inspector.mark(container.cgroup.id)
        (task,) = arena.inspector.tasks(container.cgroup.id)
        assert task.tid != task.pid
        os.kill(task.pid, signal.SIGUSR1)
        effects = arena.inspector.read(container.cgroup.id)
        assert (effects.signals, effects.survivors_ran) == (1, 0)
        assert judge(effects).verdict is Verdict.PROCESSES


async def test_the_child_of_a_process_without_a_record_counts(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    async with arena.sandbox() as container:
        await probe(container, "parent")
        pid = agent_of(container)
        assert pid is not None
        with Inspector.load() as second:
            with monkeypatch.context() as patched:
                patched.setattr(second, "_sweep", lambda: None)  # nobody is recorded
                second.watch(container.cgroup.id)
            os.kill(pid, signal.SIGUSR1)
            await until(lambda: len(container.tasks()) == 3)
            effects = second.read(container.cgroup.id)
            assert effects.overflow
            assert effects.survivors == effects.survivors_new == 1
            second.mark(container.cgroup.id)  # which finds the parent
            assert (result := second.read(container.cgroup.id)).survivors == 2
            assert not result.overflow


async def test_exclusion_needs_a_watched_sandbox(inspector: Inspector) -> None:
    with pytest.raises(NotFound, match="watched"):
        inspector.exclude(1 << 60, os.getpid())


# --------------------------------------------------------------------------- the census


async def test_the_census_tells_tasks_apart(arena: Arena) -> None:
    async with arena.sandbox() as container:
        await probe(container, "quiet")
        await mark(arena, container)
        await probe(container, "agent")
        tasks = arena.inspector.tasks(container.cgroup.id)
        old = [task for task in tasks if task.name == "probe"]
        assert [(task.new, task.ran) for task in old] == [(False, False)]
        pid = agent_of(container)
        threads = [task for task in tasks if task.pid == pid]
        assert len(threads) >= 4
        assert {(task.name, task.new) for task in threads} == {("agent of mine", True)}
        effects = arena.inspector.read(container.cgroup.id)
        assert effects.survivors - effects.survivors_new == 1
