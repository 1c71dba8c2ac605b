"""Deaths of engines and of their supervisor: noticed at once, repaired, or reported with the engine's own log."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.engine import adopted, keep, supervisor
from rollout.engine.client import Sampling
from rollout.engine.launch import Launch, LaunchCommand, embedded, vllm
from rollout.engine.standby import Standby
from rollout.engine.supervisor import EngineSupervisor
from rollout.store import stages
from sandbox.errors import Closed, EngineFailed, Invalid, NotFound
from tests.support.endpoint_engines import NO_VLLM, VLLM
from tests.support.programs import Program
from tests.support.rollout_engines import publish

pytest.importorskip("torch", reason="torch is not installed")

SHORT = Sampling(max_tokens=4, ignore_eos=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of versions."""
    publish(tmp_path / "weights", 0)
    return tmp_path / "weights"


async def test_an_engine_that_does_not_start_is_reported_with_its_log(directory: Path, tmp_path: Path) -> None:
    broken = Launch("broken", lambda _, __: LaunchCommand([sys.executable, "-c", "print('boom'); exit(3)"], {}), 30.0)
    with pytest.raises(EngineFailed, match=r"ended with 3; its log .*engine\.log ends:\n  boom"):
        async with EngineSupervisor(broken, directory, 0, log=tmp_path / "engine.log"):
            pass


async def test_a_folder_without_weights_starts_no_engine(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="neither versions of weights nor a model"):
        async with EngineSupervisor(embedded(), tmp_path, 0, log=tmp_path / "engine.log"):
            pass


