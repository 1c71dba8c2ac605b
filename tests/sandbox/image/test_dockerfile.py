"""The language of Dockerfiles and what it means: pure."""

from __future__ import annotations

import contextlib
import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import Invalid, Unsupported
from sandbox.image.dockerfile import instructions, parse
from sandbox.image.run_mounts import BuildMount
from sandbox.image.stages import (
    PATH,
    Action,
    BuildArguments,
    CopyInstruction,
    DirectoryAction,
    RunAction,
    StageState,
    apply,
)
from sandbox.messages import ImageConfig

AMD64 = platform.machine() == "x86_64"


def meaning(
    text: str, config: ImageConfig | None = None, arguments: dict[str, str] | None = None
) -> tuple[StageState, list[Action]]:
    """The state behind the last stage, each begun from `config` or from the stage before it, and its actions."""
    file = parse(text)
    outside = BuildArguments.of(file, arguments or {})
    state, actions = StageState.of(config or ImageConfig()), list[Action]()
    for number, stage in enumerate(file.stages):
        outside.base(stage)
        state, actions = StageState.of(state.config, state.scope if number else None), []
        for instruction in stage.instructions:
            state, action = apply(instruction, state, outside)
            actions += [action] if action is not None else []
    return state, actions


def test_variables_begin_with_those_of_the_base() -> None:
    base = ImageConfig(env={"PATH": "/usr/bin", "APP_HOME": "/srv/app"}, workdir="/w", user="me")
    state, actions = meaning("FROM a\nENV PATH=/opt/x/bin:$PATH\nWORKDIR $APP_HOME\nWORKDIR sub/../x", base)
    assert state.config.env["PATH"] == "/opt/x/bin:/usr/bin" and state.config.workdir == "/srv/app/x"
    assert actions == [DirectoryAction("/srv/app", "me"), DirectoryAction("/srv/app/x", "me")]
    state, _ = meaning("FROM a AS b\nARG V=1\nENV E=$V\nFROM b\nENV F=$E$V")
    assert state.config.env == {"PATH": PATH, "E": "1", "F": "11"}  # arguments are inherited by stages


def test_arguments() -> None:
    text = "ARG V=1\nARG W=$V\nFROM a\nENV X=$V\nARG V\nARG W\nARG Z=z$V\nENV Y=$V$W$Z"
    assert meaning(text)[0].config.env == {"PATH": PATH, "X": "", "Y": "11z1"}
    assert meaning(text, arguments={"V": "2"})[0].config.env["Y"] == "22z2"
    text = "FROM a\nARG TARGETARCH\nENV A=$TARGETARCH\nARG A=b\nRUN x"
    state, (run,) = meaning(text, arguments={"http_proxy": "p"})
    assert isinstance(run, RunAction) and run.variables["A"] == "b" and run.variables["http_proxy"] == "p"
    if AMD64:
        assert state.config.env["A"] == "amd64"
    with pytest.raises(Invalid, match=r"line 2: .*V: needed"):
        meaning("FROM a\nENV A=${V:?needed}")


