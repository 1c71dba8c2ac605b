"""Conversations and preferences as tokens, by the model's own chat template.

Guarantee: a token is learned from if, and only if, the template puts it into a message of the assistant (its end
included): what opens the message, other messages and padding are not. A template that shows earlier answers otherwise
than they were said (it drops their reasoning) gives a piece of its own to each answer.

::

    {"messages": [...]} ─┐                                ┌▶ tokens  <|user|> hi <|assistant|> hello <|end|>
    {"prompt", "completion"} ─▶ messages ─▶ template ─────┴▶ mask        0    0        0         1      1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollout.episode.renderer import ChatRenderer, Message
from sandbox.errors import Invalid
from trainer.batches.sample import Sample

ASSISTANT = "assistant"


class PreferencePair(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to one prompt, as samples. Example: ``PreferencePair(chosen=..., rejected=...)``"""

    chosen: Sample
    rejected: Sample


def conversation(row: Mapping[str, Any], *, answer: str = "completion") -> list[Message]:
    """The messages of a row: ``messages`` (or ``conversations``), or ``prompt`` and ``completion``, which are texts or
    messages."""
    result = row.get("messages", row.get("conversations"))
    if result is None:
        if answer not in row:
            raise Invalid(f"a row has neither messages nor {answer}", hint=f"it has: {', '.join(map(str, row))}")
        result = [*_messages(row.get("prompt", []), "user"), *_messages(row[answer], ASSISTANT)]
    if not isinstance(result, list) or not result:
        raise Invalid("the messages of a row are no list", hint='[{"role": "user", "content": "..."}, ...]')
    return [_message(item) for item in result]


def _messages(said: str | Iterable[Message], role: str) -> list[Message]:
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)


def _message(said: object) -> Message:
    if not isinstance(said, dict):
        raise Invalid(f"{said!r:.40} is no message", hint='{"role": "user", "content": "..."}')
    if "from" in said and "role" not in said:  # of ShareGPT
        roles = {"human": "user", "gpt": ASSISTANT}
        said = {"role": roles.get(str(said["from"]), said["from"]), "content": said.get("value", "")}
    if not isinstance(said.get("role"), str):
        raise Invalid("a message has no role", hint='{"role": "user", "content": "..."}')
    result: Message = said
    return result


def samples(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, name: str = "",
    last: bool = False,
) -> list[Sample]:  # fmt: skip
    """Those of a conversation: one, unless the template rewrites history. `last`: only the last answer is learned."""
    answers = [at for at, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not answers:
        raise Invalid(f"{name or 'a conversation'} has no answer", hint="one message needs the role assistant")
    learned = answers[-1:] if last else answers
    tokens: list[int] = []
    mask: list[int] = []
    pieces: list[tuple[list[int], list[int]]] = []
    for at in learned:
        before = renderer.open(messages[:at], tools)
        after = renderer.closed(messages[: at + 1], tools)
        if after[: len(before)] != before:
            raise Invalid(
                f"{name or 'a conversation'}: the template does not open message {at} as it shows it",
                hint="a template must show an answer behind its generation prompt",
            )
        if before[: len(tokens)] == tokens:
            mask += [0] * (len(before) - len(tokens))
        else:
            pieces.append((tokens, mask))
            mask = [0] * len(before)
        mask += [1] * (_end(renderer, after, len(before)) - len(before))
        mask += [0] * (len(after) - len(mask))
        tokens = after
    pieces.append((tokens, mask))
    return [
        Sample(tokens=ids, mask=bits, logprobs=[0.0] * len(ids), name=name, group=name)
        for ids, bits in pieces
        if any(bits)
    ]


def _end(renderer: ChatRenderer, ids: Sequence[int], start: int) -> int:
    """Behind the token that ends the answer; what a template writes after it (a line feed) is not the answer's."""
    for at in range(start, len(ids)):
        if ids[at] in renderer.stops:
            return at + 1
    return len(ids)


def preference(renderer: ChatRenderer, row: Mapping[str, Any], *, name: str = "") -> PreferencePair:
    """``prompt``, ``chosen`` and ``rejected``; or two conversations that end in the answers."""
    made = []
    for which in ("chosen", "rejected"):
        if which not in row:
            raise Invalid(f"{name or 'a row'} has no {which}", hint="rows have prompt, chosen and rejected")
        messages = conversation(row, answer=which) if "prompt" in row else [_message(item) for item in row[which]]
        (sample,) = samples(renderer, messages, row.get("tools") or (), name=name, last=True)
        made.append(sample)
    return PreferencePair(chosen=made[0], rejected=made[1])
