"""A pool over real engine servers: failover, hung servers, rolling weights, draining, cancellation."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from rollout.decide.engines.routing import RouteView, RoutingRules, Send, route
from rollout.engine.client import Delta, Generation, PublishResult, Sampling, WeightSpan
from rollout.engine.launch import embedded
from rollout.engine.supervisor import EngineSupervisor
from rollout.pool.pool import EnginePool
from sandbox.errors import Conflict, EngineFailed, Invalid, NotFound
from tests.support.rollout_engines import expected_logprobs, publish

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = 1024
LONG = Sampling(max_tokens=700, ignore_eos=True, seed=1)
RULES = RoutingRules(silence=5.0, update=120.0)  # a busy machine may keep a server silent for a while


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("weights")
    return [publish(root / "weights", version) for version in range(3)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(
    directories: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, EngineSupervisor]]:
    log = tmp_path_factory.mktemp("engines")
    async with AsyncExitStack() as stack:
        launch = embedded(slots=16, length=LENGTH)
        result = {
            name: await stack.enter_async_context(
                EngineSupervisor(launch, directories[0].parent / "weights", 0, log=log / f"{name}.log")
            )
            for name in "ab"
        }
        yield result


@pytest_asyncio.fixture(loop_scope="module")
async def pool(servers: dict[str, EngineSupervisor], directories: list[Path]) -> AsyncIterator[EnginePool]:
    """Both servers, on version 0."""
    async with EnginePool(rules=RULES) as made:
        for name, server in servers.items():
            await made.join(name, server)
        await made.publish(directories[0].parent / "weights", 0)
        yield made


def check(directories: list[Path], prompt: list[int], generation: Generation) -> None:
    """Each span's log-probabilities are those of its version's weights."""
    assert [span.start for span in generation.spans] == [0, *(span.end for span in generation.spans)][:-1]
    assert generation.spans[-1].end == len(generation.token_ids) == len(generation.logprobs)
    for span in generation.spans:
        expected = expected_logprobs(directories[span.version], prompt, generation.token_ids)
        assert generation.logprobs[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=1e-3)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 - it is a state of another process
            await asyncio.sleep(0.01)


async def under_way(pool: EnginePool, count: int, name: str | None = None) -> None:
    """Until that many requests are with the servers, and one of `name` has given a token."""
    await until(lambda: sum(member.load for member in pool.members.values()) >= count)
    await until(lambda: name is None or pool.members[name].last_seen > 0)


async def test_both_servers_work_and_say_the_same(pool: EnginePool, directories: list[Path]) -> None:
    prompts = [[3 + (n * k) % 120 for k in range(1, 9)] for n in range(24)]
    sampling = Sampling(max_tokens=9, ignore_eos=True)
    answers = await asyncio.gather(*(pool.generate(prompt, sampling) for prompt in prompts))
    for prompt, answer in list(zip(prompts, answers, strict=True))[::7]:
        check(directories, prompt, answer)
    assert pool.counts["routed_least"] == 24 and not pool.counts["moved"]


async def test_a_stream_is_the_same_answer_in_pieces(pool: EnginePool) -> None:
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    complete = await pool.generate([7, 8, 9], sampling)
    pieces = [delta async for delta in pool.stream([7, 8, 9], sampling)]
    assert [token for delta in pieces for token in delta.token_ids] == complete.token_ids
    assert len(pieces) > 1 and pieces[-1].finish_reason == "length" and pieces[-1].spans == complete.spans


async def test_a_turn_goes_where_its_prefix_is(pool: EnginePool) -> None:
    prompt = [3 + k % 120 for k in range(80)]
    first = await pool.generate(prompt, Sampling(max_tokens=8, ignore_eos=True))
    before = pool.counts["routed_prefix"]
    for _ in range(4):
        await pool.generate(prompt + first.token_ids + [5], Sampling(max_tokens=2, ignore_eos=True))
    assert pool.counts["routed_prefix"] == before + 4
    assert pool.statistics()["prefix_hit_share"] == 1.0


async def test_a_killed_server_s_requests_go_on_elsewhere(
    pool: EnginePool, servers: dict[str, EngineSupervisor], directories: list[Path]
) -> None:
    prompts = [[40 + n, 41, 42] for n in range(8)]
    flights = [asyncio.create_task(pool.generate(prompt, LONG)) for prompt in prompts]
    await under_way(pool, 8, "a")
    pid = servers["a"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for prompt, generation in zip(prompts, await asyncio.gather(*flights), strict=True):
        assert len(generation.token_ids) == LONG.max_tokens
        check(directories, prompt, generation)
    assert pool.counts["moved"] >= 1 and pool.counts["moved_tokens"] > 0


async def test_a_server_that_hangs_is_given_up_and_comes_back(
    pool: EnginePool, servers: dict[str, EngineSupervisor], directories: list[Path]
) -> None:
    prompts = [[50 + n, 51, 52] for n in range(8)]
    flights = [asyncio.create_task(pool.generate(prompt, LONG)) for prompt in prompts]
    await under_way(pool, 8, "b")
    pid = servers["b"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # alive for the kernel, silent for ever
    for prompt, generation in zip(prompts, await asyncio.gather(*flights), strict=True):
        assert len(generation.token_ids) == LONG.max_tokens
        check(directories, prompt, generation)
    assert pool.counts["hung"] == 1
    await until(lambda: pool.members["b"].state == "serving")
    assert servers["b"].pid != pid


async def test_an_idle_server_that_hangs_is_noticed(pool: EnginePool, servers: dict[str, EngineSupervisor]) -> None:
    pid = servers["a"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: pool.counts["hung"] == 1)
    await until(lambda: pool.members["a"].state == "serving")


async def test_weights_roll_over_the_servers_while_requests_go_on(pool: EnginePool, directories: list[Path]) -> None:
    states: list[tuple[str, ...]] = []
    done = asyncio.Event()

    async def keep_asking(first: int) -> list[tuple[list[int], Generation]]:
        prompt, result = [60 + first, 61], []
        while not done.is_set():
            result.append((prompt, await pool.generate(prompt, Sampling(max_tokens=900, ignore_eos=True, seed=first))))
        return result

    async def poll() -> None:
        while not done.is_set():
            states.append(tuple(member.state for member in pool.members.values()))
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(poll())
    flights = [asyncio.create_task(keep_asking(n)) for n in range(6)]
    await under_way(pool, 6)
    for version in (1, 2, 1):
        published = await pool.publish(directories[0].parent / "weights", version)
        assert published.version == version
    done.set()
    await watching
    answers = [item for result in await asyncio.gather(*flights) for item in result]
    for prompt, generation in answers[:: max(1, len(answers) // 12)]:
        check(directories, prompt, generation)
    assert any(len(generation.spans) > 1 for _, generation in answers), "no request was in flight at a change"
    assert ("updating", "updating") not in states and any("updating" in item for item in states)
    assert (await pool.generate([3], Sampling(max_tokens=1))).spans[0].version == 1


async def test_a_server_that_hangs_keeps_no_other_from_its_weights(
    pool: EnginePool, servers: dict[str, EngineSupervisor], directories: list[Path]
) -> None:
    pid = servers["a"].pid  # the first in turn
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await pool.publish(directories[0].parent / "weights", 1)
    assert pool.counts["hung"] == 1
    assert (await pool.generate([74], Sampling(max_tokens=1))).spans[0].version == 1
    await until(lambda: pool.members["a"].state == "serving")
    assert pool.members["a"].version == 1 and servers["a"].pid != pid


async def test_a_server_that_was_down_takes_the_version_before_it_serves(
    pool: EnginePool, servers: dict[str, EngineSupervisor], directories: list[Path]
) -> None:
    pid = servers["a"].pid
    assert pid is not None
    flight = asyncio.create_task(pool.generate([70, 71], LONG))
    os.kill(pid, signal.SIGKILL)
    await flight
    await pool.publish(directories[0].parent / "weights", 2)
    await until(lambda: pool.members["a"].state == "serving")
    for _ in range(8):
        generation = await pool.generate([72, 73], Sampling(max_tokens=3, ignore_eos=True))
        assert [span.version for span in generation.spans] == [2]


async def test_draining_finishes_what_there_is_and_takes_nothing_new(
    pool: EnginePool, servers: dict[str, EngineSupervisor]
) -> None:
    flights = [asyncio.create_task(pool.generate([80 + n], LONG)) for n in range(4)]
    await under_way(pool, 4)
    drained = asyncio.create_task(pool.drain("a"))
    await asyncio.sleep(0)
    later = await pool.generate([90], Sampling(max_tokens=2, ignore_eos=True))
    assert len(later.token_ids) == 2
    assert await drained is servers["a"] and list(pool.members) == ["b"]
    assert all(len(generation.token_ids) == LONG.max_tokens for generation in await asyncio.gather(*flights))
    with pytest.raises(NotFound):
        await pool.drain("a")
    with pytest.raises(Conflict):
        await pool.join("b", servers["b"])
    await pool.join("a", servers["a"])


async def test_servers_rest_until_the_next_version_and_their_requests_go_on(
    pool: EnginePool, servers: dict[str, EngineSupervisor], directories: list[Path]
) -> None:
    flights = [asyncio.create_task(pool.generate([20 + n], LONG)) for n in range(8)]
    await under_way(pool, 8, "b")
    fleet = pool.fleet()
    assert (fleet.engines, fleet.slots, fleet.rested) == (2, 16, False)
    there = pool.members["b"].load
    pool.rest(1)
    assert there and pool.fleet().rested and pool.fleet().engines == 1
    later = await pool.generate([30], Sampling(max_tokens=2, ignore_eos=True))
    assert len(later.token_ids) == 2
    resting = await servers["b"].wait_serving()
    await until(lambda: pool.members["b"].asleep is not None and pool.members["b"].asleep.done())
    assert await resting.is_paused() and (await resting.statistics()).running == 0
    for n, item in enumerate(await asyncio.gather(*flights)):
        assert len(item.token_ids) == LONG.max_tokens and {span.version for span in item.spans} == {0}
        if n % 4 == 0:
            check(directories, [20 + n], item)
    assert pool.counts["moved"] == there and pool.counts["rested"] == 1 and not pool.counts["lost"]
    await pool.publish(directories[1].parent / "weights", 1)
    assert not await resting.is_paused() and not pool.fleet().rested
    assert {name: (item.state, item.version) for name, item in pool.members.items()} == {
        "a": ("serving", 1), "b": ("serving", 1),
    }  # fmt: skip
    answers = await asyncio.gather(*(pool.generate([40 + n], Sampling(max_tokens=4)) for n in range(8)))
    assert {span.version for item in answers for span in item.spans} == {1}


async def test_each_change_of_a_server_is_noted(servers: dict[str, EngineSupervisor], directories: list[Path]) -> None:
    noted: list[tuple[str, str, int, int]] = []
    async with EnginePool(rules=RULES, note=lambda *item: noted.append(item)) as pool:
        for name, server in servers.items():
            await pool.join(name, server)
        await pool.publish(directories[0].parent / "weights", 0)
        del noted[:]
        await asyncio.gather(*(pool.generate([20 + n], Sampling(max_tokens=4, ignore_eos=True)) for n in range(8)))
        assert {(name, state, slots) for name, state, _, slots in noted} == {(name, "serving", 16) for name in "ab"}
        for name in "ab":
            loads = [load for item, _, load, _ in noted if item == name]
            assert loads[-1] == 0 and [abs(one - other) for one, other in itertools.pairwise([0, *loads])] == [1] * 8
        del noted[:]
        pool.rest(1)
        await until(lambda: pool.members["b"].asleep is not None and pool.members["b"].asleep.done())
        await pool.publish(directories[1].parent / "weights", 1)
        states = [[state for item, state, _, _ in noted if item == name] for name in "ab"]
    assert states == [["updating", "serving"], ["down", "resting", "starting", "updating", "serving"]]


@pytest.mark.parametrize("victim", ["a", "b"])
async def test_whoever_dies_while_others_rest_costs_time_alone(
    victim: str, pool: EnginePool, servers: dict[str, EngineSupervisor], directories: list[Path]
) -> None:
    """The one that goes on, or the one that rests."""
    flights = [asyncio.create_task(pool.generate([50 + n], LONG)) for n in range(6)]
    await under_way(pool, 6, "b")
    pool.rest(1)
    before = servers[victim].restarts
    os.kill(servers[victim].pid or 0, signal.SIGKILL)
    answers = await asyncio.gather(*flights)
    assert all(len(item.token_ids) == LONG.max_tokens for item in answers)
    await pool.publish(directories[1].parent / "weights", 1)
    assert servers[victim].restarts == before + 1
    await until(lambda: {(item.state, item.version) for item in pool.members.values()} == {("serving", 1)})


async def test_who_goes_away_takes_the_request_along_at_once(
    pool: EnginePool, servers: dict[str, EngineSupervisor]
) -> None:
    async with aclosing(pool.stream([95], LONG)) as deltas:
        async for _ in deltas:
            break
    async with asyncio.timeout(120):
        while True:
            running = [(await (await server.wait_serving()).statistics()).running for server in servers.values()]
            if running == [0, 0]:
                break
            await asyncio.sleep(0.02)
    assert sum(member.load for member in pool.members.values()) == 0


async def test_full_servers_hold_requests_back_and_the_urgent_go_first(servers: dict[str, EngineSupervisor]) -> None:
    observed: list[tuple[RouteView, list[Send]]] = []
    ended: list[str] = []

    async def request(pool: EnginePool, name: str, priority: int, tokens: int = 12) -> None:
        await pool.generate([100, 101], Sampling(max_tokens=tokens, ignore_eos=True), priority=priority)
        ended.append(name)

    class One(EngineSupervisor):
        """The same server with a single slot."""

        slots = 1  # type: ignore[assignment]

        def __init__(self, server: EngineSupervisor):
            self.__dict__ = server.__dict__

    async with EnginePool(rules=RULES, report=lambda view, sends: observed.append((view, sends))) as pool:
        await pool.join("a", One(servers["a"]))
        flights = [asyncio.create_task(request(pool, "first", 0, tokens=300))]  # not over before all have come
        await under_way(pool, 1)
        flights += [asyncio.create_task(request(pool, f"later {n}", 0)) for n in range(3)]
        await asyncio.sleep(0)
        flights.append(asyncio.create_task(request(pool, "urgent", -1)))
        await asyncio.sleep(0)
        assert pool.statistics()["waiting"] == 4
        await asyncio.gather(*flights)
    assert ended == ["first", "urgent", "later 0", "later 1", "later 2"]
    assert all(route(view, RULES) == sends for view, sends in observed)


async def test_nonsense_is_refused_and_no_server_is_blamed(pool: EnginePool) -> None:
    with pytest.raises(Invalid):
        await pool.generate([5] * LENGTH, Sampling())
    assert not pool.counts["lost"] and all(member.state == "serving" for member in pool.members.values())


class Saying:
    """A server that says as many tokens as a test lets it. Its last piece alone tells versions, as vLLM's.

    The log-probability of a token is minus the version that sampled it.
    """

    slots = 8

    def __init__(self) -> None:
        self.sampled_by, self.requests = 0, 0  # version; how often the pool waited for a piece
        self.pieces: asyncio.Queue[int | None] = asyncio.Queue()  # tokens; None: it breaks

    async def wait_serving(self) -> Saying:
        return self

    async def version(self) -> int:
        return self.sampled_by

    async def healthy(self) -> bool:
        return True

    async def fetch(self, version: int) -> None: ...

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        if weights == "nowhere":
            raise NotFound("there are no such weights")
        self.sampled_by = version
        return PublishResult(version=version, seconds=0.0, paused_s=0.0)

    async def abort(self, request_ids: list[str]) -> None: ...

    def kill(self) -> None: ...

    async def say(self, count: int | None) -> None:
        """Until the pool has heard it."""
        requests = self.requests
        self.pieces.put_nowait(count)
        await until(lambda: self.requests > requests)

    async def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        by: list[int] = []
        while len(by) < sampling.max_tokens:
            self.requests += 1
            count = await self.pieces.get()
            if count is None:
                raise EngineFailed("it broke")
            by += [self.sampled_by] * count
            last = len(by) == sampling.max_tokens
            spans = [WeightSpan(item, by.index(item), len(by) - by[::-1].index(item)) for item in sorted(set(by))]
            yield Delta(
                token_ids=[9] * count,
                logprobs=[-float(self.sampled_by)] * count,
                spans=spans if last else None,
                finish_reason="length" if last else None,
            )


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize("enough", [None, 6])
async def test_a_token_whose_version_nobody_told_is_sampled_again(breaks: bool, enough: int | None) -> None:
    """A server takes weights in the middle of an answer, goes on with it, and is lost before its last piece."""
    server, last_seen = Saying(), list[Delta]()

    async def request(pool: EnginePool) -> None:
        target = None if enough is None else lambda ids: enough if len(ids) >= enough else None
        async for delta in pool.stream([3], Sampling(max_tokens=9, ignore_eos=True), enough=target):
            last_seen.append(delta)

    async with EnginePool(rules=RULES) as pool:
        await pool.join("a", server)  # type: ignore[arg-type]
        asking = asyncio.create_task(request(pool))
        await until(lambda: server.requests == 1)
        await server.say(3)
        await pool.publish("versions", 1)
        await server.say(4)
        assert sum(len(delta.token_ids) for delta in last_seen) == 3, "nobody is told what may be taken back"
        if breaks:
            await server.say(None)
            await server.say(4)
        server.pieces.put_nowait(2)
        await asking
        assert pool.counts["dropped_tokens"] == ((enough or 7) - 3 if breaks else 0)
    complete = enough or 9
    logprobs = [logprob for delta in last_seen for logprob in delta.logprobs]
    assert last_seen[-1].spans == [WeightSpan(0, 0, 3), WeightSpan(1, 3, complete)]
    assert logprobs == [-0.0] * 3 + [-1.0] * (complete - 3)


async def test_weights_that_cannot_be_had_take_no_server_away() -> None:
    server = Saying()
    async with EnginePool(rules=RULES) as pool:
        await pool.join("a", server)  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            await pool.publish("nowhere", 1)
        server.pieces.put_nowait(2)
        generation = await pool.generate([3], Sampling(max_tokens=2))
    assert [span.version for span in generation.spans] == [0] and not pool.members["a"].restarts