def test_words_flags_and_forms() -> None:
    state, actions = meaning(
        """\ufeff# escape=\\
FROM a
ENV FLAGS="-O2 -g" C='$FLAGS'
ENV CFLAGS=$FLAGS OLD=$C
ENV NAME the rest  of it
RUN make \\
# a comment

    all
RUN ["cc", "-o", "x"]
SHELL ["/bin/bash", "-ec"]
RUN one
CMD two
COPY --chown="1:2" --chmod=u+x --parents --exclude=*.md --exclude=x --link ["a b", "$OLD", "to dir/"]
EXPOSE 80 $NONE 8000-8001/udp
VOLUME /v ["/j"]
STOPSIGNAL SIGINT
HEALTHCHECK --interval=1m30s --retries=3 CMD curl -f x
ONBUILD COPY <<E /x
text
E
LABEL a=b "c d"="e f"
MAINTAINER me you
USER me
"""
    )
    config = state.config
    assert config.env == {
        "PATH": PATH,
        "FLAGS": "-O2 -g",
        "C": "$FLAGS",
        "CFLAGS": "-O2 -g",
        "OLD": "$FLAGS",
        "NAME": "the rest  of it",
    }
    first, second, third, copy = actions
    assert isinstance(first, RunAction) and first.command[2].split() == ["make", "all"]
    assert isinstance(second, RunAction) and second.command == ("cc", "-o", "x")
    assert isinstance(third, RunAction) and third.command == ("/bin/bash", "-ec", "one")
    assert isinstance(copy, CopyInstruction) and copy.sources == ("a b", "$FLAGS") and copy.target == "/to dir/"
    assert (copy.owner, copy.mode, copy.parents, copy.exclude) == ("1:2", "u+x", True, ("*.md", "x"))
    assert config.cmd == ["/bin/bash", "-ec", "two"] and config.shell == ["/bin/bash", "-ec"]
    assert config.exposed_ports == ["80/tcp", "8000/udp", "8001/udp"] and config.stop_signal == "SIGINT"
    assert config.health_check is not None and config.health_check.test == ["CMD-SHELL", "curl -f x"]
    assert (config.health_check.interval, config.health_check.retries) == (90_000_000_000, 3)
    assert config.on_build == ["COPY <<E /x\ntext\nE"] and config.labels == {"a": "b", "c d": "e f"}
    assert (config.author, config.user) == ("me you", "me")
    (trigger,) = instructions(config.on_build[0])
    assert trigger.kind == "COPY" and trigger.documents[0].text == "text\n"


def test_entry_points_forget_the_command_of_the_base() -> None:
    base = ImageConfig(cmd=["old"], entrypoint=["first"])
    assert meaning('FROM a\nENTRYPOINT ["e"]', base)[0].config.cmd == []
    assert meaning('FROM a\nCMD ["c"]\nENTRYPOINT ["e"]', base)[0].config.cmd == ["c"]
    assert meaning("FROM a\nENTRYPOINT []", base)[0].config.entrypoint == []
    assert meaning("FROM a\nENTRYPOINT", base)[0].config.entrypoint == ["/bin/sh", "-c", ""]
    assert meaning("FROM a\nUSER $NONE\nWORKDIR /a//b/\nWORKDIR $NONE", base)[0].config.user == ""


def test_here_documents() -> None:
    _, actions = meaning(
        """FROM a
ENV W=world
RUN <<EOF
echo $W
EOF
RUN python3 <<'PY' > /out
print(1 << 2)
PY
RUN <<-X
#!/usr/bin/env python3
\tX
COPY <<"a.txt" <<-b.txt /dest/
hello $W 'x'
a.txt
\thello $W 'x'
b.txt
RUN echo $((1 << 2)) && cat <<<x
"""
    )
    script, piped, program, copy, none = actions
    assert isinstance(script, RunAction) and script.command[-1] == "echo $W\n" and not script.script
    assert isinstance(piped, RunAction) and piped.command[-1] == "python3 <<'PY' > /out\nprint(1 << 2)\nPY"
    assert (
        isinstance(program, RunAction) and program.script == "#!/usr/bin/env python3\n" and program.script_name == "X"
    )
    assert isinstance(copy, CopyInstruction) and copy.target == "/dest/" and not copy.sources
    assert copy.documents == (("a.txt", "hello $W 'x'\n"), ("b.txt", "hello world 'x'\n"))
    assert isinstance(none, RunAction) and none.command[-1] == "echo $((1 << 2)) && cat <<<x"


