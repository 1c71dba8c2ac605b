"""Which part of a stream an agent may have before the journal has all of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.events import EventGate


def event(**data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def delta(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


CHAT = [delta("a"), delta('"finish_reason": "stop" data: [DONE]'), delta("", "stop"), b"data: [DONE]\n\n"]
ANTHROPIC = [
    event(type="message_start", message={"content": [], "stop_reason": None}),
    event(type="content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event(type="content_block_delta", index=0, delta={"type": "text_delta", "text": "message_stop"}),
    event(type="content_block_stop", index=0),
    event(type="content_block_start", index=1, content_block={"type": "tool_use", "id": "t", "name": "bash"}),
    event(type="content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": "{}"}),
    event(type="content_block_stop", index=1),
    event(type="message_delta", delta={"stop_reason": "tool_use"}),
    event(type="message_stop"),
]
RESPONSES = [
    event(type="response.created", response={"status": "in_progress"}),
    event(type="response.output_item.done", item={"type": "reasoning"}),
    event(type="response.output_text.delta", delta="x"),
    event(type="response.output_item.done", item={"type": "message", "content": []}),
    event(type="response.function_call_arguments.delta", delta="{"),
    event(type="response.function_call_arguments.done", arguments="{}"),
    event(type="response.output_item.done", item={"type": "function_call"}),
    event(type="response.completed", response={"status": "completed"}),
]
GEMINI = [
    event(candidates=[{"content": {"parts": [{"text": "x"}]}}]),
    event(candidates=[{"content": {"parts": []}, "finishReason": "STOP"}]),
]


@pytest.mark.parametrize(
    ("events", "free"),
    [(CHAT, 2), (ANTHROPIC, 6), (ANTHROPIC[:4] + ANTHROPIC[-2:], 4), (RESPONSES, 5), (GEMINI, 1), ([b": ping\n\n"], 1)],
)
def test_events_go_out_until_an_agent_may_act(events: list[bytes], free: int) -> None:
    gate = EventGate()
    assert [gate.feed(item) for item in events] == [*events[:free], *[b""] * (len(events) - free)]
    assert gate.waiting() == b"".join(events[free:])


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_event_goes_out_when_it_is_complete(end: bytes) -> None:
    gate = EventGate()
    assert gate.feed(b'event: x\ndata: {"a": ') == b""
    assert gate.feed(b'"b"}' + end[:1]) == b""
    assert gate.feed(end[1:]) == b'event: x\ndata: {"a": "b"}' + end
    assert gate.waiting() == b""


@given(st.sampled_from([CHAT, ANTHROPIC, RESPONSES, GEMINI]), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_cuts_in_the_network_change_nothing(events: list[bytes], sizes: list[int]) -> None:
    stream, expected = b"".join(events), EventGate()
    complete = expected.feed(stream)
    gate, out, at = EventGate(), b"", 0
    while at < len(stream):
        size = sizes[at % len(sizes)]
        out += gate.feed(stream[at : at + size])
        at += size
    assert (out, gate.waiting()) == (complete, expected.waiting())
