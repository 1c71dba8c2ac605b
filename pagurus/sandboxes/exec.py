"""``pagurus exec``: a command in a sandbox, as if it ran here. ``pagurus run`` uses the same.

Guarantee: outputs are passed on byte by byte, each to its own stream, at the pace of the reader; Ctrl-C, SIGTERM and a
reader that goes away end the command in the sandbox, not only this program.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import output
from pagurus.common import IN_ORDER, Json, SandboxName, ServiceOption, WhoOption, call, exit_codes
from sandbox.errors import Invalid, NotFound, PagurusError, Protocol
from sandbox.termination import termination_signals

if TYPE_CHECKING:
    import asyncio

    from sandbox import Client, CommandStream, Sandbox
    from sandbox.messages import ExecResult

verbs = typer.Typer()


PAUSE = 0.1  # seconds between two looks for a command that is being started
COLLECTED = 1 << 20  # bytes of each output that --json keeps

StdinOption = Annotated[
    bool,
    typer.Option("--stdin", "-i", help="Read stdin to its end and give it to the command, whatever stdin is."),
]
TerminalOption = Annotated[
    bool, typer.Option("--tty", "-t", help="At a terminal, as with `pagurus shell`; use `-it`.", show_default=False)
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", help="A variable of its environment. May be repeated.", metavar="NAME=VALUE"),
]


@verbs.command("exec", context_settings=IN_ORDER)
def execute(
    sandbox: SandboxName,
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.")],
    timeout: Annotated[float | None, typer.Option(help="Seconds after which it is killed.")] = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", "--workdir", "-w", help="Directory to run it in.", metavar="DIRECTORY")
    ] = None,
    user: WhoOption = None,
    service: ServiceOption = None,
    env: EnvOption = None,
    interactive: StdinOption = False,
    terminal: TerminalOption = False,
    json: Json = False,
) -> None:
    """Run a command in a sandbox and end the turn. Exits with the command's code. "a | b" in quotes runs in a shell.

    Its output comes as it is written; with --json it is collected, the first MiB of each stream. Stdin is passed on
    with -i, and without it when it is a file, or a pipe that holds something.
    """
    with exit_codes():
        need_no_options(command, "the sandbox", f"pagurus exec [OPTIONS] {sandbox} COMMAND")
        variables = pairs(env, "--env")
        if terminal:
            import asyncio

            from pagurus.sandboxes.terminal import visit

            sitting = visit(sandbox, meant(command), user=user, service=service, env=variables, cwd=cwd)
            raise typer.Exit(asyncio.run(sitting))
        stdin = given(interactive)

        async def work(host: Client) -> tuple[ExecResult, str | int | None]:
            collected = await host.get(sandbox)
            named = {"env": variables, "stdin": stdin, "timeout": timeout, "cwd": cwd, "user": user, "service": service}
            result = await carry_out(collected, command, collect=json, **named)
            return result, collected.info.limits.memory

        result, memory = call(work)
    if json:
        output.as_json(result)
        raise typer.Exit(_exit_code(result))
    conclude(result, memory)


def conclude(result: ExecResult, memory: str | int | None = None) -> None:
    """Say what the command itself cannot, and exit with its code. `memory`: its limit, where it is known."""
    dropped = result.stdout_dropped + result.stderr_dropped
    if dropped:
        output.complain(f"{dropped} bytes of output were beyond the limit and dropped")
    if result.timed_out:
        output.complain("the command reached its time limit and was killed")
    if result.oom_killed:
        limit = "" if memory is None else f" of {output.size(memory) if isinstance(memory, int) else memory}"
        output.complain(
            f"out of memory: at the sandbox's limit{limit} the kernel killed a process "
            "(start one with more: pagurus run --memory)"
        )
    raise typer.Exit(_exit_code(result))


def _exit_code(result: ExecResult) -> int:
    return 124 if result.timed_out else result.exit_code


def pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """What an option of the form NAME=VALUE was given."""
    for text in given or ():
        if not text.partition("=")[0] or "=" not in text:
            raise Invalid(f"{option} {text!r} has no value", hint=f"write {option} NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in given or ())}


def need_no_options(command: Sequence[str] | None, what: str, right: str) -> None:
    """Refuse options of ours where those of the command begin: wrong usage."""
    if command and command[0].startswith("-") and command[0] != "--":
        output.complain(f"options go before {what}: {command[0]} stands behind it (write {right})")
        raise typer.Exit(2)


def given(target: bool) -> bytes:
    """The stdin of this program as far as it is meant for the command; it is read before the command starts.

    Not `target`: a file, or a pipe that holds something already. One that is merely open, as under a supervisor or in
    a shell's loop over ssh, would never end.
    """
    if sys.stdin is None:
        return b""
    source = sys.stdin.fileno()
    if not target:
        kind = os.fstat(source).st_mode
        piped = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
        if not stat.S_ISREG(kind) and not (piped and select.select([source], [], [], 0)[0]):
            return b""
    return sys.stdin.buffer.read()


def meant(words: Sequence[str]) -> str | list[str]:
    """The program and its arguments, or the line for a shell where it is one word with blanks or a shell's signs.

    >>> meant(["ls", "-l"]), meant(["ls | wc -l"]), meant(["--", "ls", "-l"])
    (['ls', '-l'], 'ls | wc -l', ['ls', '-l'])
    """
    given = [*words[1:]] if words[:1] == ["--"] else [*words]
    plain = all(char.isprintable() or char in "\n\t" for char in "".join(given))  # a shell would print others back
    line = len(given) == 1 and plain and re.search(r"[\s|&;<>()$`*?~]", given[0])
    return given[0] if line else given


async def carry_out(sandbox: Sandbox, command: Sequence[str], *, collect: bool = False, **named: Any) -> ExecResult:
    """Run a command, with its outputs on ours unless they are to be collected.

    The first signal that asks us to end is passed on to the command, the second one kills it. With the third, or when
    the output has no reader, we leave, and the daemon ends it.
    """
    import asyncio

    running = sandbox.stream(meant(command), **named)
    work = asyncio.ensure_future(_collected(running) if collect else _shown(running))
    loop, sending = asyncio.get_running_loop(), list[asyncio.Task[None]]()

    def requested(number: signal.Signals) -> None:
        if len(sending) >= 2:
            work.cancel()
            return
        sending.append(loop.create_task(_pass_on(running, signal.SIGKILL if sending else number, work)))

    ending = termination_signals()
    for number in ending:
        loop.add_signal_handler(number, requested, number)
    try:
        return await work
    except BrokenPipeError:
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except asyncio.CancelledError:
        if not sending:
            raise
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        for number in ending:
            loop.remove_signal_handler(number)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


async def _shown(running: CommandStream) -> ExecResult:
    import asyncio

    targets = {"stdout": 1, "stderr": 2}
    async with contextlib.aclosing(running) as chunks:
        async for chunk in chunks:
            if chunk.result is not None:
                return chunk.result
            await asyncio.to_thread(_write, targets[chunk.stream], chunk.data)
    raise _cut_short()


async def _collected(running: CommandStream) -> ExecResult:
    retained = {"stdout": bytearray(), "stderr": bytearray()}
    dropped = {"stdout": 0, "stderr": 0}
    async with contextlib.aclosing(running) as chunks:
        async for chunk in chunks:
            if (result := chunk.result) is not None:
                result.stdout, result.stderr = bytes(retained["stdout"]), bytes(retained["stderr"])
                result.stdout_dropped += dropped["stdout"]
                result.stderr_dropped += dropped["stderr"]
                return result
            capacity = COLLECTED - len(retained[chunk.stream])
            retained[chunk.stream] += chunk.data[:capacity]
            dropped[chunk.stream] += max(0, len(chunk.data) - capacity)
    raise _cut_short()


def _cut_short() -> Protocol:
    return Protocol("the output ended without a result", hint="is the daemon alive?")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _pass_on(running: CommandStream, number: signal.Signals, work: asyncio.Future[ExecResult]) -> None:
    """Send a signal to the command, which may still be on its way into the sandbox; where that fails, leave it."""
    import asyncio

    while not work.done():
        try:
            await running.signal(number)
            return
        except NotFound:  # it has not begun, or has just ended
            await asyncio.sleep(PAUSE)
        except PagurusError:
            work.cancel()
            return
