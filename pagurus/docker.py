"""A container program for agents outside, as far as they need one: ``python -m pagurus.docker run|exec|stop|rm``.

Agents that run their commands by a container program (mini-swe-agent's ``docker`` environment, with its option
`executable`) need no change: they are given this one. Each command takes effect once, whatever dies; see
:meth:`sandbox.sdk.gateway.Conversation.exec`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagurus import output
from pagurus.common import client, exit_code
from sandbox import Client, Invalid, PagurusError, Sandbox
from sandbox.messages import ExecResult

TIMEOUT = 60.0  # seconds for which a daemon may be away
WITH_VALUE = frozenset({"-w", "--workdir", "-e", "--env", "-u", "--user", "--name", "--platform", "--network", "-v"})
FLAGS = frozenset({"-d", "--detach", "-i", "--interactive", "--rm", "--init", "-f", "--force", "-t", "--tty"})


@dataclass
class Words:
    """A command line of ``docker``, understood."""

    verb: str
    rest: list[str] = field(default_factory=list)  # what follows the options
    workdir: str | None = None
    user: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    interactive: bool = False


def understand(arguments: Sequence[str]) -> Words:
    """Raises Invalid for what no agent needs.

    >>> understand(["exec", "-w", "/src", "-e", "A=1", "s-1", "bash", "-lc", "ls"]).rest
    ['s-1', 'bash', '-lc', 'ls']
    """
    if not arguments or arguments[0] not in ("run", "exec", "stop", "rm", "version", "--version"):
        raise Invalid("this is not docker", hint="it knows run, exec, stop and rm")
    words = Words(arguments[0])
    index = 1
    while index < len(arguments) and arguments[index].startswith("-"):
        name, equals, value = arguments[index].partition("=")
        index += 1
        if name in FLAGS:
            words.interactive = words.interactive or name in ("-i", "--interactive")
            continue
        if name not in WITH_VALUE:
            raise Invalid(
                f"option {name} is not known here",
                hint="leave it out: this program knows -i, -w, -e and -u",
            )
        if not equals:
            if index >= len(arguments):
                raise Invalid(f"option {name} needs a value", hint="write it behind the option")
            value, index = arguments[index], index + 1
        _take(words, name, value)
    words.rest = list(arguments[index:])
    return words


def _take(words: Words, name: str, value: str) -> None:
    if name in ("-w", "--workdir"):
        words.workdir = value
    elif name in ("-e", "--env"):
        variable, equals, text = value.partition("=")
        words.env[variable] = text if equals else os.environ.get(variable, "")
    elif name in ("-u", "--user"):
        words.user = value


async def _sandbox(host: Client) -> Sandbox:
    name = os.environ.get("PAGURUS_SANDBOX")
    if not name:
        raise Invalid("which sandbox?", hint="set PAGURUS_SANDBOX to its name or id")
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                return await host.get(name)
            except PagurusError as error:
                if error.status != 500:  # anything but an absent daemon
                    raise
            await asyncio.sleep(0.2)


async def act(words: Words) -> int:
    """Carry it out; returns the exit code."""
    async with client() as host:
        sandbox = await _sandbox(host)
        if words.verb == "run":
            print(sandbox.id)
            return 0
        if words.verb != "exec":  # the sandbox stays its owner's
            return 0
        stdin = await asyncio.to_thread(sys.stdin.buffer.read) if words.interactive else b""
        result: ExecResult = await sandbox.gateway.exec(
            words.rest[1:], timeout=None, stdin=stdin, cwd=words.workdir, env=words.env, user=words.user
        )
        sys.stdout.buffer.write(result.stdout)
        sys.stdout.buffer.flush()
        sys.stderr.buffer.write(result.stderr)
        return result.exit_code


def main() -> int:
    try:
        return asyncio.run(act(understand(sys.argv[1:])))
    except PagurusError as error:
        output.complain(str(error))
        return exit_code(error)
    except TimeoutError as error:
        output.complain(str(error))
        return 125  # as docker says that it failed itself


if __name__ == "__main__":
    sys.exit(main())
