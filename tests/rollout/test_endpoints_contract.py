"""The contract of the doors over a fake engine, the embedded one and a real vLLM: OpenAI's own client at one end, the
tokens that the engine was given and gave at the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rollout.engine.client import Sampling
from rollout.pool.endpoints import Endpoints
from rollout.pool.recorder import AgentSession, SampleRecorder
from tests.support.chat_models import need_models, renderer
from tests.support.endpoint_engines import ENGINES, LENGTH, Fake, Noted, engine

pytest.importorskip("torch", reason="torch is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.asyncio(loop_scope="module")]
LIMIT = 10  # tokens of an answer
Request = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def behind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    need_models()
    async with engine(request.param, tmp_path_factory.mktemp("engine")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def endpoints(behind: Any) -> AsyncIterator[Endpoints]:
    recorder = SampleRecorder(Noted(behind), renderer("smollm2"), length=LENGTH)
    async with Endpoints(recorder, sampling=Sampling(max_tokens=LIMIT, temperature=0.0, seed=1)) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def agent(endpoints: Endpoints) -> AsyncIterator[Any]:
    """OpenAI's client. Nothing is asked again behind our back."""
    async with openai.AsyncOpenAI(base_url=endpoints.url("e") + "/v1", api_key="none", max_retries=0) as made:
        yield made


def noted(endpoints: Endpoints) -> Noted:
    retained = endpoints.recorder.engine
    assert isinstance(retained, Noted)
    return retained


def exact(endpoints: Endpoints, name: str = "e") -> AgentSession:
    """The samples of a session are what the engine was given and gave, token by token, and nothing else."""
    session = endpoints.recorder.session(name)
    left = list(noted(endpoints).answered)
    for sample in session.samples:
        at = 0
        for _ in range(sample.answers):
            result = next(
                (given for given in left if sample.tokens[: len(given[0])] == given[0] and len(given[0]) >= at), None
            )
            assert result is not None, "an answer in a sample that the engine never gave"
            left.remove(result)
            prompt, generation = result
            assert sum(sample.mask[at : len(prompt)]) == 0
            at = len(prompt) + len(generation.token_ids)
            assert sample.tokens[len(prompt) : at] == generation.token_ids
            assert sample.logprobs[len(prompt) : at] == generation.logprobs
            assert sample.mask[len(prompt) : at] == [1] * len(generation.token_ids)
            assert sample.versions[len(prompt) : at] == [0] * len(generation.token_ids)
        assert at == len(sample.tokens)
    assert not left, "an answer of the engine that is in no sample"
    return session


async def test_chat_completions(endpoints: Endpoints, agent: Any) -> None:
    messages: list[Request] = [{"role": "system", "content": "s"}, {"role": "user", "content": "list the files"}]
    for turn in range(3):
        answer = await agent.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0]
        assert said.finish_reason == "length" and answer.usage.completion_tokens == LIMIT
        assert answer.usage.prompt_tokens == len(noted(endpoints).answered[turn][0])
        messages += [said.message.model_dump(exclude_none=True), {"role": "user", "content": f"go on {turn}"}]
    session = exact(endpoints)
    assert len(session.samples) == 1 and session.counts["extended"] == 2


async def test_responses_that_name_the_one_before(endpoints: Endpoints, agent: Any) -> None:
    before, ids = None, []
    for turn in range(3):
        answer = await agent.responses.create(
            model="policy", input=f"turn {turn}", instructions="be short", previous_response_id=before
        )
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage.output_tokens == LIMIT and answer.output[0].type == "message"
        before = answer.id
        ids.append(before)
    session = exact(endpoints)
    assert len(session.samples) == 1 and session.counts["extended"] == 2 and len(set(ids)) == 3


async def test_responses_that_carry_their_history(endpoints: Endpoints, agent: Any) -> None:
    said: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    for turn in range(2):
        answer = await agent.responses.create(model="policy", input=said, instructions="be short", store=False)
        said += [item.model_dump(exclude_none=True) for item in answer.output]
        said.append({"type": "message", "role": "user", "content": f"go on {turn}"})
    session = exact(endpoints)
    assert len(session.samples) == 1 and session.counts["extended"] == 1
    with pytest.raises(openai.BadRequestError, match="no response"):  # it was not to be kept
        await agent.responses.create(model="policy", input="x", previous_response_id=answer.id)


