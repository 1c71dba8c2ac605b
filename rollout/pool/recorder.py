"""`SampleRecorder`: what an agent asks in messages or in text, kept as the tokens that the model saw and sampled.

Guarantee (I8): a sample holds the very tokens that the engine was given and gave, each with its mask, log-probability
and version. A request whose history is not what was recorded begins a new sample, and is counted. What was sampled is
trained as it was sampled; only as context of a later sample may it be written again, by the template, as mask 0.

::

    messages ─▶ line of this session whose history they continue? ─┬─ yes ─▶ bridge ─▶ ids ─▶ engine ─▶ same sample
                                                                  └─ no, or the template rewrites ─▶ open ─▶ new sample
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rollout.engine.client import Delta, Generation, Sampling, TurnSampling
from rollout.episode.renderer import Message, Renderer, Tool
from rollout.experts import RoutedExperts, extend
from rollout.pool.partial_text import SentText, Stops
from rollout.pool.pool import Enough
from sandbox.errors import EngineFailed, Invalid

Read = Callable[[list[int]], dict[str, str]]  # sampled tokens: what they say, as reasoning and as text


class StreamingEngine(Protocol):
    """A pool, say. The last delta has the finish reason and the spans."""

    def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", enough: Enough | None = None
    ) -> AsyncGenerator[Delta, None]: ...


class DeltaListener(Protocol):
    """Who hears an answer on its way."""

    async def begin(self, prompt_tokens: int) -> None:
        """The engine answers."""

    async def more(self, kind: str, text: str) -> None:
        """What is new of its reasoning or its text; all of it before the answer is returned."""


class RecordedSample(msgspec.Struct, kw_only=True):
    """One sample. Lists have one entry per token, as in `rollout.messages.Trajectory`."""

    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    experts: list[RoutedExperts] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: of all tokens
    cut: bool = False  # an answer in it reached its token limit
    answers: int = 0

    @property
    def complete(self) -> bool:
        """Any token could be sampled; else `logprobs` are of the likeliest ones alone, and no trainer takes them."""
        return self.top_p == 1.0 and self.top_k == 0

    def sampled_as(self, sampling: Sampling) -> bool:
        """A request so sampled may extend it: a sample is of one distribution."""
        target = (sampling.temperature, sampling.top_p, sampling.top_k)
        return (self.temperature, self.top_p, self.top_k) == target

    @property
    def routed(self) -> int:
        """The end of the tokens whose experts are known."""
        return self.experts[-1].end if self.experts else 0

    def put(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(self, generation: Generation) -> None:
        self.tokens += generation.token_ids
        self.mask += [1] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        for span in generation.spans:
            self.versions += [span.version] * (span.end - span.start)
        extend(self.experts, generation.experts, 0, len(self.tokens))
        self.answers += 1
        self.cut = self.cut or generation.finish_reason == "length"


@dataclass(kw_only=True)
class SampleHead:
    """The tip of a sample: the messages, or the text, that its tokens stand for."""

    sample: RecordedSample
    history: list[Message]
    tools: list[Tool]
    prompt: int = 0  # tokens before the last answer
    requested: str | None = None  # of a line of text: what the last answer was given to
    reported: str = ""  # and what it said, as far as it was sent to the agent
    hidden: str = ""  # the rest: its end is a token without text, and a stop string is not sent


@dataclass
class PromptTokens:
    """A request as tokens: those of a sample and more, or those of a new one."""

    ids: list[int]
    history: list[Message]
    tools: list[Tool]
    sampling: Sampling
    line: SampleHead | None
    how: str  # opened, extended, again, rewritten (by the template), drifted (by the agent)
    text: str | None = None  # of a request in text

    @property
    def routed(self) -> int:
        """Its first tokens, whose experts are known."""
        return 0 if self.line is None else self.line.sample.routed


@dataclass(kw_only=True)
class AgentReply:
    """The answer to an agent. `finish`: stop, length, tool_calls, or stop_string."""

    message: Message
    finish: str
    prompt_tokens: int
    tokens: int
    stopped: str | None = None  # the stop string that ended it


@dataclass
class AgentSession:
    """One agent's work, in samples in the order in which they began."""

    name: str
    samples: list[RecordedSample] = field(default_factory=list)
    lines: list[SampleHead] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class SampleRecorder:
    """``await SampleRecorder(pool, renderer).answer("episode 7", messages, tools, Sampling())``"""

    def __init__(self, engine: StreamingEngine, renderer: Renderer, *, length: int = 1 << 20):
        """`length`: tokens of the longest sequence that the engine takes."""
        self.engine, self.renderer, self.length = engine, renderer, length
        self.sessions: dict[str, AgentSession] = {}

    def session(self, name: str) -> AgentSession:
        return self.sessions.setdefault(name, AgentSession(name))

    async def answer(
        self,
        name: str,
        messages: list[Message],
        tools: list[Tool],
        sampling: Sampling,
        *,
        stop: Sequence[str] = (),
        request_id: str = "",
        listener: DeltaListener | None = None,
    ) -> AgentReply:
        """One answer of the model. What fails is recorded nowhere: the agent asks again, or its episode fails."""
        session, stops = self.session(name), Stops(stop, self.renderer.decode)
        async with session.busy:  # one conversation; agents that speak with two tongues wait for each other
            requested = await asyncio.to_thread(self._match, session, messages, tools, sampling)

            def read(ids: list[int]) -> dict[str, str]:
                action = self.renderer.parse(ids, requested.ids, tools)
                return {"reasoning": action.reasoning, "text": action.content}

            reported = SentText([*self.renderer.marks, *stop])
            generation = await self._sample(requested, stops, request_id, read, reported, listener)
            action = await asyncio.to_thread(self.renderer.parse, generation.token_ids, requested.ids, tools)
            number = session.counts["answers"]
            message = action.message([f"call_{number}_{n}" for n in range(len(action.calls))])
            message["content"] = stops.cut(action.content)
            await _report_rest(listener, reported, {"reasoning": action.reasoning, "text": message["content"]})
            self._put(session, requested, generation).history = [*requested.history, message]
            session.counts["broken_calls"] += len(action.broken)
        return _answered(requested, generation, message, stops)

    async def complete(
        self,
        name: str,
        prompt: str | list[int],
        sampling: Sampling,
        *,
        stop: Sequence[str] = (),
        request_id: str = "",
        listener: DeltaListener | None = None,
    ) -> AgentReply:
        """The same for an agent that lays its conversation out by itself: text, or tokens, to continue."""
        session, stops = self.session(name), Stops(stop, self.renderer.decode)

        def read(ids: list[int]) -> dict[str, str]:
            ended = bool(ids) and ids[-1] in self.renderer.stops
            return {"text": self.renderer.decode(ids[:-1] if ended else ids)}

        async with session.busy:
            requested, reported = await asyncio.to_thread(self._continue, session, prompt, sampling), SentText(stop)
            generation = await self._sample(requested, stops, request_id, read, reported, listener)
            text = stops.cut((await asyncio.to_thread(read, generation.token_ids))["text"])
            await _report_rest(listener, reported, {"text": text})
            line = self._put(session, requested, generation)
            line.requested, line.reported = requested.text, text
            line.hidden = self.renderer.decode(generation.token_ids)[len(text) :]
        return _answered(requested, generation, {"role": "assistant", "content": text}, stops)

    async def _sample(
        self,
        requested: PromptTokens,
        stops: Stops,
        request_id: str,
        read: Read,
        reported: SentText,
        listener: DeltaListener | None,
    ) -> Generation:
        """What the engine samples; a listener gets the part that will stay."""
        capacity = self.length - len(requested.ids)
        if capacity < 1:
            raise Invalid(
                f"the conversation has {len(requested.ids)} tokens, the engine takes {self.length}",
                hint="shorten the conversation, or raise max_length",
            )
        ends = sorted({*requested.sampling.stop_token_ids, *self.renderer.stops})
        limit = min(requested.sampling.max_tokens, capacity)
        sampling = TurnSampling.of(requested.sampling, stop_token_ids=ends, max_tokens=limit, routed=requested.routed)
        made = Generation(token_ids=[], logprobs=[], spans=[], finish_reason="abort")
        begun = False
        async with aclosing(self.engine.stream(requested.ids, sampling, request_id=request_id, enough=stops)) as deltas:
            async for delta in deltas:
                made.token_ids += delta.token_ids
                made.logprobs += delta.logprobs
                made.spans = delta.spans or made.spans
                made.finish_reason = delta.finish_reason or made.finish_reason
                made.experts = delta.experts or made.experts
                if listener is None or not delta.token_ids:
                    continue
                if not begun:
                    await listener.begin(len(requested.ids))
                    begun = True
                for kind, text in (await asyncio.to_thread(read, made.token_ids)).items():
                    if new := reported.more(kind, text):
                        await listener.more(kind, new)
        if made.finish_reason == "abort":
            raise EngineFailed("the answer was ended from outside", hint="ask again")
        return made

    # ----------------------------------------------------------------- which sample

    def _match(
        self, session: AgentSession, messages: list[Message], tools: list[Tool], sampling: Sampling
    ) -> PromptTokens:
        """Which sample the request extends. Changes nothing. Blocks for a millisecond or two."""
        target = [mark(message) for message in messages]
        for line in reversed(session.lines):
            if line.requested is not None or line.tools != tools or not line.sample.sampled_as(sampling):
                continue
            existing = [mark(message) for message in line.history]
            if existing[:-1] == target:  # another answer to the same
                return PromptTokens(line.sample.tokens[: line.prompt], messages, tools, sampling, None, "again")
            if existing == target[: len(existing)] and len(existing) < len(target):
                new = messages[len(existing) :]
                longer = self.renderer.bridge(line.sample.tokens, line.history, new, tools)
                if longer is not None:
                    return PromptTokens(longer, [*line.history, *new], tools, sampling, line, "extended")
                return PromptTokens(self.renderer.open(messages, tools), messages, tools, sampling, None, "rewritten")
        how = "drifted" if session.lines else "opened"
        return PromptTokens(self.renderer.open(messages, tools), messages, tools, sampling, None, how)

    def _continue(self, session: AgentSession, prompt: str | list[int], sampling: Sampling) -> PromptTokens:
        """Which sample a text extends: the one whose prompt and answer it begins with. Changes nothing."""
        text = prompt if isinstance(prompt, str) else self.renderer.decode(prompt)
        how = "drifted" if session.lines else "opened"
        for line in reversed(session.lines):
            if line.requested is None or not line.sample.sampled_as(sampling):
                continue
            tokens = line.sample.tokens
            if isinstance(prompt, list):
                if prompt[: len(tokens)] == tokens:
                    return PromptTokens(prompt, [], [], sampling, line, "extended", text)
            elif prompt == line.requested:  # another answer to the same
                return PromptTokens(tokens[: line.prompt], [], [], sampling, None, "again", text)
            elif prompt.startswith(line.requested + line.reported):
                longer = self._after(tokens, line.hidden, prompt[len(line.requested + line.reported) :])
                exact = longer[: len(tokens)] == tokens
                return PromptTokens(
                    longer, [], [], sampling, line if exact else None, "extended" if exact else "rewritten", text
                )
        ids = self.renderer.encode(prompt) if isinstance(prompt, str) else prompt
        return PromptTokens(ids, [], [], sampling, None, how, text)

    def _after(self, tokens: list[int], hidden: str, rest: str) -> list[int]:
        """`tokens` and then `rest`. What ends `tokens` and was not sent to the agent, the agent has to write by itself;
        if it does not, that goes, and all before it stays as it was sampled."""
        if rest.startswith(hidden):
            return tokens + self.renderer.encode(rest[len(hidden) :])
        retained, gone = len(tokens), ""
        while retained and len(gone) < len(hidden):
            retained -= 1
            gone = self.renderer.decode(tokens[retained:])
        return tokens[:retained] + self.renderer.encode(gone[: len(gone) - len(hidden)] + rest)

    def _put(self, session: AgentSession, requested: PromptTokens, generation: Generation) -> SampleHead:
        line = requested.line
        if line is None:
            how = requested.sampling
            sample = RecordedSample(temperature=how.temperature, top_p=how.top_p, top_k=how.top_k)
            line = SampleHead(sample=sample, history=[], tools=requested.tools)
            session.lines.append(line)
            session.samples.append(line.sample)
        line.sample.put(requested.ids[len(line.sample.tokens) :])
        line.prompt = len(line.sample.tokens)
        line.sample.sampled(generation)
        session.counts["answers"] += 1
        session.counts[requested.how] += 1
        return line


def _answered(requested: PromptTokens, generation: Generation, message: Message, stops: Stops) -> AgentReply:
    finish = "tool_calls" if message.get("tool_calls") else generation.finish_reason
    return AgentReply(
        message=message,
        finish="stop_string" if stops.result is not None and finish == "stop" else finish,
        prompt_tokens=len(requested.ids),
        tokens=len(generation.token_ids),
        stopped=stops.result,
    )


async def _report_rest(listener: DeltaListener | None, reported: SentText, complete: dict[str, str]) -> None:
    for kind, text in complete.items():
        if listener is not None and (new := reported.rest(kind, text)):
            await listener.more(kind, new)


def mark(message: Message) -> bytes:
    """What makes two messages the same: who, the text but for its edges, the calls by their values.

    Agents leave out reasoning, rename calls, rewrite JSON; none of this is another history.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    calls: list[Any] = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments", "")
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append([call["function"]["name"], arguments])
    said = json.dumps([message["role"], str(content).strip(), calls], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
