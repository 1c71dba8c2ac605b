"""Engines on machines of their own: found, given versions, started elsewhere; who lacks the run's key gets nothing."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from coordinator.jobs.parts import make_key
from rollout.config import RolloutConfig
from rollout.decide.engines.routing import RoutingRules
from rollout.engine import tls
from rollout.engine.client import Sampling
from rollout.engine.launch import reachable, vllm
from rollout.plan import PoolPlan, RolloutPlan
from rollout.pool.pool import EnginePool
from rollout.service import accepted
from rollout.service.engines import serving
from rollout.service.placed import ADDRESS, directory_of
from rollout.service.protocol import PublishedVersion
from rollout.weights.store import VersionStore
from sandbox.paths import CHECKOUT
from tests.rollout.weights.test_engine import Policy
from tests.support.programs import Program

PLAN = RolloutPlan(task="nothing", config=RolloutConfig(), pool=PoolPlan(engines=2, slots=4), nice=0)
HERE = "127.0.0.1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode({"rollout": PLAN}))
    make_key(tmp_path)
    return tmp_path


class Machines:
    """Keepers, as the supervisors of a job's parts start them."""

    def __init__(self, run: Path):
        self.run = run
        self.keepers: dict[int, Program] = {}

    def begin(self, number: int) -> None:
        argv = [sys.executable, "-m", "rollout.service.keeper", str(self.run), str(number), "--at", HERE]
        with (self.run / "keeper.log").open("ab") as out:
            self.keepers[number] = Program(argv, cwd=CHECKOUT, stdout=out, stderr=out)

    def end(self) -> None:
        for keeper in self.keepers.values():
            keeper.terminate()
        for keeper in self.keepers.values():
            keeper.end()


@pytest.fixture
def machines(run: Path) -> Iterator[Machines]:
    made = Machines(run)
    yield made
    made.end()


def published(run: Path, policy: Policy, version: int) -> PublishedVersion:
    policy.publish(version)
    ref = PublishedVersion(version=version, directory=str(run / "weights"), digest="")
    accepted.write(run / "rollout", ref)
    return ref


@asynccontextmanager
async def pool_of(run: Path, ref: PublishedVersion) -> AsyncIterator[EnginePool]:
    async with serving(PLAN, run, placed=True)(ref) as pool:
        assert isinstance(pool, EnginePool)
        yield pool


async def all_serve(pool: EnginePool, version: int) -> None:
    async with asyncio.timeout(120):
        while {(item.state, item.version) for item in pool.members.values()} != {("serving", version)}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def spans(pool: EnginePool) -> set[int]:
    """Versions that four answers at once come from."""
    requested = (pool.generate([5, 6, 7 + n], Sampling(max_tokens=6, ignore_eos=True)) for n in range(4))
    return {span.version for answer in await asyncio.gather(*requested) for span in answer.spans}


async def test_a_run_goes_on_with_engines_that_are_started_elsewhere(run: Path, machines: Machines) -> None:
    policy = Policy(VersionStore(run / "weights"))
    ref = published(run, policy, 0)
    machines.begin(0)
    async with pool_of(run, ref) as pool:  # the second one has no machine yet
        assert await spans(pool) == {0}
        machines.begin(1)
        await all_serve(pool, 0)
        ref = published(run, policy, 1)
        await pool.publish(ref.directory, 1)
        assert await spans(pool) == {1}

        machines.keepers[0].destroy()
        engine = msgspec.json.decode((directory_of(run, 0) / "engine.json").read_bytes())
        os.kill(engine["pid"], 9)  # the whole machine
        assert await spans(pool) == {1}  # the other one goes on
        machines.begin(0)
        ref = published(run, policy, 2)
        await pool.publish(ref.directory, 2)
        await all_serve(pool, 2)
        assert await spans(pool) == {2}

        pool.members["engine-1"].server.kill()  # it hangs: its keeper ends it and starts another
        await asyncio.sleep(0)
        assert await spans(pool) == {2}
        await all_serve(pool, 2)


async def test_who_lacks_the_key_gets_nothing(
    run: Path, machines: Machines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ref = published(run, Policy(VersionStore(run / "weights")), 0)
    machines.begin(0)
    other = tmp_path_factory.mktemp("other")
    make_key(other)
    anonymous = ssl.create_default_context(cafile=tls.directory_of(run) / tls.CERTIFICATE)
    anonymous.check_hostname = False
    stranger = ssl.create_default_context(cafile=tls.directory_of(run) / tls.CERTIFICATE)
    stranger.check_hostname = False
    stranger.load_cert_chain(tls.directory_of(other) / tls.CERTIFICATE, tls.directory_of(other) / tls.KEY)
    async with pool_of(run, ref) as pool, aiohttp.ClientSession() as session:
        client = await pool.members["engine-0"].server.wait_serving()
        keeper = (directory_of(run, 0) / ADDRESS).read_text()
        for url in (f"{client.url}/health", f"{keeper}/end"):
            for context in (anonymous, stranger):
                with pytest.raises(aiohttp.ClientError):
                    async with session.post(url, ssl=context) as answer:
                        await answer.read()
        async with session.get(f"{client.url}/health", ssl=tls.calling(tls.directory_of(run))) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):  # nor is one believed that has another key
            async with session.get(f"{client.url}/health", ssl=tls.calling(tls.directory_of(other))) as answer:
                await answer.read()


def test_vllm_is_told_to_ask_for_the_key(tmp_path: Path) -> None:
    launch = reachable(vllm(python=Path(sys.executable)), "10.0.0.1", tmp_path)
    argv = launch.command(tmp_path, 8000).argv
    assert argv[argv.index("--ssl-cert-reqs") + 1] == str(int(ssl.CERT_REQUIRED))
    assert argv[-argv[::-1].index("--host")] == "10.0.0.1" and launch.url(8000) == "https://10.0.0.1:8000"


def test_a_run_says_when_a_trajectory_leaves_its_server() -> None:
    assert PoolPlan(headroom=16).rules == RoutingRules(headroom=16)
    assert PoolPlan().rules == RoutingRules()
