"""What agents say to models, in the words of OpenAI and Anthropic, to our messages and back. Pure.

Guarantee: a parameter that would change what is sampled and that no engine here implements is refused, not passed over.

::

    body ─▶ Dialect.ask ─▶ Ask ─▶ recorder ─▶ Answered ─▶ Dialect.whole                      one body
                                      └─ reasoning, text ─▶ Speech ─▶ begin, open, more, close, end    events
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout.engine.client import Sampling
from rollout.episode.renderer import Message, Tool
from rollout.pool.recorder import AgentReply
from sandbox.errors import Invalid

Body = dict[str, Any]
Event = tuple[str, dict[str, Any]]  # its name, "" where the dialect gives none

NEUTRAL: dict[str, tuple[Any, ...]] = {  # what a parameter may be without changing anything
    "n": (None, 1),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", {"type": "auto"}),
}
MAX_TOKENS_NAMES = (
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
)  # one parameter, as three routes call it
STOP = ("stop", "stop_sequences")

# How an answer ended: ours, OpenAI's completions, Anthropic's messages, the status of OpenAI's responses.
FINISH = {
    "stop": ("stop", "end_turn", "completed"),
    "length": ("length", "max_tokens", "incomplete"),
    "tool_calls": ("tool_calls", "tool_use", "completed"),
    "stop_string": ("stop", "stop_sequence", "completed"),
}


@dataclass(kw_only=True)
class ChatRequest:
    """A request: messages and tools, or a prompt in text or tokens."""

    messages: list[Message] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    instructions: str = ""  # a system's message of this request alone
    prompt: str | list[int] | None = None

    @property
    def instructed(self) -> list[Message]:
        return [*([{"role": "system", "content": self.instructions}] if self.instructions else []), *self.messages]


@dataclass
class ReplyHeader:
    """What is known before the model has spoken."""

    name: str  # of the answer
    model: str
    body: Body
    prompt_tokens: int = 0


@dataclass
class Item:
    """One of the things in an answer. `kind`: reasoning, text, or call, whose text is its arguments."""

    kind: str
    text: str
    at: int = 0  # in the answer
    nth: int = 0  # of its kind
    call: dict[str, Any] = field(default_factory=dict)


Reported = Callable[[ReplyHeader, Item], list[Event]]


def nothing(*_: Any) -> list[Event]:
    return []


def nothing_hidden(_: ReplyHeader) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one route asks and answers."""

    prefix: str  # of the names of its answers
    request: Callable[
        [Body, Sequence[Message]], ChatRequest
    ]  # the second: the conversation before, where the route keeps it
    complete: Callable[[ReplyHeader, AgentReply], dict[str, Any]]
    more: Callable[[ReplyHeader, Item, str], list[Event]]  # of an open item
    end: Callable[[ReplyHeader, AgentReply], list[Event]]
    fail: Callable[[ReplyHeader, dict[str, Any]], list[Event]]  # an error when the stream has begun
    begin: Callable[[ReplyHeader], list[Event]] = nothing
    open: Reported = nothing
    close: Reported = nothing
    hidden: Callable[[ReplyHeader], tuple[str, ...]] = nothing_hidden  # kinds of items that the agent is not shown
    numbered: bool = False  # its events are
    done: str = ""  # the data of a last line


class Speech:
    """One answer in the events of a stream: ``begin(); more("text", "I "); more("text", "poll."); end(answered)``"""

    def __init__(self, dialect: Dialect, frame: ReplyHeader):
        self.dialect, self.frame = dialect, frame
        self._items: list[Item] = []
        self._open: Item | None = None
        self._number = 0

    def begin(self, prompt_tokens: int) -> list[Event]:
        self.frame.prompt_tokens = prompt_tokens
        return self._numbered(self.dialect.begin(self.frame))

    def more(self, kind: str, text: str, call: dict[str, Any] | None = None) -> list[Event]:
        events: list[Event] = []
        if kind in self.dialect.hidden(self.frame):
            return events
        if self._open is None or call is not None or self._open.kind != kind:
            events += self._shut()
            nth = sum(item.kind == kind for item in self._items)
            self._open = Item(kind, "", len(self._items), nth, call or {})
            self._items.append(self._open)
            events += self.dialect.open(self.frame, self._open)
        self._open.text += text
        if text or call is not None:
            events += self.dialect.more(self.frame, self._open, text)
        return self._numbered(events)

    def end(self, answered: AgentReply) -> list[Event]:
        events: list[Event] = []
        reported = {item.kind for item in self._items}
        for item in items(answered):
            if item.kind == "call" or item.kind not in reported:
                events += self.more(item.kind, item.text, item.call or None)
        return events + self._numbered(self._shut() + self.dialect.end(self.frame, answered))

    def fail(self, error: dict[str, Any]) -> list[Event]:
        return self._numbered(self.dialect.fail(self.frame, error))

    def _shut(self) -> list[Event]:
        item, self._open = self._open, None
        return [] if item is None else self.dialect.close(self.frame, item)

    def _numbered(self, events: list[Event]) -> list[Event]:
        if not self.dialect.numbered:
            return events
        self._number += len(events)
        first = self._number - len(events)
        return [(kind, {**event, "sequence_number": first + n}) for n, (kind, event) in enumerate(events)]