def test_mounts() -> None:
    _, actions = meaning(
        """FROM a
WORKDIR /w
ENV D=/root
RUN --mount=type=cache,target=$D/.cache,sharing=locked --mount=type=secret,id=token,env=TOKEN make
RUN --mount=type=secret,id=key,dst=/etc/key,mode=0440,gid=7,required ["cat", "/etc/key"]
RUN --mount=from=b,source=/x,target=sub,rw --mount=type=tmpfs,target=/t --mount=type=secret,id=plain true
"""
    )
    first, second, third = (item for item in actions if isinstance(item, RunAction))
    assert first.mounts == (
        BuildMount("cache", "/root/.cache", "/root/.cache", mode=0o755),
        BuildMount("secret", id="token", variable="TOKEN"),
    )
    assert second.mounts == (BuildMount("secret", "/etc/key", "key", required=True, mode=0o440, owner="0:7"),)
    assert third.mounts[0] == BuildMount("bind", "/w/sub", origin="b", source="/x")
    assert third.mounts[1].kind == "tmpfs" and third.mounts[2].target == "/run/secrets/plain"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM"),
        ("# nothing", "no FROM"),
        ("RUN x", "line 1: RUN before FROM"),
        ("FROM a b", "FROM IMAGE"),
        ("FROM a AS 1x", "no name of a stage"),
        ("ARG V\nFROM $V", "line 2: FROM names nothing"),
        ("FROM a\nFROBNICATE b", "line 2: .*FROBNICATE"),
        ("FROM a\n\nRUN <<EOF\nx\nEO", "line 3: unterminated heredoc"),
        ("FROM a\nENV x\nRUN y", "line 2: ENV must have two arguments"),
        ("FROM a\nRUN --mount=type=cache x", "--mount=type=cache needs a target"),
        ("FROM a\nRUN --mount=type=secret x", "needs an id"),
        ("FROM a\nRUN --mount=type=cache,target=/x,size=3 x", "size is not supported"),
        ("FROM a\nRUN --mount=target=/ x", "not a place for a mount"),
        ("FROM a\nRUN --network=host x", "--network=host is not supported"),
        ("FROM a\nRUN --security=insecure x", "--security=insecure is not supported"),
        ("FROM a\nRUN --device=x x", "--device is not supported"),
        ("FROM a\nADD --checksum=md5:1 https://x/y /z", "--checksum=sha256:HEX"),
        ("FROM a\nADD --checksum=sha256:1 y /z", "goes with one address"),
        ("FROM a\nCOPY x", "needs a source"),
        ("FROM a\nCOPY --chown=1 --chown=2 x y", "--chown is there twice"),
        ("FROM a\nCOPY --link=maybe x y", "true or false"),
        ("FROM a\nCOPY --chmod=9 x y", "no mode"),
        ("FROM a\nCOPY --from=$X x y", "no variables"),
        ("FROM a\nCOPY https://x/y /z", "COPY cannot fetch https://x/y"),
        ("FROM a\nADD ftp://x/y /z", "ADD cannot fetch ftp://x/y"),
        ("FROM a\nENV A='x", "line 2: .*single quote"),
        ("FROM a\nENV A=${B^^}", "line 2: .*operator .* is not known"),
        ("FROM a\nONBUILD ONBUILD RUN x", "ONBUILD ONBUILD is not allowed"),
        ("FROM a\nONBUILD FROM x", "ONBUILD FROM is not allowed"),
        ("FROM a\nSHELL bash", "line 2: SHELL"),
        ("FROM a\nEXPOSE 80/http", "no port"),
        ("FROM a\nHEALTHCHECK --interval=3 CMD x", "--interval=3"),
        ("FROM a\nHEALTHCHECK nothing", "line 2: HEALTHCHECK"),
        ("FROM a\nSTOPSIGNAL $NONE", "'' is no signal"),
        ("FROM a\nSTOPSIGNAL SIGNONE", "no signal"),
        ("FROM a\nHEALTHCHECK --interval=1us CMD x", "below a millisecond"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        meaning(text)


@pytest.mark.skipif(not AMD64, reason="of an amd64 machine")
def test_other_platforms_are_refused() -> None:
    for own in ("linux/amd64", "amd64", "linux/x86_64", "$BUILDPLATFORM", "${TARGETPLATFORM}"):
        meaning(f"FROM --platform={own} a")
    for other in ("linux/arm64", "arm64", "windows/amd64", "linux/386"):
        with pytest.raises(Unsupported, match=f"line 2: FROM --platform={other}"):
            meaning(f"ARG X\nFROM --platform={other} a")


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(Invalid):
        meaning(f"FROM a\n{text}")
