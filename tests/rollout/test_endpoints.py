"""Agents that speak OpenAI's or Anthropic's language, recorded as the tokens that the model saw and sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rollout.engine.client import Delta, Generation, Sampling, WeightSpan
from rollout.pool.endpoints import Endpoints
from rollout.pool.recorder import RecordedSample, SampleRecorder
from sandbox.errors import EngineFailed
from tests.support.chat_models import need_models, renderer
from tests.support.endpoint_engines import Complete

pytestmark = pytest.mark.filterwarnings("default")
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
CALL = '<tool_call>{"name": "bash",  "arguments":{"command": "ls -a"}}</tool_call>'  # as no template would space it


class Speaker(Complete):
    """An engine that says what it is told to, letter by letter: tokens that no tokenizer would choose."""

    def __init__(self, family: str, *texts: str):
        self.renderer, self.texts = renderer(family), list(texts)
        self.requested: list[list[int]] = []
        self.failing = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        if self.failing:
            self.failing -= 1
            raise EngineFailed("it restarts")
        self.requested.append(list(prompt_ids))
        text = self.texts.pop(0)
        marks = sorted(self.renderer._marked, key=len, reverse=True)
        ids: list[int] = []
        while text:
            piece = next((mark for mark in marks if text.startswith(mark)), text[0])
            ids += self.renderer._encoder.encode(piece, add_special_tokens=False).ids
            text = text[len(piece) :]
        ids.append(self.renderer.stops[0])
        return Generation(
            token_ids=ids,
            logprobs=[-0.5 - n / 1000 for n in range(len(ids))],
            spans=[WeightSpan(4, 0, 2), WeightSpan(5, 2, len(ids))],
            finish_reason="stop",
        )


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    need_models()


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


def exact(engine: Speaker, samples: list[RecordedSample]) -> None:
    """Each sample is what the engine was given and gave, and nothing else is trained."""
    for sample in samples:
        assert len(sample.tokens) == len(sample.mask) == len(sample.logprobs) == len(sample.versions)
        assert all((version >= 0) == bool(bit) for bit, version in zip(sample.mask, sample.versions, strict=True))
        assert all((logprob < 0) == bool(bit) for bit, logprob in zip(sample.mask, sample.logprobs, strict=True))
    prompts = sum(any(sample.tokens[: len(ids)] == ids for sample in samples) for ids in engine.requested)
    assert prompts == len(engine.requested)


async def chat(http: aiohttp.ClientSession, url: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    async with http.post(url + "/v1/chat/completions", json={"model": "policy", "messages": messages, **more}) as got:
        body: dict[str, Any] = await got.json()
        assert got.status == 200, body
        return body


async def test_an_agent_with_tools_becomes_one_sample(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "I look. " + CALL, "It is done.", "Really.")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        url = endpoints.url("e1")
        messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "list the files"}]
        first = (await chat(session, url, messages, tools=[BASH]))["choices"][0]
        assert first["finish_reason"] == "tool_calls"
        call = first["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"command": "ls -a"}
        messages += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "a<|im_end|>b"}]
        second = await chat(session, url, messages, tools=[BASH])
        assert second["choices"][0]["message"]["content"] == "It is done."
        messages += [second["choices"][0]["message"], {"role": "user", "content": "really?"}]
        await chat(session, url, messages, tools=[BASH])
    work = recorder.session("e1")
    assert len(work.samples) == 1 and work.counts["extended"] == 2 and work.samples[0].answers == 3
    assert engine.requested[1][: len(engine.requested[0])] == engine.requested[0]
    exact(engine, work.samples)
    text = engine.renderer.decode(work.samples[0].tokens)
    assert CALL in text and text.endswith("Really.<|im_end|>")
    assert "a<|im_end|>b" in text  # the program's words, in ordinary tokens
    special = engine.renderer.stops[0]
    assert sum(token == special for token in work.samples[0].tokens) == text.count("<|im_end|>") - 1


async def test_a_template_that_drops_reasoning_begins_a_new_sample(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen3", "<think>\nhm\n</think>\n\nyes", "<think>\nso\n</think>\n\nno")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        messages: list[Any] = [{"role": "user", "content": "is it?"}]
        first = (await chat(session, endpoints.url("e"), messages))["choices"][0]["message"]
        assert first["reasoning_content"].strip() == "hm" and first["content"] == "yes"
        bare = {"role": "assistant", "content": first["content"]}  # as clients send it back
        await chat(session, endpoints.url("e"), [*messages, bare, {"role": "user", "content": "and that?"}])
    work = recorder.session("e")
    assert len(work.samples) == 2 and work.counts["rewritten"] == 1
    exact(engine, work.samples)
    assert "hm" not in engine.renderer.decode(engine.requested[1])


async def test_a_history_that_drifts_is_split_and_counted(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "one", "two", "three", "four")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        url, messages = endpoints.url("e"), [{"role": "user", "content": "count"}]
        first = (await chat(session, url, messages))["choices"][0]["message"]
        again = (await chat(session, url, messages))["choices"][0]["message"]
        assert (first["content"], again["content"]) == ("one", "two")
        shortened = [*messages, {"role": "assistant", "content": "(summary)"}, {"role": "user", "content": "go on"}]
        await chat(session, url, shortened)
        await chat(session, url, messages, temperature=0.5)
    counts = recorder.session("e").counts
    assert (counts["opened"], counts["again"], counts["drifted"], counts["extended"]) == (1, 1, 2, 0)
    exact(engine, recorder.session("e").samples)
    assert [sample.temperature for sample in recorder.session("e").samples] == [1.0, 1.0, 1.0, 0.5]


async def test_an_engine_that_fails_is_no_answer_and_leaves_no_trace(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "one", "two")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        url, messages = endpoints.url("e"), [{"role": "user", "content": "count"}]
        first = (await chat(session, url, messages))["choices"][0]["message"]
        more = [*messages, first, {"role": "user", "content": "on"}]
        engine.failing = 1
        async with session.post(url + "/v1/chat/completions", json={"messages": more}) as got:
            assert got.status == 503 and got.headers["retry-after"]
        await chat(session, url, more)
    work = recorder.session("e")
    assert len(work.samples) == 1 and work.counts["extended"] == 1
    exact(engine, work.samples)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": "x"},
        {"messages": [{"role": "user", "content": "x"}], "top_p": 0},
        {"messages": [{"role": "user", "content": "x"}], "top_k": "few"},
        {"messages": [{"role": "user", "content": "x"}], "stop": 5},
        {"messages": [{"role": "user", "content": "x"}], "stop": ["x", ""]},
        {"messages": [{"role": "user", "content": "x"}], "min_p": 0.1},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "x"}], "n": 2},
        {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"},
        [],
    ],
)
async def test_nonsense_and_what_is_not_implemented_is_refused(session: aiohttp.ClientSession, body: Any) -> None:
    recorder = SampleRecorder(Speaker("qwen2.5"), renderer("qwen2.5"))
    async with (
        Endpoints(recorder) as endpoints,
        session.post(endpoints.url("e") + "/v1/chat/completions", json=body) as got,
    ):
        assert got.status == 400 and (await got.json())["error"]["message"]
    assert not recorder.session("e").samples


async def test_nesting_without_end_is_text_or_refused(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "done")
    recorder = SampleRecorder(engine, engine.renderer)
    called = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "[" * 100_000}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
    ]
    async with Endpoints(recorder) as endpoints:
        async with session.post(endpoints.url("e") + "/v1/chat/completions", data="[" * 100_000) as got:
            assert got.status == 400 and "JSON" in (await got.json())["error"]["message"]
        answer = await chat(session, endpoints.url("e"), messages, tools=[BASH])
    assert answer["choices"][0]["message"]["content"] == "done"
    exact(engine, recorder.session("e").samples)


async def test_anthropic_s_messages(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "I look. " + CALL, "It is done.")
    recorder = SampleRecorder(engine, engine.renderer)
    tool = {"name": "bash", "description": "Run a command", "input_schema": BASH["function"]["parameters"]}
    body: dict[str, Any] = {
        "model": "policy", "max_tokens": 99, "system": [{"type": "text", "text": "s"}], "tools": [tool],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "list"}]}],
    }  # fmt: skip
    async with Endpoints(recorder) as endpoints:
        url = endpoints.url("a") + "/v1/messages"
        async with session.post(url + "/count_tokens", json=body) as got:
            counted = (await got.json())["input_tokens"]
        async with session.post(url, json=body) as got:
            first = await got.json()
        assert first["stop_reason"] == "tool_use" and first["usage"]["input_tokens"] == counted
        assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
        used = first["content"][1]
        assert used["input"] == {"command": "ls -a"}
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": "a b"}
        body["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        async with session.post(url, json={**body, "stream": True}) as got:
            events = [json.loads(line[6:]) async for line in got.content if line.startswith(b"data: ")]
    kinds = [event["type"] for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    said = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(said) == "It is done." and len(said) > 1
    work = recorder.session("a")
    assert len(work.samples) == 1 and work.samples[0].answers == 2
    exact(engine, work.samples)


async def test_a_stream_says_the_same_in_pieces(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "I look. " + CALL)
    async with Endpoints(SampleRecorder(engine, engine.renderer)) as endpoints:
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [BASH], "stream": True}
        async with session.post(endpoints.url("e") + "/v1/chat/completions", json=body) as got:
            lines = [line[6:].strip() async for line in got.content if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    deltas = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(item["delta"].get("content") or "" for item in deltas).strip() == "I look."
    calls = [call for item in deltas for call in item["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "bash")]
    assert deltas[0]["delta"]["role"] == "assistant" and deltas[-1]["finish_reason"] == "tool_calls"


async def test_sessions_stay_apart(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", *[f"answer {n}" for n in range(8)])
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        requested = [chat(session, endpoints.url(f"e{n}"), [{"role": "user", "content": "same"}]) for n in range(8)]
        await asyncio.gather(*requested)
    assert sorted(recorder.sessions) == [f"e{n}" for n in range(8)]
    assert all(len(work.samples) == 1 for work in recorder.sessions.values())


async def respond(http: aiohttp.ClientSession, url: str, **body: Any) -> dict[str, Any]:
    async with http.post(url + "/v1/responses", json={"model": "policy", **body}) as got:
        answer: dict[str, Any] = await got.json()
        assert got.status == 200, answer
        return answer


@pytest.mark.parametrize("named", [False, True])
async def test_openai_s_responses_with_tools_become_one_sample(session: aiohttp.ClientSession, named: bool) -> None:
    """Whether the agent sends its history again, or names the response before."""
    engine = Speaker("qwen2.5", "I look. " + CALL + CALL, "It is done.")
    recorder = SampleRecorder(engine, engine.renderer)
    tools = [{"type": "function", **BASH["function"]}]
    async with Endpoints(recorder) as endpoints:
        requested: list[Any] = [{"role": "user", "content": "list the files"}]
        first = await respond(session, endpoints.url("e"), input=requested, instructions="s", tools=tools)
        assert [item["type"] for item in first["output"]] == ["message", "function_call", "function_call"]
        calls = first["output"][1:]
        assert all(json.loads(call["arguments"]) == {"command": "ls -a"} for call in calls)
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"a {n}"}
            for n, call in enumerate(calls)
        ]
        before: dict[str, Any] = (
            {"input": results, "previous_response_id": first["id"]}
            if named
            else {"input": [*requested, *first["output"], *results]}
        )
        second = await respond(session, endpoints.url("e"), instructions="s", tools=tools, **before)
    assert second["output"][0]["content"][0]["text"] == "It is done." and second["status"] == "completed"
    work = recorder.session("e")
    assert len(work.samples) == 1 and work.counts["extended"] == 1
    exact(engine, work.samples)
    text = engine.renderer.decode(work.samples[0].tokens)
    assert text.count(CALL) == 2 and text.index("a 0") < text.index("a 1") and text.count("<|im_start|>system") == 1


async def test_a_response_belongs_to_its_session(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "one")
    async with Endpoints(SampleRecorder(engine, engine.renderer)) as endpoints:
        first = await respond(session, endpoints.url("e"), input="x")
        body = {"input": "y", "previous_response_id": first["id"]}
        async with session.post(endpoints.url("f") + "/v1/responses", json=body) as got:
            assert got.status == 400 and first["id"] in (await got.json())["error"]["message"]


async def complete(http: aiohttp.ClientSession, url: str, prompt: str) -> str:
    async with http.post(url + "/v1/completions", json={"prompt": prompt}) as got:
        answer = await got.json()
        assert got.status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text


async def test_completions_whose_agent_writes_ends_or_leaves_them_out(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "one", "two", "three", "four")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        url, text = endpoints.url("e"), "count:"
        assert await complete(session, url, text) == "one"
        text += "one<|im_end|>more:"
        assert await complete(session, url, text) == "two"
        assert await complete(session, url, text) == "three"  # again
        assert await complete(session, url, text + "three more:") == "four"
    work = recorder.session("e")
    assert [sample.answers for sample in work.samples] == [2, 1, 1]
    assert (work.counts["extended"], work.counts["again"], work.counts["rewritten"]) == (1, 1, 1)
    exact(engine, work.samples)
    third, fourth = work.samples[1:]
    assert fourth.tokens[: len(third.tokens) - 1] == third.tokens[:-1], "all but the end stays as it was sampled"
    assert recorder.renderer.decode(work.samples[0].tokens) == "count:one<|im_end|>more:two<|im_end|>"


# ------------------------------------------------------------------ streams that flow

ROUTES = {
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99},
    "completions": {"prompt": "x"},
}


class Slow(Speaker):
    """Says the first half, then waits."""

    def __init__(self, *texts: str):
        super().__init__("qwen2.5", *texts)
        self.go_on, self.left = asyncio.Event(), asyncio.Event()

    async def stream(self, *requested: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        try:
            async with aclosing(super().stream(*requested, **more)) as deltas:
                n = 0
                async for delta in deltas:
                    yield delta
                    n += 1
                    if n == 3:
                        await self.go_on.wait()
        finally:
            self.left.set()


def reported(line: bytes) -> str:
    """The text in one line of a stream, of any dialect."""
    event = json.loads(line[6:])
    choice = (event.get("choices") or [{}])[0]
    delta = event.get("delta") or choice.get("delta") or {}
    if isinstance(delta, str):
        return delta
    return delta.get("text") or delta.get("content") or choice.get("text") or ""


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_tells_tokens_as_they_come(session: aiohttp.ClientSession, route: str) -> None:
    engine = Slow("one two three four")
    recorder = SampleRecorder(engine, engine.renderer)
    text, body = "", {**ROUTES[route], "stream": True}
    async with (
        Endpoints(recorder) as endpoints,
        asyncio.timeout(60),
        session.post(f"{endpoints.url('e')}/v1/{route}", json=body) as got,
    ):
        async for line in got.content:
            if line.startswith(b"data: {"):
                text += reported(line)
            if len(text) > 5 and not engine.go_on.is_set():
                assert "one two three four".startswith(text) and len(text) < 12, "the engine waits here"
                assert not recorder.session("e").samples
                engine.go_on.set()
    assert text == "one two three four"
    exact(engine, recorder.session("e").samples)


@pytest.mark.parametrize("route", ROUTES)
async def test_who_leaves_a_stream_ends_his_request_and_is_not_recorded(
    session: aiohttp.ClientSession, route: str
) -> None:
    engine = Slow("one two three four")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints, asyncio.timeout(60):
        async with session.post(f"{endpoints.url('e')}/v1/{route}", json={**ROUTES[route], "stream": True}) as got:
            await anext(aiter(got.content))
            got.close()
        await engine.left.wait()
    assert not recorder.session("e").samples


class Dying(Speaker):
    async def stream(self, *requested: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        async with aclosing(super().stream(*requested, **more)) as deltas:
            yield await anext(deltas)
            yield await anext(deltas)
            raise EngineFailed("it is gone")


@pytest.mark.parametrize("route", ROUTES)
async def test_an_engine_that_dies_in_a_stream_is_told_as_an_error(session: aiohttp.ClientSession, route: str) -> None:
    engine = Dying("qwen2.5", "one two three four")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        async with session.post(f"{endpoints.url('e')}/v1/{route}", json={**ROUTES[route], "stream": True}) as got:
            assert got.status == 200
            events = [json.loads(line[6:]) async for line in got.content if line.startswith(b"data: {")]
        error = events[-1].get("error") or events[-1]["response"]["error"]
        assert "it is gone" in error["message"]
        engine.failing = 1
        async with session.post(f"{endpoints.url('e')}/v1/{route}", json={**ROUTES[route], "stream": True}) as got:
            assert got.status == 503
    assert not recorder.session("e").samples


async def test_reasoning_flows_apart_from_what_is_said(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen3", "<think>\nhm, so\n</think>\n\nyes it is", "<think>\nhm, so\n</think>\n\nyes it is")
    async with Endpoints(SampleRecorder(engine, engine.renderer)) as endpoints:
        body = {**ROUTES["chat/completions"], "stream": True}
        async with session.post(endpoints.url("e") + "/v1/chat/completions", json=body) as got:
            lines = [json.loads(line[6:]) async for line in got.content if line.startswith(b"data: {")]
        deltas = [item["choices"][0]["delta"] for item in lines]
        assert "".join(item.get("reasoning_content", "") for item in deltas).strip() == "hm, so"
        assert "".join(item.get("content", "") for item in deltas) == "yes it is"
        body = {**ROUTES["messages"], "stream": True, "thinking": {"type": "enabled", "budget_tokens": 50}}
        async with session.post(endpoints.url("f") + "/v1/messages", json=body) as got:
            events = [json.loads(line[6:]) async for line in got.content if line.startswith(b"data: {")]
    begun = [(item["index"], item["content_block"]["type"]) for item in events if "content_block" in item]
    assert begun == [(0, "thinking"), (1, "text")]
    shown = [item["delta"] for item in events if item["type"] == "content_block_delta"]
    assert "".join(item.get("thinking", "") for item in shown).strip() == "hm, so"


# ------------------------------------------------------------------ stop strings, top_p


async def test_a_stop_string_ends_the_answer_and_the_next_turn_extends_it(session: aiohttp.ClientSession) -> None:
    """The agent is not told the string; the sample has every token up to the one that completes it."""
    engine = Speaker("qwen2.5", "I look. STOP and never this", "two")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        first = (await chat(session, endpoints.url("e"), messages, stop=["STOP", "nothing"]))["choices"][0]
        assert (first["message"]["content"].strip(), first["finish_reason"]) == ("I look.", "stop")
        messages += [first["message"], {"role": "user", "content": "on"}]
        await chat(session, endpoints.url("e"), messages)
        body = {**ROUTES["messages"], "stop_sequences": ["STOP"], "stream": True}
        engine.texts.append("I look. STOP and never this")
        async with session.post(endpoints.url("f") + "/v1/messages", json=body) as got:
            events = [json.loads(line[6:]) async for line in got.content if line.startswith(b"data: {")]
    work = recorder.session("e")
    assert len(work.samples) == 1 and work.counts["extended"] == 1
    text = engine.renderer.decode(work.samples[0].tokens)
    assert "I look. STOP<|im_end|>\n<|im_start|>user\non" in text and "never" not in text
    sampled = sum(work.samples[0].mask)
    assert sampled == len("I look. STOP") + len("two") + 1, "letter by letter, and one end"
    said = "".join(reported(b"data: " + json.dumps(item).encode()) for item in events)
    assert said.strip() == "I look."
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}


async def test_text_that_stopped_at_a_string_is_extended_by_who_writes_it(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "go\nObservation: x", "go\nObservation: y", "end")
    recorder = SampleRecorder(engine, engine.renderer)

    async def request(prompt: str) -> str:
        body = {"prompt": prompt, "stop": "Observation:"}
        async with session.post(endpoints.url("e") + "/v1/completions", json=body) as got:
            return str((await got.json())["choices"][0]["text"])

    async with Endpoints(recorder) as endpoints:
        assert await request("q") == "go\n"
        assert await request("qgo\nObservation: 5\n") == "go\n"
        assert await request("qgo\nObservation: 5\ngo\nnothing") == "end"
    work = recorder.session("e")
    assert (work.counts["extended"], work.counts["rewritten"], len(work.samples)) == (1, 1, 2)
    assert recorder.renderer.decode(work.samples[0].tokens) == "qgo\nObservation: 5\ngo\nObservation:"
    assert recorder.renderer.decode(work.samples[1].tokens[:-4]) == "qgo\nObservation: 5\ngo\nnothing"


async def test_how_an_answer_was_sampled_is_recorded_and_never_mixed(session: aiohttp.ClientSession) -> None:
    engine = Speaker("qwen2.5", "one", "two", "three")
    recorder = SampleRecorder(engine, engine.renderer)
    async with Endpoints(recorder) as endpoints:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        for more in ({"top_p": 0.5}, {"top_p": 0.5, "top_k": 9}, {}):
            said = (await chat(session, endpoints.url("e"), messages, **more))["choices"][0]["message"]
            messages += [said, {"role": "user", "content": "on"}]
    result = recorder.session("e").samples
    assert [(item.top_p, item.top_k, item.complete) for item in result] == [
        (0.5, 0, False),
        (0.5, 9, False),
        (1.0, 0, True),
    ]
