"""Words of Dockerfiles. The table is what BuildKit's reference says, and what its own builder answered."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.image.words import expand, split

VARIABLES = {"A": "1", "EMPTY": "", "V": "foobar.tar.gz", "P": "/usr/local/bin:/usr/bin", "TWO": "a b", "LANG": "de"}

TABLE = [
    ("no dollars", "no dollars"),
    ("$A-${A}", "1-1"),
    ("$A$A", "11"),
    ("$NONE.", "."),
    ("$", "$"),
    ("a$", "a$"),
    ("$ A", "$ A"),
    ("$/x", "$/x"),
    (r"\$A", "$A"),
    (r"\\$A", r"\1"),
    (r"\${A}", "${A}"),
    (r"a\ b", "a b"),
    ("$A_B", ""),
    ("${A}_B", "1_B"),
    ("$1x", "x"),
    ("$12x", "x"),
    ("'$A'", "$A"),
    ('"$A"', "1"),
    ("'\"'", '"'),
    ("\"'$A'\"", "'1'"),
    (r'"\$A"', "$A"),
    (r'"a\"b"', 'a"b'),
    (r'"a\nb"', r"a\nb"),
    (r'"a\\b"', r"a\b"),
    (r"'a\'", "a\\"),
    ("a'b'\"c\"d", "abcd"),
    ("''", ""),
    ("  a  b  ", "  a  b  "),
    ("$TWO", "a b"),
    ("${NONE:-two}", "two"),
    ("${NONE-two}", "two"),
    ("${EMPTY:-two}", "two"),
    ("${EMPTY-two}", ""),
    ("${A:-two}", "1"),
    ("${A-two}", "1"),
    ("${A:+set}${NONE:+set}", "set"),
    ("${EMPTY:+set}", ""),
    ("${EMPTY+set}", "set"),
    ("${NONE+set}", ""),
    ("${A:?why}", "1"),
    ("${EMPTY?why}", ""),
    ("${NONE:-$A}", "1"),
    ("${NONE:-${EMPTY:-${A}}}", "1"),
    ("${NONE:-'$A'}", "$A"),
    ('${NONE:-"$A b"}', "1 b"),
    (r"${NONE:-a\}b}", "a}b"),
    ("${NONE:-}", ""),
    ("${V#foo}", "bar.tar.gz"),
    ("${V#*o}", "obar.tar.gz"),
    ("${V##*o}", "bar.tar.gz"),
    ("${V#x}", "foobar.tar.gz"),
    ("${V#?}", "oobar.tar.gz"),
    ("${V%.*}", "foobar.tar"),
    ("${V%%.*}", "foobar"),
    ("${V%gz}", "foobar.tar."),
    ("${V%x}", "foobar.tar.gz"),
    ("${V%?}", "foobar.tar.g"),
    ("${V##*}", ""),
    ("${V#[f]}", "foobar.tar.gz"),
    ("${V/o/0}", "f0obar.tar.gz"),
    ("${V//o/0}", "f00bar.tar.gz"),
    ("${V/.*/}", "foobar"),
    ("${V//./-}", "foobar-tar-gz"),
    (r"${P//\//_}", "_usr_local_bin:_usr_bin"),
    ("${V/none/x}", "foobar.tar.gz"),
    ("${V/?/x}", "xoobar.tar.gz"),
    ("${NONE#x}${NONE/a/b}", ""),
    ("${V/o/$A}", "f1obar.tar.gz"),
    ("ä${A}ö", "ä1ö"),
    ("a<b", "a<b"),
]


@pytest.mark.parametrize(("text", "value"), TABLE)
def test_expansion(text: str, value: str) -> None:
    assert expand(text, VARIABLES) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${A", "no } ends"),
        ("${", "no } ends"),
        ("${}", "without a name"),
        ("${{A}}", "without a name"),
        ("${:-x}", "without a name"),
        ("${A:x}", "is not known"),
        ("${A!x}", "is not known"),
        ("${A^^}", "is not known"),
        ("${A,}", "is not known"),
        ("${A:#x}", "is not known"),
        ("${NONE:?why}", "NONE: why"),
        ("${NONE?}", "NONE: is not allowed to be unset"),
        ("${EMPTY:?}", "EMPTY: is not allowed to be empty"),
        ("'a", "single quote"),
        ('"a', "double quote"),
        ("${V/a}", "no / ends"),
        ("${V/a/b", "no } ends"),
        ("${NONE:-" * 100, "nested"),
        (r"${V#\x}", "invalid escape"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        expand(text, VARIABLES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" a  b ", ["a", "b"]),
        ("$TWO c", ["a", "b", "c"]),
        ('"$TWO" c', ["a b", "c"]),
        ("'$TWO'", ["$TWO"]),
        (r"a\ b c", ["a b", "c"]),
        ("x$TWO", ["xa", "b"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split(text, VARIABLES) == words


def test_another_escape_and_text_whose_quotes_stay() -> None:
    assert expand("`$A C:\\x", VARIABLES, escape="`") == "$A C:\\x"
    assert expand("'$A' \"$A\" \\$A", VARIABLES, quotes=False) == "'1' \"1\" $A"


@given(st.text(alphabet="$A{}:-+?#%/\\'\" *x", max_size=40))
def test_any_word_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(expand(text, {"A": "$A*"}), str)
