"""What is told of an answer on its way is the beginning of the whole one, for every family; stop strings end answers at
the very token."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.pool.partial_text import MAX_LENGTH, MAX_STRINGS, SentText, Stops, finalized
from sandbox.errors import Invalid
from tests.support.chat_models import FAMILIES, need_models, renderer

pytestmark = pytest.mark.filterwarnings("default")
WORDS = st.text(alphabet="abc XYZ\n01{}\"'é<>|_/€", min_size=1, max_size=24)
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
TAGS = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"
LLAMA = '{"name": "bash", "parameters": {"command": "ls"}}'


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    need_models()


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Reasoning or none, words, calls in the form of some family or none, as a model writes them."""
    thought = draw(st.one_of(st.just(""), WORDS.map(lambda words: f"<think>\n{words}\n</think>\n\n")))
    words = draw(st.one_of(st.just(""), WORDS))
    calls = draw(st.lists(st.sampled_from([CALL, TAGS, GLM, LLAMA]), max_size=2))
    return thought + words + "\n".join(calls)


@pytest.mark.parametrize("name", ["smollm2", *FAMILIES])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(answer=answers(), piece=st.integers(1, 5))
def test_what_is_told_on_the_way_is_the_beginning_of_the_whole(name: str, answer: str, piece: int) -> None:
    r = renderer(name)
    prompt = r.open([{"role": "user", "content": "x"}])
    ids = [*r.encode(answer), r.stops[0]]
    reported, last_seen = SentText(r.marks), {"reasoning": "", "text": ""}
    for end in range(piece, len(ids) + piece, piece):
        action = r.parse(ids[:end], prompt)
        for kind, text in (("reasoning", action.reasoning), ("text", action.content)):
            last_seen[kind] += reported.more(kind, text)
    complete = r.parse(ids, prompt)
    for kind, text in (("reasoning", complete.reasoning), ("text", complete.content)):
        last_seen[kind] += reported.rest(kind, text)
        assert last_seen[kind].lstrip() == text.lstrip()


def test_text_flows() -> None:
    """All of plain words is told at once, but for blanks and halves of characters."""
    r = renderer("smollm2")
    ids, reported = r.encode("one two three é €uro four"), SentText(r.marks)
    last_seen = [reported.more("text", r.decode(ids[:end])) for end in range(1, len(ids) + 1)]
    assert "".join(last_seen) == "one two three é €uro four" and sum(map(bool, last_seen)) > 6


@pytest.mark.parametrize(
    ("text", "marks", "stays"),
    [
        ("", ["<a>"], ""),
        ("one two", ["<a>"], "one two"),
        ("one two ", ["<a>"], "one two"),
        ("one <", ["<a>"], "one"),
        ("one <a", ["<a>"], "one"),
        ("one <b", ["<a>"], "one <b"),
        ("one <a> two", ["<a>"], "one"),
        ("one <a> two <b>", ["<b>", "<a>"], "one"),
        ("half \ufffd", [], "half"),
        ("ab", ["b", "abc"], ""),
    ],
)
def test_what_of_a_text_stays(text: str, marks: list[str], stays: str) -> None:
    assert finalized(text, marks) == stays


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab\n é", min_size=1, max_size=40),
    strings=st.lists(st.text(alphabet="ab\n é", min_size=1, max_size=6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 40), max_size=6),
    piece=st.integers(1, 6),
)
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    text: str, strings: list[str], cuts: list[int], piece: int
) -> None:
    """However the text is spelt, and in whatever pieces it comes."""
    r = renderer("smollm2")
    ids, last = [], 0
    for cut in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        ids += r.encode(text[last:cut])
        last = cut
    stops = Stops(strings, r.decode)
    result = next((n for end in range(piece, len(ids) + piece, piece) if (n := stops(ids[:end])) is not None), None)
    first = next((n for n in range(1, len(ids) + 1) if any(item in r.decode(ids[:n]) for item in strings)), None)
    assert result == first
    if first is None:
        assert stops.result is None and stops.cut(text) == text
    else:
        assert stops.result in strings and stops.result in r.decode(ids[:first])
        assert stops.cut(r.decode(ids[:first])) == r.decode(ids[:first]).split(str(stops.result))[0]


def test_stop_strings_without_end_are_refused() -> None:
    for strings in ([""], ["x" * (MAX_LENGTH + 1)], ["x"] * (MAX_STRINGS + 1)):
        with pytest.raises(Invalid):
            Stops(strings, lambda ids: "")
