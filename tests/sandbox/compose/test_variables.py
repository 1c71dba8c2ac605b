"""Variables of compose files and the files that define them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.compose.variables import Variables, parse_env

SCOPE = {"A": "1", "EMPTY": "", "LONG_name2": "x y"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("plain", "plain"),
        ("$A", "1"),
        ("${A}", "1"),
        ("a${A}b$LONG_name2!", "a1bx y!"),
        ("$A.$A", "1.1"),
        ("$$A $$$A $$", "$A $1 $"),
        ("${NO}", ""),
        ("${A:-d}${EMPTY:-d}${NO:-d}", "1dd"),
        ("${A-d}|${EMPTY-d}|${NO-d}", "1||d"),
        ("${A:?e}${A?e}|${EMPTY?e}", "11|"),
        ("${A:+o}|${EMPTY:+o}|${NO:+o}", "o||"),
        ("${A+o}|${EMPTY+o}|${NO+o}", "o|o|"),
        ("${NO:-${A}}${NO:-${EMPTY:-${LONG_name2}}}", "1x y"),
        ("${NO:-a:-b}", "a:-b"),
        ("${NO:-}", ""),
        ("${NO:-http://h:80/?q={x}", "http://h:80/?q={x"),
        ("${NO-$$}", "$"),
    ],
)
def test_a_variable_is_replaced(text: str, result: str) -> None:
    assert Variables(SCOPE).expand(text) == result


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("${NO:?needed $A}", "the variable NO is required: needed 1"),
        ("${EMPTY:?}", "required: it is not set"),
        ("${NO?}", "required"),
        ("$", "write $$"),
        ("$(ls)", "write $$"),
        ("${}", "write $$"),
        ("${A", "no brace ends"),
        ("${A!x}", "is no variable"),
        ("${NO:-" * 30 + "}" * 30, "nested"),
    ],
)
def test_what_is_no_variable_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("$", r"\$")):
        Variables(SCOPE).expand(text)


def test_variables_that_are_not_set_are_collected() -> None:
    variables = Variables(SCOPE)
    variables.expand("$NO ${ALSO} ${WITH:-default} $EMPTY")
    assert variables.missing == {"NO", "ALSO"}


@given(st.text(max_size=200))
def test_a_text_with_its_dollars_doubled_is_as_it_was(text: str) -> None:
    assert Variables({}).expand(text.replace("$", "$$")) == text


@given(st.text(alphabet="${}:-?+AB_1 ", max_size=60))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        assert isinstance(Variables(SCOPE).expand(text), str)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("A=1\n\n# c\nB = 2 \n", {"A": "1", "B": "2"}),
        ("export A=1\r\nB=\r\n", {"A": "1", "B": ""}),
        ("A: 1\n", {"A": "1"}),
        ("A=a # comment\nB=a#b\nC='a # b' # c\n", {"A": "a", "B": "a#b", "C": "a # b"}),
        ('A="x\\ny\\"z"\nB=\'x\\ny\'\n', {"A": 'x\ny"z', "B": "x\\ny"}),
        ('A="two\nlines"\nB=1', {"A": "two\nlines", "B": "1"}),
        ("A=1\nB=${A}2\nC=\"$B\"\nD='$B'\nE=$OUT", {"A": "1", "B": "12", "C": "12", "D": "$B", "E": "out"}),
        ('A="\\$OUT"', {"A": "$OUT"}),
        ("OUT\nNOT_SET\n", {"OUT": "out"}),
        ("\ufeffA=1", {"A": "1"}),
        ("A=x=y", {"A": "x=y"}),
        ("OUT=in\nB=$OUT", {"OUT": "in", "B": "out"}),  # the environment goes before the file
    ],
)
def test_an_env_file_is_read(text: str, result: dict[str, str]) -> None:
    assert parse_env(text, {"OUT": "out"}) == result


def test_a_raw_env_file_has_no_quotes_and_no_variables() -> None:
    assert parse_env('A="$B" # x\n', {}, raw=True) == {"A": '"$B" # x'}


@pytest.mark.parametrize(("text", "said"), [("A=1\n=2", "line 2"), ("A b", "line 1"), ("A='x\ny", "does not end")])
def test_what_is_no_env_file_is_refused_by_its_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_env(text, {})


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), st.text(max_size=30), max_size=8))
def test_quoted_values_arrive_as_they_are(values: dict[str, str]) -> None:
    special = str.maketrans({"\\": "\\\\", '"': '\\"', "$": "\\$"})
    plain = {name: value.replace("\r", "") for name, value in values.items()}
    lines = [f'{name}="{value.translate(special)}"' for name, value in plain.items()]
    assert parse_env("\n".join(lines), {}) == plain