def items(answered: AgentReply) -> list[Item]:
    """An answer as a row. One that says nothing has an empty text."""
    said = answered.message
    calls = said.get("tool_calls") or ()
    result = [Item("reasoning", said["reasoning_content"])] if said.get("reasoning_content") else []
    if said["content"] or not calls:
        result.append(Item("text", said["content"]))
    result += [Item("call", call["function"]["arguments"], nth=n, call=call) for n, call in enumerate(calls)]
    for at, item in enumerate(result):
        item.at = at
    return result


# ---------------------------------------------------------------------- requests


def refuse(body: Body, only: dict[str, tuple[Any, ...]]) -> None:
    """Raise where a parameter has another value than these."""
    for name, values in only.items():
        if body.get(name) not in values:
            raise Invalid(f"{name} = {body[name]!r} is not implemented", hint="leave it out")


T = TypeVar("T")


def sampling_of(body: Body, default: Sampling) -> Sampling:
    """How a request wants to be sampled."""
    refuse(body, NEUTRAL)

    def said(name: str, kind: Callable[[Any], T], otherwise: T) -> T:
        return otherwise if body.get(name) is None else kind(body[name])

    try:
        result = Sampling(
            max_tokens=min(
                next((int(body[name]) for name in MAX_TOKENS_NAMES if body.get(name)), 1 << 60), default.max_tokens
            ),
            temperature=said("temperature", float, default.temperature),
            stop_token_ids=default.stop_token_ids,
            seed=said("seed", int, default.seed),
            ignore_eos=default.ignore_eos,
            top_p=said("top_p", float, default.top_p),
            top_k=max(said("top_k", int, default.top_k), 0),
        )
    except (TypeError, ValueError) as error:
        raise Invalid(
            f"max_tokens, temperature, top_p, top_k or seed is no number: {error}", hint="send numbers"
        ) from None
    if result.max_tokens < 1 or not 0 <= result.temperature < 100 or not 0 < result.top_p <= 1:
        raise Invalid("max_tokens must be at least 1, temperature from 0 to 100, top_p above 0 and at most 1")
    return result


def stop_of(body: Body) -> list[str]:
    """The texts that end an answer."""
    result: object = next((body[name] for name in STOP if body.get(name)), [])
    strings: object = [result] if isinstance(result, str) else result
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise Invalid("stop must be a text or a list of texts")
    return strings


def texts(content: object) -> str:
    """The text of a message's content. What else is in it, a picture, would be lost."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "text" in part for part in content):
        raise Invalid("a content has parts that are no text", hint="send text alone")
    return "".join(str(part["text"]) for part in content)


def function(tool: dict[str, Any], parameters: str = "parameters") -> Tool:
    """A tool as our templates get it. `parameters`: how the dialect calls them."""
    retained = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    if tool.get(parameters) is not None:
        retained["parameters"] = tool[parameters]
    return {"type": "function", "function": {"name": tool["name"], **retained}}


def call(name: str, function_name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool, as in our messages."""
    return {"id": name, "type": "function", "function": {"name": function_name, "arguments": arguments}}


def usage(answered: AgentReply, requested: str, said: str, total: str = "") -> dict[str, int]:
    """The counts of an answer, as a dialect calls them."""
    result = {requested: answered.prompt_tokens, said: answered.tokens}
    return {**result, total: answered.prompt_tokens + answered.tokens} if total else result
