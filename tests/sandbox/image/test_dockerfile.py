"""The language of Dockerfiles: pure."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import Invalid
from sandbox.image.dockerfile import BuildMount, parse, substitute


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
        ("FROM a\nRUN <<EOF\nx\nEO", "line 2: the here-document EOF has no end"),
        ("FROM a\nRUN --mount=type=cache x", "--mount=type=cache needs a target"),
        ("FROM a\nRUN --mount=type=secret x", "needs an id"),
        ("FROM a\nRUN --mount=type=bind,target=/x x", "type=bind is not supported"),
        ("FROM a\nRUN --mount=type=cache,target=/x,size=3 x", "size is not supported"),
        ("FROM a\nRUN --network=none x", "--network is not supported"),
        ("FROM a\nADD --checksum=md5:1 https://x/y /z", "--checksum=sha256:HEX"),
        ("FROM a\nADD --checksum=sha256:1 y /z", "--checksum=sha256:HEX"),
        ("FROM a\nCOPY x", "needs a source"),
        ("FROM a\nCOPY https://x/y /z", "COPY cannot fetch https://x/y"),
        ("FROM a\nADD ftp://x/y /z", "ADD cannot fetch ftp://x/y"),
        ("FROM a\nENV 'x", "line 2"),
        ("FROM a\nONBUILD RUN x", "ONBUILD"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        parse(text)


def test_here_documents() -> None:
    (stage,) = parse(
        """FROM a
ENV W=world
RUN <<EOF
echo $W
EOF
RUN python3 <<'PY' > /out
print(1 << 2)
PY
COPY <<"a.txt" <<-b.txt /dest/
hello $W
a.txt
\thello $W
b.txt
RUN echo $((1 << 2)) && cat <<<x
"""
    )
    _, script, piped, copy, none = stage.instructions
    assert script.words == ("echo $W\n",) and script.shell and [each.name for each in script.documents] == ["EOF"]
    assert piped.words == ("python3 <<'PY' > /out\nprint(1 << 2)\nPY",) and piped.shell and not piped.documents
    assert [(each.name, each.text) for each in copy.documents] == [
        ("a.txt", "hello $W\n"),
        ("b.txt", "hello world\n"),
    ]
    assert copy.words == ("/dest/",) and copy.line == 9
    assert none.words == ("echo $((1 << 2)) && cat <<<x",) and not none.documents


def test_mounts() -> None:
    (stage,) = parse(
        """FROM a
RUN --mount=type=cache,target=/root/.cache,sharing=locked --mount=type=secret,id=token,env=TOKEN make
RUN --mount=type=secret,id=key,dst=/etc/key,mode=0440,gid=7,required ["cat", "/etc/key"]
RUN --mount=type=secret,id=plain true
"""
    )
    first, second, third = stage.instructions
    assert first.words == ("make",) and first.shell
    assert first.mounts == (
        BuildMount("cache", "/root/.cache", "/root/.cache", mode=0o755),
        BuildMount("secret", "token", variable="TOKEN"),
    )
    assert second.words == ("cat", "/etc/key") and not second.shell
    assert second.mounts == (BuildMount("secret", "key", "/etc/key", required=True, mode=0o440, owner="0:7"),)
    assert third.mounts[0].target == "/run/secrets/plain"


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(Invalid):
        parse(f"FROM a\n{text}")


@given(st.text(alphabet="$A{}:-+\\x", max_size=40))
def test_substitution_ends(text: str) -> None:
    assert isinstance(substitute(text, {"A": "$A"}), str)
