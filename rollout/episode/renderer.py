"""`Renderer`: messages and tools to tokens by the model's own chat template, and sampled tokens back to a message.

Guarantee (I8): what `bridge` returns begins with the very tokens that it was given; text that a model sampled is never
tokenised. Where the template would show the model another history than the one that it sampled under, `bridge` returns
None, and a new sample begins.

::

    open(messages, tools) ─▶ ids ─▶ engine ─▶ sampled ids ─▶ parse ─▶ Action ─▶ its message, and what is new
                              ▲                                                        │
                              └──────────── bridge: ids + sampled + what is new ◀──────┘

How `bridge` knows: the template renders the history up to the sampled message (P), with it (X), with what is new (Y).
If X begins with P, Y with X, and X holds all that was sampled (reasoning included), then the text after the sampled
message's end is what extends the tokens. If not, the template rewrites history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from rollout import chat_families
from sandbox.errors import Invalid, NotFound

Message = dict[str, Any]  # as in OpenAI's chat completions
Tool = dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool. `arguments` is JSON text."""

    name: str
    arguments: str


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said, read by the format of its family. `broken` are calls that could not be read."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []
    broken: list[str] = []

    def message(self, names: Sequence[str] = ()) -> Message:
        """As a message of OpenAI's kind; `names` are the ids of the calls."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for name, call in zip(names or [f"call_{n}" for n in range(len(self.calls))], self.calls, strict=True)
            ]
        return message


class Renderer(Protocol):
    stops: list[int]  # tokens that end an answer
    marks: list[str]  # texts in an answer that may turn what comes with them into reasoning or calls

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens after which the model speaks."""

    def bridge(
        self, ids: list[int], history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        """`ids` (a prompt and what was sampled after it) extended by the messages `new`, or None.

        `history` are the messages that `ids` stand for; the last one is the sampled one.
        """

    def parse(self, ids: Sequence[int], prompt: Sequence[int] = (), tools: Sequence[Tool] = ()) -> Action:
        """The message in sampled tokens; `prompt` is what they were sampled after, `tools` say of which kind the
        arguments of calls are."""

    def encode(self, text: str) -> list[int]:
        """Text that the caller laid out: the names of special tokens in it are these tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """All of it, special tokens by their names."""


class ChatRenderer:
    """The renderer of a model directory. Example: ``ChatRenderer.load("SmolLM2-135M-Instruct").open([{...}])``"""

    def __init__(self, tokenizer: Any, *, stops: Sequence[int] = (), options: Mapping[str, Any] | None = None):
        """`tokenizer` is one of transformers, with a chat template. `options` are for the template
        (``{"enable_thinking": False}``). `stops` are added to the tokenizer's end of text."""
        if not tokenizer.chat_template:
            raise Invalid("the tokenizer has no chat template", hint="use an instruction-tuned model")
        self.tokenizer, self.options = tokenizer, dict(options or {})
        self.family = chat_families.detect(tokenizer)
        self._encoder: Tokenizer = tokenizer.backend_tokenizer
        self._plain = _without_added(self._encoder)
        added = self._encoder.get_added_tokens_decoder()
        self._marked = sorted((token.content for token in added.values()), key=len, reverse=True)
        ends = {tokenizer.eos_token_id, *stops, *self.family.stops} - {None}
        self.stops = sorted(ends)
        self.marks = [*chat_families.HELD, *chat_families.HELD_OF.get(self.family.name, ())]
        self._ends = [str(self._encoder.id_to_token(end)) for end in self.stops]
        self._shows_tools = "tools" in str(tokenizer.chat_template)

    @classmethod
    def load(cls, directory: Path | str, *, options: Mapping[str, Any] | None = None) -> ChatRenderer:
        """From a Hugging Face directory: its tokenizer, its template, and the ends that its generation config names."""
        from transformers import AutoTokenizer  # seconds to import

        directory = Path(directory)
        if not (directory / "tokenizer.json").exists():
            raise NotFound(f"{directory} has no tokenizer.json", hint="name a Hugging Face directory")
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return cls(tokenizer, stops=end_tokens(directory), options=options)

    # ----------------------------------------------------------------- the three verbs

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return self._encode(self._text(messages, tools, True))

    def closed(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens of messages that end the conversation: what is written down."""
        return self._encode(self._text(messages, tools, False))

    def bridge(
        self, ids: list[int], history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        said = history[-1]
        if said["role"] != "assistant" or any(message["role"] == "assistant" for message in new):
            return None
        try:
            before = self._text(history[:-1], tools, True)
            spoken = self._text(history, tools, False)
            after = self._text([*history, *new], tools, True)
        except Invalid:  # a template that refuses this order of messages
            return None
        if not spoken.startswith(before) or not _holds(spoken[len(before) :], said):
            return None
        rest = self._rest(spoken, after, len(before), ids[-1])
        return None if rest is None else ids + self._encode(rest)

    def parse(self, ids: Sequence[int], prompt: Sequence[int] = (), tools: Sequence[Tool] = ()) -> Action:
        said = list(ids)
        while said and said[-1] in self.stops:
            said.pop()
        content, reasoning, calls, broken = self.family.parse(said, list(prompt), tools)
        return Action(
            content=content,
            reasoning=reasoning,
            calls=[ToolCall(name=name, arguments=arguments) for name, arguments in calls],
            broken=broken,
        )

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(list(ids), skip_special_tokens=False)

    # ----------------------------------------------------------------- parts

    def _rest(self, spoken: str, after: str, start: int, last: int) -> str | None:
        """What follows the sampled message in the text `after`. `start`: where the message begins in `spoken`."""
        ends = [at for end in self._ends if (at := spoken.find(end, start)) >= 0]
        at = min(ends, default=len(spoken))  # a family may end a message by the next one's opening alone
        if not after.startswith(spoken[:at]):
            return None
        rest = after[at:]
        if last not in self.stops:
            return rest  # cut at the limit: the close of the message is put in
        end = str(self._encoder.id_to_token(last))
        return rest[len(end) :] if rest.startswith(end) else None

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], speak: bool) -> str:
        """The template's text. Marked text in contents is guarded, see `_encode`."""
        import jinja2

        shown = [self._guarded(_plain_message(message)) for message in messages]
        if not self._shows_tools:
            shown = chat_families.report_tools(shown, tools)
        try:
            text: str = self.tokenizer.apply_chat_template(
                shown,
                tools=list(tools) or None,
                add_generation_prompt=speak,
                tokenize=False,
                **self.options,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise Invalid(
                f"the model's chat template refuses these messages: {error}", hint="see its template"
            ) from error
        return text

    def _guarded(self, value: object) -> Any:
        """`value` with a mark inside each text that would become a token of its own: contents come from sandboxes."""
        if isinstance(value, str):
            for token in self._marked:
                if token in value and len(token) > 1 and not token.isspace():
                    value = value.replace(token, token[0] + GUARD + token[1:])
            return value
        if isinstance(value, list):
            return [self._guarded(item) for item in value]
        if isinstance(value, dict):
            return {name: self._guarded(item) for name, item in value.items()}
        return value

    def _encode(self, text: str) -> list[int]:
        """Tokens of a template's text. A guarded text is spelt in ordinary tokens."""
        ids: list[int] = []
        while (at := text.find(GUARD)) >= 0:
            token = next(t for t in self._marked if text.startswith(t[0] + GUARD + t[1:], at - 1))
            ids += self.encode(text[: at - 1])
            ids += self._plain.encode(token, add_special_tokens=False).ids
            text = text[at + len(token) :]
        return ids + self.encode(text)


GUARD = "\uf8ff"  # of Unicode's private use


def _plain_message(message: Message) -> Message:
    """Texts in place of parts, arguments of calls as values: what templates expect. A client's own guard is removed."""
    shown = {name: value for name, value in message.items() if value is not None}
    content = shown.get("content", "")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    shown["content"] = str(content).replace(GUARD, "\ufffd")
    if shown.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _value(call["function"].get("arguments", {}))}}
            for call in shown["tool_calls"]
        ]
    else:
        shown.pop("tool_calls", None)
    return shown


def _value(arguments: object) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _holds(text: str, said: Message) -> bool:
    """Whether the template shows all that was said: reasoning, content and the names of the calls."""
    content = said.get("content") or ""
    target = [content if isinstance(content, str) else "", said.get("reasoning_content") or ""]
    target += [call["function"]["name"] for call in said.get("tool_calls") or ()]
    bare = text.replace(GUARD, "")
    return all(part.strip() in bare for part in target)


def _without_added(encoder: Tokenizer) -> Tokenizer:
    """The same tokenizer, to which no text is a token of its own."""
    described = json.loads(encoder.to_str())
    described["added_tokens"], described["post_processor"] = [], None
    return Tokenizer.from_str(json.dumps(described))


def has_template(directory: Path) -> bool:
    """Whether a directory's model speaks by a chat template."""
    if (directory / "chat_template.jinja").exists():
        return True
    config = directory / "tokenizer_config.json"
    return config.exists() and bool(json.loads(config.read_bytes()).get("chat_template"))


def end_tokens(directory: Path) -> list[int]:
    """What ends an answer, as the directory's generation config (or config) says."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            ends = json.loads((directory / name).read_bytes()).get("eos_token_id")
            if ends is not None:
                return ends if isinstance(ends, list) else [ends]
    return []
