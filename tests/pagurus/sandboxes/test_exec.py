"""`pagurus exec` and `pagurus run` against a real daemon: outputs as they come, input, signals, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagurus.common import exit_code
from pagurus.sandboxes.exec import given, meant
from sandbox import Sandbox
from sandbox.errors import CommandNotFound, Invalid
from tests.support.daemon_host import Daemon
from tests.support.programs import Program

TIMEOUT = 240.0  # seconds


def begun(daemon: Daemon, *arguments: str) -> Program:
    """`pagurus` under way; its stdin is a pipe that nobody writes to."""
    return Program(
        [sys.executable, "-m", "pagurus", *arguments],
        env={**os.environ, "PAGURUS_RUN": str(daemon.run)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def done(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """`pagurus` to its end; nobody writes to its stdin, and nobody closes it."""
    reader, writer = os.pipe()
    command, environment = [sys.executable, "-m", "pagurus", *arguments], {**os.environ, "PAGURUS_RUN": str(daemon.run)}
    try:
        return subprocess.run(command, env=environment, stdin=reader, capture_output=True, timeout=TIMEOUT, check=False)
    finally:
        os.close(reader)
        os.close(writer)


def closed(process: Program) -> int:
    try:
        return process.wait(TIMEOUT)
    finally:
        process.end()


def run_in(sb: Sandbox, daemon: Daemon, program: str) -> bytes:
    return done(daemon, "exec", sb.id, "sh", "-c", f"grep -l '^{program}$' /proc/[0-9]*/comm").stdout


async def test_output_comes_as_it_is_written(daemon: Daemon, sb: Sandbox) -> None:
    waiting = "printf 'a\\0b\\n'; echo no >&2; until [ -e /go ]; do sleep 0.02; done; echo over"
    with begun(daemon, "exec", sb.id, "sh", "-c", waiting) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"a\0b\n" and process.stderr.readline() == b"no\n"
        assert done(daemon, "exec", sb.id, "touch", "/go").returncode == 0  # so the command had not ended
        assert process.stdout.read() == b"over\n" and closed(process) == 0


async def test_all_output_comes(daemon: Daemon, sb: Sandbox) -> None:
    much = done(daemon, "exec", sb.id, "sh", "-c", "head -c 3000001 /dev/zero; head -c 1500000 /dev/zero >&2")
    assert (len(much.stdout), len(much.stderr), much.returncode) == (3_000_001, 1_500_000, 0)
    assert len(done(daemon, "run", "debian", "head", "-c", "3000001", "/dev/zero").stdout) == 3_000_001


async def test_json_is_collected(daemon: Daemon, sb: Sandbox) -> None:
    reported = done(daemon, "exec", "--json", sb.id, "sh", "-c", "echo out; echo no >&2; exit 7")
    said = json.loads(reported.stdout)
    assert (reported.returncode, said["exit_code"], reported.stderr) == (7, 7, b"")
    assert (said["stdout"], said["stderr"]) == ("out\n", "no\n")


async def test_json_counts_what_it_drops(daemon: Daemon, sb: Sandbox) -> None:
    said = json.loads(done(daemon, "exec", "--json", sb.id, "head", "-c", "3000001", "/dev/zero").stdout)
    assert (len(said["stdout"]), said["stdout_dropped"]) == (1 << 20, 3_000_001 - (1 << 20))


async def test_variables(daemon: Daemon, sb: Sandbox) -> None:
    shown = done(daemon, "exec", "-e", "A=1 2", "--env", "B=x=y", sb.id, "sh", "-c", 'echo "$A,$B"')
    assert shown.stdout == b"1 2,x=y\n"
    assert done(daemon, "run", "-e", "A=3", "debian", "sh", "-c", "echo $A").stdout == b"3\n"
    refused = done(daemon, "exec", "--env", "A", sb.id, "true")
    assert refused.returncode == 125 and b"NAME=VALUE" in refused.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "exit 1"], 1),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
        (["sh", "-c", "kill -9 $$"], 137),
    ],
)
async def test_codes(daemon: Daemon, sb: Sandbox, command: list[str], code: int) -> None:
    assert done(daemon, "exec", sb.id, *command).returncode == code
    assert done(daemon, "exec", "--json", sb.id, *command).returncode == code
    assert done(daemon, "shell", sb.id, *command).returncode == code


async def test_codes_of_our_own(daemon: Daemon, sb: Sandbox) -> None:
    assert done(daemon, "exec", "no-such-sandbox", "true").returncode == 125
    assert done(daemon, "exec", "--cwd", "/nowhere", sb.id, "true").returncode == 125
    assert done(daemon, "run", "no-such-image", "true").returncode == 125
    assert done(daemon, "exec", "--timeout", "0.2", sb.id, "sleep", "1000").returncode == 124
    assert done(daemon, "exec").returncode == 2


def test_a_program_cannot_choose_its_code_by_its_name() -> None:
    assert exit_code(CommandNotFound("x: no such program: cannot be executed (Permission denied)")) == 126
    assert exit_code(CommandNotFound("cannot be executed: no such program")) == 127
    assert exit_code(Invalid("x: no such program")) == 125


async def test_an_interrupt_ends_the_command(daemon: Daemon, sb: Sandbox) -> None:
    with begun(daemon, "exec", sb.id, "sh", "-c", "echo up; sleep 1000; echo after") as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        while not run_in(sb, daemon, "sleep"):  # dash loses a signal that its child gets just before it becomes `sleep`
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert closed(process) == 130
        assert run_in(sb, daemon, "sleep") == b""


async def test_a_second_interrupt_kills_it(daemon: Daemon, sb: Sandbox) -> None:
    stubborn = "trap 'echo caught' INT; echo up; while :; do sleep 0.05; done"
    with begun(daemon, "exec", "--user", "nobody", sb.id, "sh", "-c", stubborn) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"caught\n"
        process.send_signal(signal.SIGINT)
        assert closed(process) == 137


async def test_a_reader_that_goes_away_ends_the_command(daemon: Daemon, sb: Sandbox) -> None:
    with begun(daemon, "exec", sb.id, "yes") as process:
        assert process.stdout is not None and process.stdout.read(4) == b"y\ny\n"
        process.stdout.close()
        assert process.wait(TIMEOUT) == 141
        closed(process)
        deadline = time.monotonic() + TIMEOUT
        while run_in(sb, daemon, "yes"):  # the daemon sees it at its own time
            assert time.monotonic() < deadline


# --------------------------------------------------------------------------- what stdin is taken for the command


class Stdin(io.TextIOWrapper):
    def __init__(self, fd: int) -> None:
        super().__init__(os.fdopen(fd, "rb"))


def test_an_open_pipe_is_no_input_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with Stdin(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert given(False) == b""
        os.write(writer, b"data")
        os.close(writer)
        assert given(False) == b"data"


def test_input_that_is_asked_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        os.write(writer, b"late")
        os._exit(0)
    os.close(writer)
    with Stdin(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert given(True) == b"late"
    os.waitpid(child, 0)


def test_a_file_is_input_and_a_device_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\0b")
    with Stdin(os.open(tmp_path / "in", os.O_RDONLY)) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert given(False) == b"a\0b"
    with Stdin(os.open("/dev/zero", os.O_RDONLY)) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert given(False) == b""
    monkeypatch.setattr(sys, "stdin", None)
    assert given(False) == b""


@pytest.mark.parametrize(
    ("words", "run"),
    [
        (["ls", "-l"], ["ls", "-l"]),
        (["--", "ls", "-l"], ["ls", "-l"]),
        (["ls | wc -l"], "ls | wc -l"),
        (["echo $HOME"], "echo $HOME"),
        (["echo a\necho b"], "echo a\necho b"),
        (["\tcd /\n\tls"], "\tcd /\n\tls"),
        (["sh", "-c", "ls | wc -l"], ["sh", "-c", "ls | wc -l"]),
        (["true"], ["true"]),
        ([], []),
    ],
)
def test_one_quoted_word_is_a_line_for_a_shell(words: list[str], run: str | list[str]) -> None:
    assert meant(words) == run
