"""What differs between families of models: how they write tool calls and reasoning.

The parsers are those of the library `renderers`, behind `FamilyParser.parse`; `TaggedParser` reads text for all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Parsed = tuple[str, str, list[tuple[str, str]], list[str]]  # content, reasoning, (name, arguments as JSON), broken

# Marks of a template, in the order in which they are looked for, and the library's name for the family.
MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "gpt-oss"),
    (("<tool_call>", "<arg_key>"), "glm-4.5"),
    (("<tool_call>", "<function="), "qwen3.5"),
    (("<tool_call>", "<|im_start|>"), "qwen3"),
    (("<minimax:tool_call>",), "minimax-m2"),
    (("<|tool_calls_section_begin|>",), "kimi-k2"),
    (("<｜tool▁calls▁begin｜>",), "deepseek-v3"),
    (("<|python_tag|>",), "llama-3"),
    (("<|start_header_id|>", "<|eot_id|>"), "llama-3"),
)
ENDS = {"glm-4.5": ("<|user|>", "<|observation|>"), "gpt-oss": ("<|return|>", "<|call|>"), "qwen3": ("<|im_end|>",)}
ENDS |= {"qwen3.5": ("<|im_end|>",), "llama-3": ("<|eot_id|>", "<|eom_id|>")}

# What may turn the text after it into reasoning or a call: it is held back while an answer is on its way.
HELD: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "<function=", "<minimax:tool_call>", "<|python_tag|>")
HELD += ("<|channel|>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>")
HELD_OF = {"llama-3": ("{",)}  # a call is JSON without a mark

REPORTED = """You may call functions. They are described in JSON, one per line:
{tools}
To call one, answer with its name and arguments as JSON between <tool_call> and </tool_call>, like
<tool_call>{{"name": "NAME", "arguments": {{}}}}</tool_call>"""
CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


class FamilyParser:
    """Reads by the library's parser of a family."""

    def __init__(self, name: str, parser: Any, stops: Sequence[int]):
        self.name, self._parser, self.stops = name, parser, list(stops)

    def parse(self, ids: list[int], prompt: list[int], tools: Sequence[dict[str, Any]]) -> Parsed:
        described = [tool.get("function", tool) for tool in tools]
        result = self._parser.parse_response(ids, tools=described or None, prompt_ids=prompt or None)
        calls, broken = [], []
        for call in result.tool_calls:
            if call.status == "ok" and call.name:
                calls.append((call.name, _text(call.arguments)))
            else:
                broken.append(call.raw)
        return result.content, result.reasoning_content or "", calls, broken


class TaggedParser:
    """Reads ``<think>`` and ``<tool_call>`` out of the text: what most models without a format of their own write."""

    name = "tagged"

    def __init__(self, encoder: Any):
        self._encoder, self.stops = encoder, list[int]()

    def parse(self, ids: list[int], prompt: list[int], tools: Sequence[dict[str, Any]]) -> Parsed:
        text = self._encoder.decode(ids, skip_special_tokens=False)
        reasoning = ""
        if text.lstrip().startswith("<think>"):
            reasoning, _, text = text.lstrip().removeprefix("<think>").partition("</think>")
        content, calls, broken = calls_in(text)
        return content, reasoning, calls, broken


def calls_in(text: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """What a text says outside its calls, the calls (name, arguments as JSON), and those that cannot be read.

    >>> calls_in('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('', [('add', '{"a": 1}')], [])
    """
    calls, broken = [], []
    for result in CALL.finditer(text):
        try:
            body = json.loads(result[1])
            calls.append((str(body["name"]), _text(body.get("arguments", {}))))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            broken.append(result[0])
    return CALL.sub("", text).strip() if calls else text, calls, broken


def detect(tokenizer: Any) -> FamilyParser | TaggedParser:
    """The family of a tokenizer of transformers, by the marks in its template that are tokens of its vocabulary."""
    template, encoder = str(tokenizer.chat_template), tokenizer.backend_tokenizer
    for marks, name in MARKS:
        if all(mark in template for mark in marks) and all(
            encoder.token_to_id(mark) is not None for mark in marks if mark.startswith("<") and mark.endswith(">")
        ):
            parser = _library(tokenizer, name)
            if parser is not None:
                ends = (encoder.token_to_id(end) for end in ENDS.get(name, ()))
                return FamilyParser(name, parser, [end for end in ends if end is not None])
    return TaggedParser(encoder)


def _library(tokenizer: Any, name: str) -> Any:
    """The library's object for a family; None where this tokenizer lacks a token that the family needs."""
    from renderers.base import create_renderer
    from renderers.configs import config_from_name

    try:
        return create_renderer(tokenizer, config_from_name(name))
    except (AssertionError, KeyError, ValueError):
        return None


def report_tools(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: they are described in the system message, calls and results are
    text."""
    shown = [_as_text(message) for message in messages]
    if tools:
        reported = REPORTED.format(tools="\n".join(json.dumps(tool.get("function", tool)) for tool in tools))
        if shown and shown[0]["role"] == "system":
            shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{reported}"}
        else:
            shown.insert(0, {"role": "system", "content": reported})
    return shown


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning and calls are part of its content."""
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        body = json.dumps({"name": function["name"], "arguments": function["arguments"]})
        parts.append(f"<tool_call>{body}</tool_call>")
    content = "\n".join(parts)
    if message.get("reasoning_content"):
        content = f"<think>{message['reasoning_content']}</think>{content}"
    retained = {name: value for name, value in message.items() if name not in ("tool_calls", "reasoning_content")}
    return {**retained, "content": content}


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
