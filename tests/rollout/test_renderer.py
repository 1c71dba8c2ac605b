"""Messages to tokens and back, over the real templates of many families (tests/support/chat_models.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.episode.renderer import ChatRenderer, Message
from tests.support.chat_models import FAMILIES, NO_TOOLS, need_models, renderer

pytestmark = pytest.mark.filterwarnings("default")
EVERY = ["smollm2", *FAMILIES]
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
WORDS = st.text(alphabet="abc XYZ\n01{}\"'é<>|_/", min_size=1, max_size=24).map(str.strip).filter(bool)
THOUGHTS = st.text(alphabet="abc XYZ0", min_size=1, max_size=16).map(str.strip).filter(bool)


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    need_models()


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[str, str, bool, str]]:
    """What the model says (content, reasoning, calls?) and what comes back."""
    item = st.tuples(WORDS, st.one_of(st.just(""), THOUGHTS), st.booleans(), WORDS)
    return draw(st.lists(item, min_size=1, max_size=4))


def said(r: ChatRenderer, name: str, turn: tuple[str, str, bool, str]) -> tuple[Message, Message]:
    content, reasoning, calls, back = turn
    message: Message = {"role": "assistant", "content": content}
    if reasoning and "think" in str(r.tokenizer.chat_template):
        message["reasoning_content"] = reasoning
    if not calls or name in NO_TOOLS or name == "smollm2":
        return message, {"role": "user", "content": back}
    function = {"name": "bash", "arguments": json.dumps({"command": content})}
    message["content"] = ""
    message["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    return message, {"role": "tool", "tool_call_id": "call00001", "name": "bash", "content": back}


def spelt(r: ChatRenderer, text: str, cuts: list[int]) -> list[int]:
    """Tokens of a text as a model might sample them: not as the tokenizer would spell it."""
    ids, last = [], 0
    for cut in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        ids += r._encoder.encode(text[last:cut], add_special_tokens=False).ids
        last = cut
    return ids


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversation=turns(), cuts=st.lists(st.integers(1, 60), max_size=5))
def test_a_bridge_extends_the_very_tokens_and_says_what_the_template_says(
    name: str, conversation: list[tuple[str, str, bool, str]], cuts: list[int]
) -> None:
    r = renderer(name)
    history: list[Message] = [{"role": "user", "content": "begin"}]
    tools = [] if name in NO_TOOLS or name == "smollm2" else [BASH]
    ids = r.open(history, tools)
    assert r.decode(ids) == r._text(history, tools, True)
    for turn in conversation:
        message, new = said(r, name, turn)
        prompt, complete = r._text(history, tools, True), r._text([*history, message], tools, False)
        if not complete.startswith(prompt):
            return  # this template gives no such message after this prompt
        body = complete[len(prompt) :]
        for stop in r._ends:
            body = body.partition(stop)[0]
        sampled = [*spelt(r, body, cuts), r.stops[0]]
        history.append(message)
        longer = r.bridge(ids + sampled, history, [new], tools)
        history.append(new)
        if longer is None:
            ids = r.open(history, tools)  # a new sample
            continue
        assert longer[: len(ids) + len(sampled)] == ids + sampled
        if r.stops[0] != r.stops[-1]:
            return  # the text then names the end that the template would have chosen
        assert r.decode(longer) == r._text(history, tools, True)
        ids = longer


# What each family shows of a conversation so far, once something follows. `docs/models.md` lists the same.
CASES: dict[str, Message] = {
    "plain": {"role": "assistant", "content": "it is"},
    "thought": {"role": "assistant", "content": "it is", "reasoning_content": "let me see"},
}
EXTENDS: dict[tuple[str, str], set[str]] = {
    ("plain", "user"): {
        "smollm2", "qwen2.5", "qwen3-2507", "llama-3.1", "llama-3.2", "gemma3", "phi-3", "cohere2", "lfm2", "glm4-moe",
    },
    ("thought", "user"): {"smollm2", "gemma3", "phi-3", "cohere2"},
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("case", CASES)
def test_which_families_rewrite_what_was_said(name: str, case: str) -> None:
    r = renderer(name)
    history: list[Message] = [{"role": "user", "content": "begin"}, CASES[case]]
    ids = [*r.open(history[:1]), *spelt(r, "it is", []), r.stops[-1]]
    got = r.bridge(ids, history, [{"role": "user", "content": "and now?"}])
    assert (got is not None) == (name in EXTENDS[case, "user"])


@pytest.mark.parametrize("name", EVERY)
def test_an_answer_that_was_cut_is_closed_by_the_bridge(name: str) -> None:
    r = renderer(name)
    history: list[Message] = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": "it is"}]
    ids = [*r.open(history[:1]), *spelt(r, "it is", [])]
    got = r.bridge(ids, history, [{"role": "user", "content": "and now?"}])
    assert (got is not None) == (name in EXTENDS["plain", "user"])
    if got is not None:
        assert got[: len(ids)] == ids
        complete = r._text([*history, {"role": "user", "content": "and now?"}], [], True)
        assert complete.endswith(r.decode(got[len(ids) :])) and any(end in complete for end in r._ends)


@pytest.mark.parametrize("name", EVERY)
def test_text_of_a_sandbox_never_becomes_a_special_token(name: str) -> None:
    r = renderer(name)
    hostile = f"x{''.join(r._marked[:6])}{r._ends[0]}y"
    quiet, loud = ([{"role": "user", "content": text}] for text in ("xy", hostile))
    special = set(r._encoder.get_added_tokens_decoder())
    count = [sum(token in special for token in r.open(messages)) for messages in (quiet, loud)]
    assert count[0] == count[1] and hostile in r.decode(r.open(loud))


HERMES = '{"name": "bash", "arguments": {"command": "ls"}}'
SPOKEN: dict[str, tuple[str, str]] = {
    "qwen3": ("<think>\nwhy\n</think>\n\nI look.\n", f"<tool_call>\n{HERMES}\n</tool_call>"),
    "qwen3.5": (
        "why\n</think>\n\nI look.\n",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
    ),
    "llama-3.1": ("", '{"name": "bash", "parameters": {"command": "ls"}}'),
    "glm4-moe": (
        "\n<think>why</think>\nI look.\n",
        "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>",
    ),
    "smollm2": ("<think>why</think>I look. ", f"<tool_call>{HERMES}</tool_call>"),
    "phi-3": ("I look. ", f"<tool_call>{HERMES}</tool_call>"),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_calls_and_reasoning_are_read_in_the_family_s_own_form(name: str) -> None:
    r, (text, call) = renderer(name), SPOKEN[name]
    assert name == "smollm2" or r.family.name == FAMILIES[name][3]
    prompt = r.open([{"role": "user", "content": "begin"}], [BASH])
    result = r.parse([*spelt(r, text + call, []), r.stops[0]], prompt, [BASH])
    assert [(item.name, json.loads(item.arguments)) for item in result.calls] == [("bash", {"command": "ls"})]
    assert result.reasoning.strip() == ("why" if "why" in text else "") and not result.broken
    assert "I look." in result.content or "look" not in text


@pytest.mark.parametrize("name", SPOKEN)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nonsense_of_a_model_is_read_without_an_error(name: str, data: Any) -> None:
    r = renderer(name)
    top = r._encoder.get_vocab_size()
    marks = sorted(r._encoder.get_added_tokens_decoder())
    token = st.one_of(st.integers(0, top - 1), st.sampled_from(marks))
    r.parse(data.draw(st.lists(token, max_size=30)), r.open([{"role": "user", "content": "begin"}]))
