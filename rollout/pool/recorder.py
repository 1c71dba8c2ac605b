"""`Recorder`: what an agent asks in messages or in text, kept as the tokens that the model saw and sampled.

Owns: sessions (one agent's work), their samples, the match between an agent's history and recorded tokens. Does not
own: HTTP (rollout.pool.doors), engines, rewards.
Guarantee (I8): a sample holds the very tokens that the engine was given and gave, each with its mask, log-probability
and version. A request whose history is not what was recorded begins a new sample, and is counted. What was sampled is
trained as it was sampled; only as context of a later sample may it be written anew, by the template, as mask 0.

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
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rollout.engine.client import Generation, Sampling
from rollout.episode.renderer import Action, Message, Renderer, Tool
from sandbox.errors import EngineFailed, Invalid


class Engine(Protocol):
    def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Awaitable[Generation]: ...


class Recorded(msgspec.Struct, kw_only=True):
    """One sample. Lists have one entry per token, as in `rollout.messages.Trajectory`."""

    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    temperature: float = 1.0
    cut: bool = False  # an answer in it reached its token limit
    answers: int = 0

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
        self.answers += 1
        self.cut = self.cut or generation.finish_reason == "length"


@dataclass(kw_only=True)
class Line:
    """The tip of a sample: the messages, or the text, that its tokens stand for."""

    sample: Recorded
    history: list[Message]
    tools: list[Tool]
    prompt: int = 0  # tokens before the last answer
    asked: str | None = None  # of a line of text: what the last answer was given to
    told: str = ""  # and what it said, as far as the agent was told: its end is a token without text


@dataclass
class Asked:
    """A request as tokens: those of a sample and more, or those of a new one."""

    ids: list[int]
    history: list[Message]
    tools: list[Tool]
    temperature: float
    line: Line | None
    how: str  # opened, extended, again, rewritten (by the template), drifted (by the agent)
    text: str | None = None  # of a request in text


@dataclass(kw_only=True)
class Answered:
    """What an agent is told."""

    action: Action
    message: Message
    finish: str
    prompt_tokens: int
    tokens: int


@dataclass(kw_only=True)
class Completed:
    """What an agent is told that asked in text."""

    text: str
    finish: str
    prompt_tokens: int
    tokens: int


@dataclass
class Session:
    """One agent's work, in samples in the order in which they began."""

    name: str
    samples: list[Recorded] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class Recorder:
    """``await Recorder(pool, renderer).answer("episode 7", messages, tools, Sampling())``"""

    def __init__(self, engine: Engine, renderer: Renderer, *, length: int = 1 << 20):
        """`length`: tokens of the longest sequence that the engine takes."""
        self.engine, self.renderer, self.length = engine, renderer, length
        self.sessions: dict[str, Session] = {}

    def session(self, name: str) -> Session:
        return self.sessions.setdefault(name, Session(name))

    async def answer(
        self, name: str, messages: list[Message], tools: list[Tool], sampling: Sampling, *, request_id: str = ""
    ) -> Answered:
        """One answer of the model. What fails is recorded nowhere: the agent asks again, or its episode fails."""
        session = self.session(name)
        async with session.busy:  # one conversation; agents that speak with two tongues wait for each other
            asked = await asyncio.to_thread(self._match, session, messages, tools, sampling.temperature)
            generation = await self._sample(asked.ids, sampling, request_id)
            action = await asyncio.to_thread(self.renderer.parse, generation.token_ids, asked.ids, tools)
            number = session.counts["answers"]
            message = action.message([f"call_{number}_{n}" for n in range(len(action.calls))])
            self._record(session, asked, generation, message)
            session.counts["broken_calls"] += len(action.broken)
        return Answered(
            action=action,
            message=message,
            finish="tool_calls" if action.calls else generation.finish_reason,
            prompt_tokens=len(asked.ids),
            tokens=len(generation.token_ids),
        )

    async def complete(
        self, name: str, prompt: str | list[int], sampling: Sampling, *, request_id: str = ""
    ) -> Completed:
        """The same for an agent that lays its conversation out by itself: text, or tokens, to go on with."""
        session = self.session(name)
        async with session.busy:
            asked = await asyncio.to_thread(self._continue, session, prompt, sampling.temperature)
            generation = await self._sample(asked.ids, sampling, request_id)
            ids = generation.token_ids
            ended = bool(ids) and ids[-1] in self.renderer.stops
            told = await asyncio.to_thread(self.renderer.decode, ids[:-1] if ended else ids)
            line = self._put(session, asked, generation)
            line.asked, line.told = asked.text, told
        return Completed(
            text=told, finish=generation.finish_reason, prompt_tokens=len(asked.ids), tokens=len(generation.token_ids)
        )

    async def _sample(self, ids: list[int], sampling: Sampling, request_id: str) -> Generation:
        room = self.length - len(ids)
        if room < 1:
            raise Invalid(f"the conversation has {len(ids)} tokens, the engine takes {self.length}")
        stops = sorted({*sampling.stop_token_ids, *self.renderer.stops})
        asked = msgspec.structs.replace(sampling, stop_token_ids=stops, max_tokens=min(sampling.max_tokens, room))
        generation = await self.engine.generate(ids, asked, request_id=request_id)
        if generation.finish_reason == "abort":
            raise EngineFailed("the answer was ended from outside", remedy="ask again")
        return generation

    # ----------------------------------------------------------------- which sample

    def _match(self, session: Session, messages: list[Message], tools: list[Tool], temperature: float) -> Asked:
        """Which sample the request extends. Changes nothing. Blocks for a millisecond or two."""
        wanted = [mark(message) for message in messages]
        for line in reversed(session.lines):
            if line.asked is not None or line.tools != tools or line.sample.temperature != temperature:
                continue
            known = [mark(message) for message in line.history]
            if known[:-1] == wanted:  # another answer to the same
                return Asked(line.sample.tokens[: line.prompt], messages, tools, temperature, None, "again")
            if known == wanted[: len(known)] and len(known) < len(wanted):
                new = messages[len(known) :]
                longer = self.renderer.bridge(line.sample.tokens, line.history, new, tools)
                if longer is not None:
                    return Asked(longer, [*line.history, *new], tools, temperature, line, "extended")
                return Asked(self.renderer.open(messages, tools), messages, tools, temperature, None, "rewritten")
        how = "drifted" if session.lines else "opened"
        return Asked(self.renderer.open(messages, tools), messages, tools, temperature, None, how)

    def _continue(self, session: Session, prompt: str | list[int], temperature: float) -> Asked:
        """Which sample a text extends: the one whose prompt and answer it begins with. Changes nothing."""
        text = prompt if isinstance(prompt, str) else self.renderer.decode(prompt)
        how = "drifted" if session.lines else "opened"
        for line in reversed(session.lines):
            if line.asked is None or line.sample.temperature != temperature:
                continue
            tokens = line.sample.tokens
            if isinstance(prompt, list):
                if prompt[: len(tokens)] == tokens:
                    return Asked(prompt, [], [], temperature, line, "extended", text)
            elif prompt == line.asked:  # another answer to the same
                return Asked(tokens[: line.prompt], [], [], temperature, None, "again", text)
            elif prompt.startswith(line.asked + line.told):
                longer = self._after(tokens, prompt[len(line.asked + line.told) :])
                exact = longer[: len(tokens)] == tokens
                return Asked(
                    longer, [], [], temperature, line if exact else None, "extended" if exact else "rewritten", text
                )
        ids = self.renderer.encode(prompt) if isinstance(prompt, str) else prompt
        return Asked(ids, [], [], temperature, None, how, text)

    def _after(self, tokens: list[int], rest: str) -> list[int]:
        """`tokens` and then `rest`. An end that the agent was not told it has to write by itself; if it does not, the
        end goes, and all before it stays as it was sampled."""
        if tokens[-1] in self.renderer.stops:
            end = self.renderer.decode(tokens[-1:])
            if not rest.startswith(end):
                return tokens[:-1] + self.renderer.encode(rest)
            rest = rest[len(end) :]
        return tokens + self.renderer.encode(rest)

    def _record(self, session: Session, asked: Asked, generation: Generation, message: Message) -> None:
        self._put(session, asked, generation).history = [*asked.history, message]

    def _put(self, session: Session, asked: Asked, generation: Generation) -> Line:
        line = asked.line
        if line is None:
            line = Line(sample=Recorded(temperature=asked.temperature), history=[], tools=asked.tools)
            session.lines.append(line)
            session.samples.append(line.sample)
        line.sample.put(asked.ids[len(line.sample.tokens) :])
        line.prompt = len(line.sample.tokens)
        line.sample.sampled(generation)
        session.counts["answers"] += 1
        session.counts[asked.how] += 1
        return line


def mark(message: Message) -> bytes:
    """What makes two messages the same: who, the text but for its edges, the calls by their values.

    Agents leave out reasoning, rename calls, write JSON anew; none of this is another history.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    calls: list[Any] = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments", "")
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append([call["function"]["name"], arguments])
    said = json.dumps([message["role"], str(content).strip(), calls], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