async def test_a_model_folder_is_served_as_it_is(directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "v000000"
    async with EngineSupervisor(embedded(slots=4), model, 5, log=tmp_path / "engine.log") as engine:
        assert (await engine.generate([5], SHORT)).spans[0].version == 5
        with pytest.raises(Invalid, match="one model"):
            await engine.publish(model, 6)
        assert (await engine.generate([5], SHORT)).spans[0].version == 5


async def test_an_engine_that_cannot_come_back_fails_every_caller_at_once(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_PAUSES", ())
    async with EngineSupervisor(embedded(slots=4), directory, 0, log=tmp_path / "engine.log") as engine:
        await engine.client.pause("keep")
        flights = [asyncio.create_task(engine.generate([5], SHORT)) for _ in range(3)]
        shutil.rmtree(directory)
        assert engine.pid is not None
        os.kill(engine.pid, 9)
        for outcome in await asyncio.gather(*flights, return_exceptions=True):
            assert isinstance(outcome, EngineFailed) and "did not start" in str(outcome)
        with pytest.raises(EngineFailed):
            await engine.generate([5], SHORT)
    with pytest.raises((Closed, EngineFailed)):
        await engine.generate([5], SHORT)


async def test_a_server_that_is_killed_again_while_it_starts_is_started_again(directory: Path, tmp_path: Path) -> None:
    real, begun = embedded(slots=4), []

    def command(model: Path, port: int) -> LaunchCommand:
        begun.append(port)
        killed = LaunchCommand([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {})
        return killed if len(begun) == 2 else real.command(model, port)

    launch = dataclasses.replace(real, command=command, standby=None)
    async with EngineSupervisor(launch, directory, 0, log=tmp_path / "engine.log") as engine:
        assert engine.pid is not None
        os.kill(engine.pid, 9)
        assert (await engine.generate([5], SHORT)).token_ids and len(begun) == 3


async def test_requests_in_flight_are_asked_again_after_a_death(directory: Path, tmp_path: Path) -> None:
    async with EngineSupervisor(embedded(slots=4), directory, 0, log=tmp_path / "engine.log") as engine:
        await engine.client.pause("keep")
        flights = [asyncio.create_task(engine.generate([5, n], SHORT)) for n in range(6)]
        done, _ = await asyncio.wait(flights, timeout=0.2)
        assert not done and engine.pid is not None
        os.kill(engine.pid, 9)
        for generation in await asyncio.gather(*flights):
            assert len(generation.token_ids) == 4 and generation.spans[0].version == 0
        assert engine.restarts == 1 and engine.statistics()["retried"] == 6


async def test_a_death_during_a_publication_ends_with_the_new_weights(directory: Path, tmp_path: Path) -> None:
    publish(directory, 1)
    async with EngineSupervisor(embedded(slots=4), directory, 0, log=tmp_path / "engine.log") as engine:
        assert engine.pid is not None
        os.kill(engine.pid, 19)  # stopped: the publication gets as far as its first request
        task = asyncio.create_task(engine.publish(directory, 1))
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done
        os.kill(engine.pid, 9)
        assert (await task).version == 1
        assert (await engine.generate([5], SHORT)).spans[0].version == 1


def test_an_engine_does_not_outlive_a_killed_supervisor(directory: Path, tmp_path: Path) -> None:
    code = f"""
import asyncio, os
from pathlib import Path
from rollout.engine.supervisor import EngineSupervisor, embedded

async def main():
    log = Path({str(tmp_path / "engine.log")!r})
    async with EngineSupervisor(embedded(slots=2), {str(directory)!r}, 0, log=log) as engine:
        print(engine.pid, flush=True)
        input()

asyncio.run(main())
"""
    with Program(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as supervisor:
        assert supervisor.stdout is not None
        engine = os.pidfd_open(int(supervisor.stdout.readline()))
        supervisor.destroy()
    ended, _, _ = select.select([engine], [], [], 120)
    os.close(engine)
    assert ended


def test_a_missing_vllm_names_the_hint(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="make setup-vllm"):
        vllm(python=tmp_path / "python")


LEAVE = """
import asyncio, os, sys
from dataclasses import replace
from pathlib import Path
from rollout.engine.launch import embedded, vllm
from rollout.engine.standby import Standby
from rollout.engine.supervisor import EngineSupervisor
from rollout.store import stages
async def main():
    folder, log, roles = map(Path, sys.argv[1:4])
    launch = replace(embedded(slots=4), leaves=False, retained=True) if "kept" in sys.argv else embedded(slots=4)
    launch = vllm(python=Path(sys.argv[5]), slots=4) if "vllm" in sys.argv else launch
    engine = await EngineSupervisor(launch, folder, 0, log=log, roles=roles).__aenter__()
    print(engine.pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""


def left_by_a_killed_process(directory: Path, tmp_path: Path, *words: str) -> int:
    argv = [sys.executable, "-c", LEAVE, str(directory), str(tmp_path / "engine.log"), str(tmp_path / "roles"), *words]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -9
    return int(done.stdout)


async def test_an_engine_outlives_who_started_it_and_is_adopted_with_newer_weights(
    directory: Path, tmp_path: Path
) -> None:
    pid = await asyncio.to_thread(left_by_a_killed_process, directory, tmp_path)
    publish(directory, 1)
    log, roles = tmp_path / "engine.log", tmp_path / "roles"
    async with EngineSupervisor(embedded(slots=4), directory, 1, log=log, roles=roles) as engine:
        assert (engine.adopted, engine.pid) == (True, pid)
        assert {span.version for span in (await engine.generate([5], SHORT)).spans} == {1}
        os.kill(pid, 9)
        assert (await engine.generate([5], SHORT)).token_ids and engine.pid != pid and engine.restarts == 1
    assert adopted.hold(adopted.read(roles, "engine")) is None  # it ended with who used it last


def session_of(leader: int) -> list[int]:
    """The processes that were started by it, or by what it started, and have not gone away on purpose."""
    result = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                result.append(int(path.parent.name))
    return result


async def gone(leader: int) -> None:
    async with asyncio.timeout(120):
        while session_of(leader):  # noqa: ASYNC110 - other processes end
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", ["kept", pytest.param("vllm", marks=NO_VLLM)])
async def test_a_server_that_cannot_end_by_itself_is_kept_for_who_comes_next(
    directory: Path, tmp_path: Path, kind: str
) -> None:
    """The server of the one kind is a stand-in, of the other a real vLLM with a process of its own for its engine."""
    pid = await asyncio.to_thread(left_by_a_killed_process, directory, tmp_path, kind, str(VLLM))
    launch = dataclasses.replace(embedded(slots=4), leaves=False, retained=True)
    launch = vllm(python=VLLM, slots=4) if kind == "vllm" else launch
    log, roles = tmp_path / "engine.log", tmp_path / "roles"
    assert not keep.used(roles / "engine.used")
    async with EngineSupervisor(launch, directory, 0, log=log, roles=roles) as engine:
        assert (engine.adopted, engine.pid) == (True, pid) and keep.used(roles / "engine.used")
        assert (await engine.generate([5], SHORT)).token_ids
        stopped = [item for item in session_of(pid) if item != pid]
        assert len(stopped) >= (2 if kind == "vllm" else 1)
        for item in stopped:
            os.kill(item, signal.SIGSTOP)  # it hangs, and hears of nobody's death
        os.kill(pid, 9)  # who keeps the server: the server goes as well
        await gone(pid)
        assert (await engine.generate([5], SHORT)).token_ids and engine.restarts == 1
        last = engine.pid
    assert last is not None
    await gone(last)
    assert adopted.hold(adopted.read(roles, "engine")) is None


SLEEPER = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


def test_what_is_kept_ends_when_nobody_uses_it_with_all_that_it_started(tmp_path: Path) -> None:
    lock = tmp_path / "used"
    argv = keep.command([sys.executable, "-c", SLEEPER], lock, 0.5)
    with keep.use(lock):
        keeper = Program(argv, stdout=subprocess.PIPE, start_new_session=True)
        assert keeper.stdout is not None
        child = os.pidfd_open(int(keeper.stdout.readline()))
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(3)
    assert keeper.wait(60) == 128 + 15
    keeper.stdout.close()
    ended, _, _ = select.select([child], [], [], 120)
    os.close(child)
    assert ended


async def test_nothing_is_adopted_by_a_number_alone(directory: Path, tmp_path: Path) -> None:
    """The pid that was written down belongs to somebody else by now."""
    other = await asyncio.create_subprocess_exec("sleep", "600")
    roles = tmp_path / "roles"
    try:
        adopted.write(
            roles, adopted.RoleRecord(name="engine", pid=other.pid, started=1, at=0.0, url="http://127.0.0.1:1")
        )
        async with EngineSupervisor(embedded(slots=4), directory, 0, log=tmp_path / "e.log", roles=roles) as engine:
            assert not engine.adopted and engine.pid != other.pid
            assert adopted.read(roles, "engine").generation == 2
        assert other.returncode is None
    finally:
        other.kill()
        await other.wait()


async def test_a_spare_serves_after_a_death_and_goes_with_who_made_it(directory: Path, tmp_path: Path) -> None:
    """Its code is loaded before it is needed: it becomes the server that the dead one was."""
    launch = embedded(slots=4)
    standby = Standby(launch, tmp_path / "engine.log")
    assert await standby.take(launch.command(directory, 1)) is None  # there is none yet
    await standby.prepare()
    first = standby._process
    await standby.prepare()
    assert first is not None and standby._process is first
    await standby.close()
    assert first.returncode is not None
    await standby.close()
    roles = tmp_path / "roles"
    async with EngineSupervisor(launch, directory, 0, log=tmp_path / "engine.log", roles=roles) as engine:
        async with asyncio.timeout(120):
            while (waiting := engine._standby._process) is None:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.05)
        before = (await engine.generate([5], SHORT)).token_ids
        assert engine.pid is not None and before
        os.kill(engine.pid, 9)
        assert (await engine.generate([5], SHORT)).spans[0].version == 0
        assert engine.pid == waiting.pid and engine.restarts == 1
    noted = [item.stage for item in stages.read(roles) if item.pid == waiting.pid]
    assert noted == [stages.BEGUN, stages.READY]


def test_a_spare_that_nobody_needs_any_more_ends_by_itself(tmp_path: Path) -> None:
    program = embedded().standby
    assert program is not None
    with Program(program.argv, env={**os.environ, **program.env}, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