async def test_completions_in_text(endpoints: Endpoints, agent: Any) -> None:
    text = "<|im_start|>user\nlist the files<|im_end|>\n<|im_start|>assistant\n"
    for turn in range(3):
        answer = await agent.completions.create(model="policy", prompt=text, max_tokens=LIMIT)
        said = answer.choices[0]
        assert said.finish_reason == "length" and answer.usage.total_tokens == answer.usage.prompt_tokens + LIMIT
        text += said.text + f"<|im_end|>\n<|im_start|>user\nmore {turn}<|im_end|>\n<|im_start|>assistant\n"
    session = exact(endpoints)
    assert len(session.samples) == 1 and session.counts["extended"] == 2


async def test_completions_in_tokens(endpoints: Endpoints, agent: Any) -> None:
    ids = endpoints.recorder.renderer.encode("one two three")
    for _ in range(2):
        await agent.completions.create(model="policy", prompt=ids, max_tokens=LIMIT)
        ids = [*ids, *noted(endpoints).answered[-1][1].token_ids, *endpoints.recorder.renderer.encode(" and")]
    await agent.completions.create(model="policy", prompt=[5, *ids], max_tokens=LIMIT)
    session = exact(endpoints)
    assert [sample.answers for sample in session.samples] == [2, 1]
    assert (session.counts["extended"], session.counts["drifted"]) == (1, 1)


async def test_messages(endpoints: Endpoints) -> None:
    body: Request = {
        "model": "policy",
        "max_tokens": LIMIT,
        "system": "s",
        "messages": [{"role": "user", "content": "x"}],
    }
    async with aiohttp.ClientSession() as http:
        for turn in range(2):
            async with http.post(endpoints.url("e") + "/v1/messages", json=body) as got:
                answer = await got.json()
            assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == LIMIT
            body["messages"] += [
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": f"go on {turn}"},
            ]
    session = exact(endpoints)
    assert len(session.samples) == 1 and session.counts["extended"] == 1


