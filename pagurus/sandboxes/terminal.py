"""``pagurus shell`` and ``pagurus port-forward``: this terminal, or a port of this machine, in a sandbox.

Guarantee: the caller's terminal is restored however this ends, short of SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pagurus.common import client
from sandbox.errors import Invalid, PagurusError
from sandbox.termination import termination_signals

if TYPE_CHECKING:
    from sandbox import Terminal

READ = 1 << 16


@contextlib.contextmanager
def raw(fd: int) -> Iterator[None]:
    """The terminal `fd` passes on every key, Ctrl-C too; afterwards it is as it was."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def sit(terminal: Terminal, source: int, target: int) -> int:
    """Carry bytes between a terminal in a sandbox and descriptors of ours; the program's exit code."""
    loop = asyncio.get_running_loop()
    typed: asyncio.Queue[bytes] = asyncio.Queue()

    def key() -> None:
        try:
            data = os.read(source, READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:  # our input has ended: so would a person's line
            loop.remove_reader(source)
            data = b"\x04"
        typed.put_nowait(data)

    async def pass_on() -> None:
        while True:
            await terminal.write(await typed.get())

    async def pass_file_on() -> None:
        while data := await asyncio.to_thread(os.read, source, READ):
            await terminal.write(data)
        await terminal.write(b"\x04")

    try:
        loop.add_reader(source, key)
        passing = asyncio.ensure_future(pass_on())
    except PermissionError:  # a file or /dev/null, which cannot be waited for
        passing = asyncio.ensure_future(pass_file_on())
    try:
        async for data in terminal:
            await asyncio.to_thread(_write, target, data)
    finally:
        loop.remove_reader(source)
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
    return terminal.exit_code or 0


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def visit(
    sandbox: str,
    command: str | Sequence[str] | None,
    *,
    user: str | None = None,
    service: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    attach: str | None = None,
    keep: bool = False,
) -> int:
    """Sit at a terminal of `sandbox` with the terminal that we have, if it is one."""
    source, target = sys.stdin.fileno(), sys.stdout.fileno()
    person = os.isatty(source)
    async with client() as host:
        result = await host.get(sandbox)
        size = shutil.get_terminal_size()
        if attach is not None:
            terminal = await result.terminals.get(attach)
        else:
            environment = {"TERM": os.environ["TERM"]} if os.environ.get("TERM") else {}
            terminal = await result.terminals.open(
                command,
                env={**environment, **(env or {})},
                cwd=cwd,
                user=user,
                service=service,
                rows=max(1, size.lines),
                columns=max(1, size.columns),
            )
        with contextlib.ExitStack() as restored:
            if person:
                restored.enter_context(raw(source))
            sitting = asyncio.ensure_future(_sit_down(terminal, source, target, person))
            loop = asyncio.get_running_loop()
            ending = [number for number in termination_signals() if number != signal.SIGINT]
            for number in ending:
                loop.add_signal_handler(number, sitting.cancel)
            try:
                code = await sitting
            except asyncio.CancelledError:
                code = 128 + signal.SIGHUP
            finally:
                for number in ending:
                    loop.remove_signal_handler(number)
        if not keep and terminal.exit_code is not None:
            with contextlib.suppress(PagurusError):
                await terminal.kill()
    return code


async def _sit_down(terminal: Terminal, source: int, target: int, person: bool) -> int:
    loop = asyncio.get_running_loop()
    resizing: set[asyncio.Task[None]] = set()

    def resized() -> None:
        size = shutil.get_terminal_size()
        task = asyncio.ensure_future(terminal.resize(max(1, size.lines), max(1, size.columns)))
        resizing.add(task)
        task.add_done_callback(resizing.discard)

    async with terminal:
        if person:
            os.environ.pop("LINES", None)
            os.environ.pop("COLUMNS", None)  # get_terminal_size() would believe them
            loop.add_signal_handler(signal.SIGWINCH, resized)
            resized()
        try:
            return await sit(terminal, source, target)
        finally:
            if person:
                loop.remove_signal_handler(signal.SIGWINCH)


async def forward(sandbox: str, local: int, remote: int, host: str) -> None:
    """Lead `local` of this machine to `remote` in the sandbox until interrupted."""
    stop = asyncio.Event()
    for number in termination_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with client() as there:
        result = await there.get(sandbox)
        async with result.ports.forward(remote, host=host, local_port=local) as address:
            print(f"{address} -> {result.id}:{remote}", flush=True)
            await stop.wait()


def ports(text: str) -> tuple[int, int]:
    """``"8080:80"`` or ``"80"`` (any free port here): the port here, the port there.

    >>> ports("8080:80")
    (8080, 80)
    """
    here, colon, there = text.rpartition(":")
    if not (there.isdigit() and (not colon or here.isdigit())):
        raise Invalid(f"not a pair of ports: {text!r}", hint="write LOCAL:REMOTE, such as 8080:80, or REMOTE")
    pair = (int(here) if colon else 0, int(there))
    if not (0 <= pair[0] <= 65_535 and 1 <= pair[1] <= 65_535):
        raise Invalid(f"no such port: {text!r}", hint="a number from 1 to 65535")
    return pair
