"""A real vLLM beside users: rollouts get what they leave, its room is told, users' need of it ends rollouts."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio

from bench.harness.rated_engines import RatedServer
from coordinator.simulate.engines import StepCosts
from rollout import step_log
from rollout.decide.engines import colocation, headroom
from rollout.decide.engines.headroom import Budget
from rollout.engine.client import EngineClient, Sampling
from rollout.engine.launch import VLLM_PYTHON, Launch, LaunchCommand, colocated, vllm
from rollout.engine.patches import INSIDE
from rollout.engine.supervisor import EngineSupervisor
from rollout.pool.member import ColocatedEngine
from rollout.pool.pool import EnginePool
from sandbox.paths import CHECKOUT
from tests.support.rollout_engines import expected_logprobs

PYTHON = Path(os.environ.get("PAGURUS_TEST_VLLM", VLLM_PYTHON))
NO_VLLM = pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed ({PYTHON}); run `make setup-vllm`")
MODEL = CHECKOUT / "examples" / "frozen_lake" / "start"
SLOTS, BLOCKS = 16, 40  # of 128 tokens each
NOTHING = Budget(ttft=1e-6, tpot=1e-6)  # no step is so short: beside users, rollouts never fit
pytestmark = pytest.mark.asyncio(loop_scope="module")


def with_blocks(launch: Launch) -> Launch:
    def command(directory: Path, port: int) -> LaunchCommand:
        plain = launch.command(directory, port)
        return replace(plain, argv=[*plain.argv, "--block-size", "128", "--num-gpu-blocks-override", str(BLOCKS)])

    return replace(launch, command=command)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    pytest.importorskip("torch", reason="torch is not installed")
    launch = colocated(with_blocks(vllm(python=PYTHON, slots=SLOTS)), NOTHING)
    async with EngineSupervisor(
        launch, MODEL, 0, log=tmp_path_factory.mktemp("colocated") / "engine.log"
    ) as supervisor:
        yield await supervisor.wait_serving()


async def test_a_server_is_told_what_users_were_promised(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    command = colocated(vllm(python=tmp_path / "python"), Budget(ttft=0.5, tpot=0.05)).command(tmp_path, 1)
    assert "pagurus_colocation.ColocationScheduler" in command.argv and "--no-async-scheduling" in command.argv
    assert '{"pagurus_colocation":{"ttft":0.5,"tpot":0.05,"margin":0.1}}' in command.argv
    assert command.env["PYTHONPATH"].split(os.pathsep)[0] == str(INSIDE)


@pytest.mark.parametrize("module", [headroom, colocation, step_log])
async def test_what_decides_inside_vllm_needs_nothing_that_it_has_not(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    target = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    target |= {item.name for node in ast.walk(tree) if isinstance(node, ast.Import) for item in node.names}
    others = {item for item in target if item.split(".")[0] not in sys.stdlib_module_names}
    assert others <= {"msgspec", "rollout.decide.engines.headroom", "rollout.decide.engines.colocation"}


class Streamed:
    """An answer as it comes."""

    def __init__(self, engine: EngineClient, name: str, *, priority: int, tokens: int, prompt: list[int]):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.prompt, self.begun, self.finish = prompt, asyncio.Event(), ""
        self.done = asyncio.create_task(self._read(engine, name, priority, tokens))

    async def _read(self, engine: EngineClient, name: str, priority: int, tokens: int) -> None:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        async for delta in engine.stream(self.prompt, sampling, request_id=name, priority=priority):
            self.tokens += delta.token_ids
            self.logprobs += delta.logprobs
            self.finish = delta.finish_reason or self.finish
            if self.tokens:
                self.begun.set()


async def alongside(engine: EngineClient, priority: int) -> tuple[list[Streamed], int]:
    """Two long answers, and how many tokens they got while a user got 300."""
    name = f"beside-{priority}"
    others = [
        Streamed(engine, f"{name}-{n}", priority=priority, tokens=980, prompt=[5 + n] * 30 + [9]) for n in range(2)
    ]
    for item in others:
        await item.begun.wait()
    user = Streamed(engine, f"{name}-user", priority=0, tokens=300, prompt=[40, priority] * 15)
    await user.begun.wait()
    before = sum(len(item.tokens) for item in others)
    await user.done
    got = sum(len(item.tokens) for item in others) - before
    assert priority == 0 or all(not item.finish for item in others)  # else nothing was seen
    await asyncio.gather(*(item.done for item in others))
    return others, got


@NO_VLLM
async def test_rollouts_wait_while_they_would_make_users_late_and_go_on_after_them(engine: EngineClient) -> None:
    rollouts, got = await alongside(engine, 1)
    assert got <= 60  # tokens of before the user's first one, that are read after it where the machine is busy
    for item in rollouts:
        assert (len(item.tokens), item.finish) == (980, "length")
        assert item.logprobs == pytest.approx(expected_logprobs(MODEL, item.prompt, item.tokens), abs=1e-3)
    one_queue, got = await alongside(engine, 0)
    assert got >= 200
    assert [len(item.tokens) for item in one_queue] == [980, 980]


@NO_VLLM
@pytest.mark.parametrize(("users", "prompt"), [(SLOTS, 9), (6, 900)], ids=["slots", "blocks"])
async def test_users_who_need_all_of_it_take_it_from_rollouts_until_the_next_version(
    engine: EngineClient, users: int, prompt: int
) -> None:
    version = await engine.version()
    assert (await engine.statistics()).colocates == SLOTS // 2
    rollouts = [Streamed(engine, f"r-{users}-{n}", priority=1, tokens=900, prompt=[5 + n] * 9) for n in range(2)]
    for item in rollouts:
        await item.begun.wait()
    request = Sampling(max_tokens=20, ignore_eos=True)
    answers = await asyncio.gather(*(engine.generate([15 + n] * prompt, request) for n in range(users)))
    assert [len(item.token_ids) for item in answers] == [20] * users
    for item in rollouts:
        await item.done
        assert item.finish == "abort" and len(item.tokens) < 900
    refused = await engine.generate([7] * 9, request, request_id=f"refused-{users}", priority=1)
    assert (refused.finish_reason, refused.token_ids) == ("abort", [])
    assert (await engine.statistics()).colocates == 0
    await engine.set_version(version + 1)
    again = await engine.generate([7] * 9, request, request_id=f"again-{users}", priority=1)
    assert (again.finish_reason, len(again.token_ids)) == ("length", 20)


@NO_VLLM
async def test_a_pool_asks_it_for_room_and_takes_rollouts_elsewhere_that_it_ends(engine: EngineClient) -> None:
    server, begun = ColocatedEngine(engine.url), dict[tuple[int, ...], tuple[float, str, str]]()
    async with EnginePool() as pool:
        await pool.join("colocated", server, colocated=True)
        assert server.slots == SLOTS // 2
        request = Sampling(max_tokens=900, ignore_eos=True)
        rollouts = [asyncio.create_task(pool.generate([5 + n] * 9, request)) for n in range(2)]
        while (await engine.statistics()).running < 2:  # noqa: ASYNC110 - another process, which tells nobody
            await asyncio.sleep(0.01)
        await pool.join("own", RatedServer(StepCosts(base=0.001), "", begun))
        users = (engine.generate([15 + n] * 9, Sampling(max_tokens=60, ignore_eos=True)) for n in range(SLOTS))
        assert [len(item.token_ids) for item in await asyncio.gather(*users)] == [60] * SLOTS
        assert [len(item.token_ids) for item in await asyncio.gather(*rollouts)] == [900] * 2
        assert pool.counts["moved"] == 2 and len(begun) == 2
        while server.slots:  # noqa: ASYNC110 - it is looked at now and then
            await asyncio.sleep(0.05)
        await engine.set_version(await engine.version() + 1)
        while not server.slots:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
    await server.close()