async def test_a_stream_says_what_the_whole_answer_says(endpoints: Endpoints, agent: Any) -> None:
    """The same question in another session, at temperature 0."""
    requested: Request = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
    complete = (await agent.chat.completions.create(**requested)).choices[0].message.content
    stream = await agent.chat.completions.create(**requested, stream=True, stream_options={"include_usage": True})
    pieces = [piece async for piece in stream]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == complete
    assert pieces[-1].usage.completion_tokens == LIMIT

    stream = await agent.responses.create(model="policy", input="x", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == events[-1].response.output_text == complete

    text = (await agent.completions.create(model="policy", prompt="x")).choices[0].text
    stream = await agent.completions.create(model="policy", prompt="x", stream=True)
    assert "".join([piece.choices[0].text async for piece in stream]) == text
    exact(endpoints)


async def test_a_stop_string_ends_the_request_in_the_engine(endpoints: Endpoints, agent: Any) -> None:
    """At temperature 0 the same is said again, up to the string; every token of the sample has its version."""
    requested: Request = {"model": "policy", "prompt": "x"}
    complete = (await agent.completions.create(**requested)).choices[0].text
    stop = next(pair for n in range(1, len(complete)) if "\ufffd" not in (pair := complete[n : n + 2]))
    answer = await agent.with_options(base_url=endpoints.url("f") + "/v1").completions.create(**requested, stop=[stop])
    assert answer.choices[0].text == complete.partition(stop)[0] and answer.choices[0].finish_reason == "stop"
    (sample,) = endpoints.recorder.session("f").samples
    assert 0 < sum(sample.mask) == answer.usage.completion_tokens == sum(version == 0 for version in sample.versions)
    assert stop in endpoints.recorder.renderer.decode(sample.tokens[-sum(sample.mask) :])
    retained = noted(endpoints)
    assert retained.answered[1][1].token_ids == retained.answered[0][1].token_ids[: answer.usage.completion_tokens]


async def test_who_leaves_a_stream_ends_his_request_in_the_engine(endpoints: Endpoints, behind: Any) -> None:
    if isinstance(behind, Fake):
        return  # it says all at once; test_doors has one that does not
    retained = noted(endpoints)
    async with Endpoints(endpoints.recorder, sampling=Sampling(max_tokens=400, ignore_eos=True)) as long:
        async with openai.AsyncOpenAI(base_url=long.url("l") + "/v1", api_key="none", max_retries=0) as agent:
            stream = await agent.completions.create(model="policy", prompt="x", stream=True)
            assert (await anext(aiter(stream))).choices[0].text
            await stream.close()
        async with asyncio.timeout(60):
            while not retained.cancelled:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert not endpoints.recorder.session("l").samples and not retained.answered
    client = await behind.members["engine-0"].server.wait_serving()
    await client.pause("wait")  # returns when nothing runs
    await client.resume()
    assert behind.members["engine-0"].load == 0


async def test_the_likeliest_tokens_alone_are_sampled_and_recorded_so(endpoints: Endpoints, agent: Any) -> None:
    requested: Request = {"model": "policy", "prompt": "x", "temperature": 1.0}
    await agent.completions.create(**requested, top_p=0.5)
    await agent.completions.create(**requested, extra_body={"top_k": 1})
    half, only = endpoints.recorder.session("e").samples
    assert (half.top_p, half.top_k, half.complete) == (0.5, 0, False) and (only.top_p, only.top_k, only.complete) == (
        1,
        1,
        False,
    )
    if not isinstance(noted(endpoints).engine, Fake):
        assert any(only.mask) and all(abs(logprob) < 1e-6 for logprob in only.logprobs), "one token alone is certain"


async def test_the_longest_conversation_is_refused_and_not_cut(endpoints: Endpoints, agent: Any) -> None:
    for request in (
        agent.completions.create(model="policy", prompt=[7] * LENGTH),
        agent.responses.create(model="policy", input=" x" * LENGTH),
    ):
        with pytest.raises(openai.BadRequestError, match="tokens"):
            await request
    assert not endpoints.recorder.session("e").samples


async def test_who_goes_away_leaves_nothing_behind(endpoints: Endpoints, agent: Any) -> None:
    retained = noted(endpoints)
    retained.free.clear()
    waiting = [
        asyncio.create_task(request)
        for request in (
            agent.responses.create(model="policy", input="x"),
            agent.with_options(base_url=endpoints.url("f") + "/v1").completions.create(model="policy", prompt="x"),
        )
    ]
    async with asyncio.timeout(60):
        while not {"e", "f"} <= endpoints.recorder.sessions.keys():  # noqa: ASYNC110 - they are under way in the doors
            await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    retained.free.set()
    await agent.completions.create(model="policy", prompt="y")
    async with asyncio.timeout(60):
        while endpoints.recorder.session("f").busy.locked():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [len(endpoints.recorder.session(name).samples) for name in "ef"] == [1, 0]
    exact(endpoints)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("responses", {"input": []}),
        ("responses", {"input": 5}),
        ("responses", {"input": [{"role": "user"}]}),
        ("responses", {"input": [{"role": "nobody", "content": "x"}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}),
        ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}}),
        ("responses", {"input": "x", "previous_response_id": "resp_of_nobody"}),
        ("responses", {"input": "x", "top_p": 1.5}),
        ("responses", {"input": "x", "max_output_tokens": "many"}),
        ("responses", {"input": "x", "tool_choice": "required"}),
        ("completions", {"prompt": ""}),
        ("completions", {"prompt": ["a", "b"]}),
        ("completions", {"prompt": [1, True]}),
        ("completions", {"prompt": "x", "echo": True}),
        ("completions", {"prompt": "x", "logprobs": 5}),
        ("completions", {"prompt": "x", "stop": ["x"] * 17}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("messages", {"messages": [{"role": "nobody", "content": "x"}]}),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "bash_20250124"}]}),
        ("completions", {}),
    ],
)
async def test_what_is_not_implemented_is_refused(endpoints: Endpoints, route: str, body: Request) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{endpoints.url('e')}/v1/{route}", json=body) as got,
    ):
        assert got.status == 400 and (await got.json())["error"]["message"]
    assert not noted(endpoints).answered
