"""The language of Dockerfiles: pure."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import Invalid
from sandbox.image.dockerfile import parse, substitute


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A-${A}", "1-1"),
        ("${B:-two}", "two"),
        ("${A:-two}", "1"),
        ("${A:+set}${B:+unset}", "set"),
        ("${B:-$A}", "1"),
        (r"\$A", "$A"),
        ("$NONE.", "."),
        ("no dollars", "no dollars"),
    ],
)
def test_variables(text: str, value: str) -> None:
    assert substitute(text, {"A": "1"}) == value


def test_stages_arguments_and_instructions() -> None:
    stages = parse(
        """
# a comment
ARG BASE=debian
FROM ${BASE} AS build
ARG VERSION=1
ENV NAME="a b" PATH=/bin:$VERSION
ENV OLD the rest of it
RUN make \\
    all && echo $NAME
RUN ["cc", "-o", "x"]
WORKDIR /src/$VERSION
FROM scratch
COPY --from=build --chown=1:2 /src/x /y/
USER me
CMD ["/y/x"]
EXPOSE 80
""",
        {"VERSION": "2"},
    )
    build, last = stages
    assert (build.base, build.name, last.base, last.name) == ("debian", "build", "scratch", "1")
    kinds = [step.kind for step in build.instructions]
    assert kinds == ["ARG", "ENV", "ENV", "RUN", "RUN", "WORKDIR"]
    assert build.instructions[0].pairs == {"VERSION": "2"}
    assert build.instructions[1].pairs == {"NAME": "a b", "PATH": "/bin:2"}
    assert build.instructions[2].pairs == {"OLD": "the rest of it"}
    run = build.instructions[3]
    assert run.shell and run.words[0].split() == ["make", "all", "&&", "echo", "$NAME"]
    assert build.instructions[4].words == ("cc", "-o", "x") and not build.instructions[4].shell
    assert build.instructions[5].words == ("/src/2",)
    copy = last.instructions[0]
    assert copy.words == ("/src/x", "/y/") and copy.flags == {"from": "build", "chown": "1:2"}
    assert [step.kind for step in last.instructions] == ["COPY", "USER", "CMD"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM"),
        ("RUN x", "before FROM"),
        ("FROM a b", "FROM IMAGE"),
        ("FROM a\nFROBNICATE b", "line 2: FROBNICATE is not supported"),
        ("FROM a\nRUN <<EOF\nx\nEOF", "here-documents"),
        ("FROM a\nRUN --mount=type=cache x", "--mount"),
        ("FROM a\nCOPY x", "needs a source"),
        ("FROM a\nADD https://x/y /z", "address"),
        ("FROM a\nENV 'x", "line 2"),
        ("FROM a\nONBUILD RUN x", "ONBUILD"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        parse(text)


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(Invalid):
        parse(f"FROM a\n{text}")


@given(st.text(alphabet="$A{}:-+\\x", max_size=40))
def test_substitution_ends(text: str) -> None:
    assert isinstance(substitute(text, {"A": "$A"}), str)
