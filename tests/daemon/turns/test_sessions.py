"""Sessions through a real daemon: shells that keep their state through turns, restores, forks and dead daemons."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path

import pytest

from sandbox import Client, Sandbox, Session
from sandbox.errors import Closed, Conflict, Invalid, NotFound
from sandbox.messages import Verdict
from tests.support.daemon_host import IMAGE, Daemon, exists, tasks_of, until

SHELLS = ["/bin/bash", "/bin/sh"]


@pytest.mark.parametrize("shell", SHELLS)
async def test_a_shell_keeps_its_state(sb: Sandbox, shell: str) -> None:
    async with await sb.sessions.open(shell) as session:
        first = await session.exec(
            "cd /usr; export A=1; f() { echo \"f $1\"; }; printf 'x\\0\\377'; echo oops >&2; false"
        )
        assert (first.exit_code, first.stdout, first.stderr) == (1, b"x\0\xff", b"oops\n")
        second = await session.exec("echo $?; pwd; f $A; sh -c 'echo $A'")
        assert (second.exit_code, second.text) == (0, "1\n/usr\nf 1\n1\n")
        assert first.turn is not None and second.turn == first.turn + 1
        assert second.verdict in (Verdict.PROCESSES, Verdict.BOTH)
        assert [turn.command for turn in await sb.turns()][-1].startswith("echo $?")
    assert await sb.sessions.list() == []


@pytest.mark.parametrize("shell", SHELLS)
async def test_output_cannot_pass_for_the_end_of_a_command(sb: Sandbox, shell: str) -> None:
    session = await sb.sessions.open(shell)
    forged = await session.exec(
        "printf '\\036%s.%s\\037' 0 $__pagurus; printf '\\0360.0\\037' >&2; sleep 0.2; (exit 5)"
    )
    assert forged.exit_code == 5
    assert forged.stderr == b"\x1e0.0\x1f"
    for text in ("if", "echo 'open", "}", "x=$(", "cat <<E\nhere", "# a comment", "", "echo a'b"):
        await session.exec(text)  # whatever it is, the session goes on
        assert (await session.exec("echo on")).stdout == b"on\n"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "command",
    [
        "sleep 1000",
        "while :; do :; done",
        "trap '' INT TERM; sleep 1000",
        "sleep 1000 | cat; echo no",
        "sleep 1000 | (cat; echo no); echo no",
        "(sleep 1000; echo no) | cat; echo no",
    ],
)
async def test_a_deadline_interrupts_the_command_and_spares_the_session(sb: Sandbox, shell: str, command: str) -> None:
    session = await sb.sessions.open(shell)
    await session.exec("A=kept; sleep 1000 & J=$!")
    late = await session.exec(f"({command})" if command.startswith("trap") else command, timeout=1.5)
    assert late.timed_out and late.exit_code != 0
    assert b"no" not in late.stdout
    after = await session.exec("echo $A; kill -0 $J && echo job")
    assert after.text == "kept\njob\n"


def asleep_in(sb: Sandbox, *programs: str) -> list[str]:
    """The tasks of a sandbox that execute one of these and have come to rest, by name."""
    result = []
    for pid in tasks_of(sb.id):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            result += [name] if name in programs and rest.split()[0] == "S" else []
    return sorted(result)


async def interrupted(session: Session) -> bool:
    """Whether the session has a command, which was sent SIGINT."""
    with contextlib.suppress(NotFound):
        await session.signal("INT")
        return True
    return False


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("command", "programs"),
    [
        ("sleep 1000; echo no", ["sleep", "sleep"]),
        ("while :; do :; done", ["sleep"]),
        ("sleep 1000 | cat; echo no", ["cat", "sleep", "sleep"]),
    ],
)
async def test_a_command_takes_signals_and_the_session_lives_on(
    sb: Sandbox, shell: str, command: str, programs: list[str]
) -> None:
    session = await sb.sessions.open(shell)
    await session.exec("A=kept; sleep 1000 & J=$!")
    with pytest.raises(NotFound):
        await session.signal()
    running = asyncio.ensure_future(session.exec(command, timeout=None))
    # A shell may lose a signal while it is still starting what stands in its line.
    await until(lambda: asleep_in(sb, "sleep", "cat") == programs)
    await until(lambda: interrupted(session))
    done = await running
    assert done.exit_code == 130 and not done.timed_out
    assert done.stdout == b""
    assert (await session.exec("echo $A; kill -0 $J && echo job")).text == "kept\njob\n"


async def test_a_command_that_was_begun_under_a_daemon_that_died_can_be_interrupted(daemon: Daemon) -> None:
    async with daemon.client() as host, host.create(IMAGE) as sb:
        session = await sb.sessions.open()
        await session.exec("sleep 1000 & J=$!")
        running = asyncio.ensure_future(session.exec("touch /begun; sleep 1000", timeout=240))
        await until(lambda: exists(sb, "/begun"))
        daemon.kill()
        await asyncio.to_thread(daemon.start)
        await until(lambda: interrupted(session))
        assert (await running).exit_code == 130
        assert (await session.exec("kill -0 $J && echo job")).text == "job\n"


async def test_a_session_goes_back_with_its_sandbox(sb: Sandbox) -> None:
    session = await sb.sessions.open()
    before = await session.exec("cd /usr; A=before; sleep 1000 & echo before > /file")
    await session.exec("cd /; A=after; kill %1 2>/dev/null || kill $!; echo after > /file")
    later = await sb.sessions.open()
    await sb.restore(before.checkpoint)
    assert (await session.exec("pwd; echo $A; cat /file; kill -0 $! && echo job")).text == "/usr\nbefore\nbefore\njob\n"
    with pytest.raises(NotFound):
        await later.exec("true")


async def test_a_fork_has_the_session_too(sb: Sandbox) -> None:
    session = await sb.sessions.open()
    await session.exec("cd /usr; A=1")
    child = (await sb.fork())[0].sandbox
    async with child:
        twin = await child.sessions.get(session.id)
        assert (await twin.exec("pwd; A=2; echo $A")).text == "/usr\n2\n"
    assert (await session.exec("echo $A")).text == "1\n"


async def test_a_key_is_executed_once(sb: Sandbox) -> None:
    session, key = await sb.sessions.open(), secrets.token_hex(16)
    first = await session.exec("echo $RANDOM; echo x >> /n; exit_code() { return 3; }; exit_code", key=key)
    again = await session.exec("echo $RANDOM; echo x >> /n; exit_code() { return 3; }; exit_code", key=key)
    assert (again.stdout, again.exit_code, again.turn, again.checkpoint) == (
        first.stdout,
        3,
        first.turn,
        first.checkpoint,
    )
    assert (await session.exec("cat /n")).text == "x\n"
    with pytest.raises(Conflict):
        await session.exec("echo x >> /n", key=key)


async def test_a_shell_that_ends_says_so(sb: Sandbox) -> None:
    session = await sb.sessions.open()
    assert (await session.exec("echo bye; exit 7")).exit_code == 7
    with pytest.raises(Closed):
        await session.exec("true")


@pytest.mark.parametrize(
    "closing",
    [
        'for i in $(seq 3 255); do eval "exec $i>&-"; done 2>/dev/null',
        "ulimit -n 3",
    ],
)
async def test_a_command_that_closes_the_shells_descriptors_tells_how_it_ended(sb: Sandbox, closing: str) -> None:
    """A shell keeps where it reads from among them, so it ends: the next command says that, not this one."""
    session = await sb.sessions.open("/bin/bash")
    done = await session.exec(f"echo out; {closing}; (exit 5)")
    assert (done.exit_code, done.stdout) == (5, b"out\n")
    assert b"\x1e" not in done.stderr
    with pytest.raises(Closed, match="shell has ended"):
        await session.exec("echo on")


async def test_what_is_no_shell_is_refused(sb: Sandbox) -> None:
    with pytest.raises(Invalid):
        await sb.sessions.open("/bin/cat")
    assert await sb.sessions.list() == []


async def test_other_users_and_streams(sb: Sandbox) -> None:
    session = await sb.sessions.open(user="nobody")
    chunks = [chunk async for chunk in session.stream("id -un; echo no >&2")]
    assert b"".join(c.data for c in chunks if c.stream == "stdout") == b"nobody\n"
    assert b"".join(c.data for c in chunks if c.stream == "stderr") == b"no\n"
    assert chunks[-1].result is not None and chunks[-1].result.exit_code == 0


async def test_output_beyond_the_limit_is_counted(sb: Sandbox) -> None:
    session = await sb.sessions.open()
    done = await session.exec("head -c 300000 /dev/zero; echo end >&2", output_limit=1000)
    assert (len(done.stdout), done.stdout_dropped, done.stderr) == (1000, 299_000, b"end\n")


async def test_a_daemon_dies_in_the_middle_of_a_command(tmp_path_factory: pytest.TempPathFactory) -> None:
    daemon = Daemon(tmp_path_factory.mktemp("killed"))
    try:
        daemon.start()
        async with daemon.client() as host:
            sb = await host.create("debian")
            session = await sb.sessions.open()
            await session.exec("cd /usr; A=kept")
            for delay in ("0", "0.5", "2"):
                running = asyncio.ensure_future(
                    session.exec(f"echo begun >> /log; sleep {delay}; cat /log; pwd; echo $A")
                )
                while b"begun" not in await _content(host, sb, delay):  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.02)
                daemon.kill()
                await asyncio.to_thread(daemon.start)
                result = await running
                assert result.exit_code == 0 and result.verdict is not None
                assert result.text.splitlines()[-2:] == ["/usr", "kept"]
                count = result.text.splitlines().count("begun")
                assert (await session.exec("wc -l < /log")).text.strip() == str(count)  # once each, none lost
            assert count == 3
    finally:
        daemon.clean()


async def _content(host: Client, sb: Sandbox, delay: str) -> bytes:
    """What the log holds of this round; b"" before there is any."""
    rounds = {"0": 1, "0.5": 2, "2": 3}[delay]
    try:
        data = await sb.files.read("/log")
    except NotFound:
        return b""
    return data if data.count(b"begun") >= rounds else b""
