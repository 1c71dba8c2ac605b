"""Patterns of paths. The table is what moby's patternmatcher decides."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.patterns import PatternList, glob, has_wildcards, ignore_lines

TABLE = [
    (["*"], "a/b", True),
    (["*", "!src/app.py"], "src/app.py", False),
    (["*", "!src/app.py"], "src/other.py", True),
    (["*", "!src"], "src/deep/app.py", False),
    (["**/*.py"], "a.py", True),
    (["**/*.py"], "a/b/c.py", True),
    (["**/*.py"], "a/b/c.pyc", False),
    (["*", "!**/*.py"], "a.py", False),
    (["*", "!**/*.py"], "a/b/c.py", False),
    (["*", "!**/*.py"], "a/b/c.txt", True),
    (["**"], "a/b", True),
    (["a/**"], "a/b/c", True),
    (["a/**"], "a", False),
    (["a/**/b"], "a/b", True),
    (["a/**/b"], "a/x/y/b", True),
    (["a/**/b"], "a/x/y/c", False),
    (["**/node_modules"], "node_modules/x", True),
    (["**/node_modules"], "web/node_modules/x/y", True),
    (["**/node_modules"], "web/my_node_modules", False),
    (["*.md", "!README.md"], "README.md", False),
    (["*.md", "!README*.md", "README-secret.md"], "README-secret.md", True),
    (["*.md", "README-secret.md", "!README*.md"], "README-secret.md", False),
    (["*.md"], "docs/a.md", False),
    (["docs/"], "docs/a", True),
    (["temp?"], "temp1", True),
    (["temp?"], "temp", False),
    (["*/temp*"], "a/temp1/x", True),
    (["*/*/temp*"], "a/b/temp", True),
    (["[a-c]x"], "bx", True),
    (["[^a-c]x"], "bx", False),
    (["[^a-c]x"], "dx", True),
    (["a[b/c]d"], "a/d", True),
    ([r"\*"], "*", True),
    ([r"\*"], "a", False),
    ([r"\note"], "note", False),  # as in Go's regular expressions
    ([r"\note"], "\note", True),
    ([r"a\.b"], "a.b", True),
    ([r"\w"], "é", False),
    (["a.b"], "axb", False),
    (["."], "a", False),
    (["a", "!a/b", "a/b/c"], "a/b/x", False),
    (["a", "!a/b", "a/b/c"], "a/b/c/d", True),
    (["a", "!a/b", "a/b/c"], "a/y", True),
    (["foo", "!foo"], "foo/x", False),
]


@pytest.mark.parametrize(("patterns", "path", "value"), TABLE)
def test_matches(patterns: list[str], path: str, value: bool) -> None:
    assert PatternList(patterns).matches(path) is value


def test_lines_of_an_ignore_file() -> None:
    text = "\ufeff# comment\n /abs \n\n!  /x/../y/ \n  # no comment\n.\n/\n"
    assert ignore_lines(text) == ["abs", "!y", "# no comment", ".", "/"]


@pytest.mark.parametrize("wrong", ["!", "[", "[a", "[]a]", "[-]", "[z-a]", "a\\", "\\o", "\\1"])
def test_a_wrong_pattern_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        PatternList([wrong])


def test_globs_stop_at_slashes() -> None:
    assert glob("*.txt").fullmatch("a.txt") and not glob("*.txt").fullmatch("a/b.txt")
    assert glob("a/*/c").fullmatch("a/b/c") and not glob("a/*/c").fullmatch("a/b/b/c")
    assert has_wildcards("a*") and has_wildcards("[a]") and not has_wildcards(r"\*a")


@given(st.text(alphabet="ab*?[]^-!/\\.", max_size=20), st.text(alphabet="ab/.", max_size=12))
def test_any_pattern_decides_or_is_refused(pattern: str, path: str) -> None:
    with contextlib.suppress(ValueError):
        assert PatternList([pattern]).matches(path) in (True, False)
