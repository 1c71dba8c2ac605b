"""The contract of an engine server, held by the embedded engine, over rows and over pages, and by a real vLLM alike."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from rollout.engine.client import EngineClient, Generation, Sampling
from rollout.engine.launch import VLLM_PYTHON, embedded, vllm
from rollout.engine.supervisor import EngineSupervisor
from rollout.weights.store import VersionStore
from sandbox.errors import EngineFailed, Invalid, NotFound
from tests.support.rollout_engines import EOS, VOCABULARY, every_logprob, expected_logprobs, publish

pytest.importorskip("torch", reason="torch is not installed")

PYTHON = Path(os.environ.get("PAGURUS_TEST_VLLM", VLLM_PYTHON))
NO_VLLM = pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed ({PYTHON}); run `make setup-vllm`")
LENGTH = 1024  # of the longest sequence
LONG = Sampling(max_tokens=900, ignore_eos=True, seed=1)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("weights")
    return [publish(root / "weights", version) for version in range(3)]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["embedded", "paged", pytest.param("vllm", marks=NO_VLLM)]
)
async def supervisor(
    request: pytest.FixtureRequest, directories: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineSupervisor]:
    kind = {"embedded": embedded, "paged": partial(embedded, paged=True), "vllm": partial(vllm, python=PYTHON)}[
        request.param
    ]
    launch = kind(slots=16, length=LENGTH)
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    async with EngineSupervisor(launch, directories[0].parent / "weights", 0, log=log) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(supervisor: EngineSupervisor, directories: list[Path]) -> EngineClient:
    """The client of an engine that serves version 0 and is not paused."""
    client = await supervisor.wait_serving()
    await client.resume()
    if await client.version() != 0:
        await supervisor.publish(directories[0].parent / "weights", 0)
    return await supervisor.wait_serving()


async def test_tokens_in_tokens_out(engine: EngineClient, directories: list[Path]) -> None:
    prompt = [5, 6, 7, 8]
    generation = await engine.generate(prompt, Sampling(max_tokens=12, ignore_eos=True))
    assert len(generation.token_ids) == len(generation.logprobs) == 12
    assert generation.finish_reason == "length"
    assert [(span.version, span.start, span.end) for span in generation.spans] == [(0, 0, 12)]
    assert generation.logprobs == pytest.approx(
        expected_logprobs(directories[0], prompt, generation.token_ids), abs=1e-3
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
async def test_logprobs_are_those_of_the_sampled_distribution(
    engine: EngineClient, directories: list[Path], temperature: float
) -> None:
    prompt = [9, 10, 11]
    sampling = Sampling(max_tokens=10, temperature=temperature, ignore_eos=True)
    generation = await engine.generate(prompt, sampling)
    expected = expected_logprobs(directories[0], prompt, generation.token_ids, temperature)
    if temperature == 0.0 and generation.logprobs == pytest.approx([0.0] * 10):
        return  # vLLM calls a greedy choice certain
    assert generation.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.6, 0), (1.0, 5), (0.7, 9), (0.01, 0)])
async def test_only_the_likeliest_tokens_are_sampled_where_a_request_says_so(
    engine: EngineClient, directories: list[Path], top_p: float, top_k: int
) -> None:
    """A token that is left out never comes; the log-probabilities are of the distribution that is left."""
    prompt = [9, 10, 11]
    sampling = Sampling(max_tokens=24, temperature=1.5, top_p=top_p, top_k=top_k, ignore_eos=True)
    generation = await engine.generate(prompt, sampling)
    rows = every_logprob(directories[0], prompt, generation.token_ids, 1.5)
    expected = []
    for row, token in zip(rows, generation.token_ids, strict=True):
        left: dict[int, float] = {}
        likeliest = sorted(range(VOCABULARY), key=lambda item: -row[item])[: top_k or VOCABULARY]
        complete = math.fsum(math.exp(row[item]) for item in likeliest)
        for item in likeliest:
            if left and math.fsum(left.values()) >= top_p:
                break
            left[item] = math.exp(row[item]) / complete
        assert token in left
        expected.append(math.log(left[token] / math.fsum(left.values())))
    assert generation.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -2}])
async def test_a_share_of_nothing_is_refused(engine: EngineClient, wrong: dict[str, float]) -> None:
    with pytest.raises(Invalid):
        await engine.generate([3], Sampling(**wrong))  # type: ignore[arg-type]


async def test_greedy_answers_repeat_and_continue_their_prefix(engine: EngineClient) -> None:
    greedy = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    prompt = [20, 21, 22]
    complete = (await engine.generate(prompt, greedy)).token_ids
    assert (await engine.generate(prompt, greedy)).token_ids == complete
    rest = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    assert (await engine.generate(prompt + complete[:8], rest)).token_ids == complete[8:]


async def test_the_same_seed_samples_the_same(engine: EngineClient) -> None:
    sampling = Sampling(max_tokens=20, ignore_eos=True, seed=11)
    first = await engine.generate([4, 5], sampling)
    assert (await engine.generate([4, 5], sampling)).token_ids == first.token_ids


async def test_a_stream_is_the_same_answer_in_pieces(engine: EngineClient) -> None:
    greedy = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    complete = await engine.generate([9, 8, 7], greedy)
    pieces = [delta async for delta in engine.stream([9, 8, 7], greedy)]
    assert [token for delta in pieces for token in delta.token_ids] == complete.token_ids
    got = [logprob for delta in pieces for logprob in delta.logprobs]
    assert got == pytest.approx(complete.logprobs, abs=1e-4)
    assert len(pieces) > 1 and [delta.finish_reason for delta in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length" and pieces[-1].spans == complete.spans


async def test_who_leaves_a_stream_ends_the_request(engine: EngineClient) -> None:
    stream = engine.stream([9, 9, 9], LONG)
    await anext(stream)
    await stream.aclose()
    await engine.pause("wait")  # returns although the request would have run on
    await engine.resume()


async def test_a_stream_of_nonsense_is_refused(engine: EngineClient) -> None:
    with pytest.raises((Invalid, EngineFailed)):
        async for _ in engine.stream([VOCABULARY + 500], Sampling()):
            pass


async def test_stop_tokens_end_an_answer_and_are_part_of_it(engine: EngineClient) -> None:
    probe = await engine.generate([30, 31], Sampling(max_tokens=10, temperature=0.0, ignore_eos=True))
    stop = probe.token_ids[3]
    sampling = Sampling(max_tokens=10, temperature=0.0, stop_token_ids=[stop], ignore_eos=True)
    generation = await engine.generate([30, 31], sampling)
    first = probe.token_ids.index(stop)
    assert generation.token_ids == probe.token_ids[: first + 1] and generation.finish_reason == "stop"


async def test_end_of_sequence_ends_an_answer_unless_ignored(engine: EngineClient) -> None:
    answers = await asyncio.gather(
        *(engine.generate([n], Sampling(max_tokens=200, temperature=2.0, seed=n)) for n in range(3, 11))
    )
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert stopped and all(answer.token_ids[-1] == EOS and EOS not in answer.token_ids[:-1] for answer in stopped)


async def test_many_requests_share_the_engine_and_stay_apart(engine: EngineClient, directories: list[Path]) -> None:
    prompts = [[3 + (n * k) % 120 for k in range(1, 2 + n)] for n in range(40)]
    sampling = Sampling(max_tokens=9, ignore_eos=True)
    answers = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    for prompt, answer in list(zip(prompts, answers, strict=True))[::7]:
        assert answer.logprobs == pytest.approx(expected_logprobs(directories[0], prompt, answer.token_ids), abs=1e-3)


async def test_weights_change_in_flight_and_spans_say_where(
    supervisor: EngineSupervisor, engine: EngineClient, directories: list[Path]
) -> None:
    prompt = [40, 41, 42]
    changed = asyncio.Event()

    async def keep_asking(first: int) -> list[Generation]:
        # So that some request is in flight at the change: they end one after the other, never all of them at once.
        result = [await engine.generate(prompt, Sampling(max_tokens=first, ignore_eos=True, seed=1))]
        while not changed.is_set():
            result.append(await engine.generate(prompt, LONG))
        assert [len(generation.token_ids) for generation in result] == [first] + [LONG.max_tokens] * (len(result) - 1)
        return result

    flights = [asyncio.create_task(keep_asking(LONG.max_tokens * part // 8)) for part in range(1, 9)]
    await some_progress(engine)
    published = await supervisor.publish(directories[0].parent / "weights", 1)
    changed.set()
    assert published.version == await engine.version() == 1
    later = await engine.generate(prompt, LONG)
    assert [(span.version, span.end) for span in later.spans] == [(1, LONG.max_tokens)]
    assert later.logprobs == pytest.approx(expected_logprobs(directories[1], prompt, later.token_ids), abs=1e-3)
    mixed = 0
    for generation in itertools.chain(*await asyncio.gather(*flights)):
        assert {span.version for span in generation.spans} <= {0, 1}
        for span in generation.spans:  # each span's logprobs are of its version, its prefix computed anew
            expected = expected_logprobs(directories[span.version], prompt, generation.token_ids)
            got = generation.logprobs[span.start : span.end]
            assert got == pytest.approx(expected[span.start : span.end], abs=1e-3)
        mixed += len(generation.spans) == 2
    assert mixed, "no request was in flight when the weights changed"


async def some_progress(engine: EngineClient) -> None:
    """Return when requests are under way: after one more, short one has been answered."""
    await engine.generate([3], Sampling(max_tokens=2, ignore_eos=True))


async def test_pause_keeps_requests_and_resume_lets_them_go_on(engine: EngineClient) -> None:
    flight = asyncio.create_task(engine.generate([50], LONG))
    await some_progress(engine)
    await engine.pause("keep")
    assert await engine.is_paused()
    held = asyncio.create_task(engine.generate([51], Sampling(max_tokens=2)))
    done, _ = await asyncio.wait([held], timeout=0.3)
    assert not done
    await engine.resume()
    assert len((await flight).token_ids) == LONG.max_tokens and len((await held).token_ids) in (1, 2)
    assert not await engine.is_paused()


async def test_abort_returns_what_there_is(engine: EngineClient) -> None:
    await engine.pause("keep")
    flight = asyncio.create_task(engine.generate([60], LONG, request_id="to-abort"))
    done, _ = await asyncio.wait([flight], timeout=0.3)
    assert not done
    await engine.abort()
    generation = await flight
    assert generation.finish_reason == "abort" and len(generation.token_ids) < LONG.max_tokens
    await engine.resume()


async def test_a_client_that_goes_away_takes_its_request_along(engine: EngineClient) -> None:
    async with EngineClient(engine.url) as other:
        task = asyncio.create_task(other.generate([70], LONG))
        await some_progress(engine)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await engine.pause("wait")  # returns although the request would have run on
    await engine.resume()


async def test_nonsense_is_refused(engine: EngineClient) -> None:
    for prompt in ([], [-1], [VOCABULARY + 500]):
        with pytest.raises((Invalid, EngineFailed)):
            await engine.generate(prompt, Sampling())
    with pytest.raises((Invalid, EngineFailed)):
        await engine.generate([5] * LENGTH, Sampling())
    assert await engine.healthy()


async def test_a_version_that_was_damaged_is_not_served(
    supervisor: EngineSupervisor, engine: EngineClient, directories: list[Path]
) -> None:
    weights = directories[0].parent / "weights"
    publish(weights, 7)
    store = VersionStore(weights)
    complete = store.manifest(store.version(7)).complete
    assert complete is not None
    path = store.path(complete[0].digest)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises((EngineFailed, NotFound)):
        await supervisor.publish(weights, 7)
    assert await engine.version() == 0 and not await engine.is_paused() and supervisor.version == 0
    assert (await engine.generate([3], Sampling(max_tokens=1))).spans[0].version == 0
    with pytest.raises(Invalid, match="takes its weights from"):
        await supervisor.publish(directories[1], 1)


async def test_requests_that_arrive_during_a_publication_wait_for_it(
    supervisor: EngineSupervisor, engine: EngineClient, directories: list[Path]
) -> None:
    short = Sampling(max_tokens=2, ignore_eos=True)

    async def request(count: int) -> list[int]:
        return [(await engine.generate([5, n], short)).spans[0].version for n in range(count)]

    asking = [asyncio.create_task(request(30)) for _ in range(4)]
    for version in (1, 2, 1, 0):
        await supervisor.publish(directories[0].parent / "weights", version)
    for versions in await asyncio.gather(*asking):
        assert set(versions) <= {0, 1, 2}


async def test_a_killed_engine_comes_back_with_the_last_weights(
    supervisor: EngineSupervisor, engine: EngineClient, directories: list[Path]
) -> None:
    await supervisor.publish(directories[0].parent / "weights", 2)
    flight = asyncio.create_task(supervisor.generate([80, 81], LONG))
    await some_progress(engine)
    assert supervisor.pid is not None
    before = supervisor.pid
    os.kill(before, 9)
    generation = await flight
    assert supervisor.pid != before
    assert [span.version for span in generation.spans] == [2]
    assert generation.logprobs == pytest.approx(
        expected_logprobs(directories[2], [80, 81], generation.token_ids), abs=1e-3
    )
