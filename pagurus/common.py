"""What all verbs share: how they reach the daemon, options with one meaning, completion of names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pagurus import output
from sandbox import hints
from sandbox.errors import CommandNotFound, PagurusError, Unsupported
from sandbox.termination import termination_signals

if TYPE_CHECKING:
    from sandbox import Client

T = TypeVar("T")

HOST, TOKEN, AUTHORITY = "PAGURUS_HOST", "PAGURUS_TOKEN", "PAGURUS_CA"
IN_ORDER = {"allow_interspersed_args": False}  # what follows the first argument is the command's
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def client() -> Client:
    """The daemon of PAGURUS_HOST (a socket or an address), with PAGURUS_TOKEN and PAGURUS_CA; else the local one."""
    from sandbox.sdk.brief import BriefClient

    existing = os.environ
    return BriefClient(
        existing.get(HOST) or None, token=existing.get(TOKEN) or None, ca=existing.get(AUTHORITY) or None
    )


def call(work: Callable[[Client], Awaitable[T]]) -> T:
    """Run one piece of work against the daemon."""
    import asyncio

    async def connected() -> T:
        async with client() as host:
            return await work(host)

    return asyncio.run(connected())


def carry_out(work: Coroutine[Any, Any, T]) -> T:
    """Work that has started engines or sandboxes of its own: what asks us to end, ends it with them, as Ctrl-C does."""
    import asyncio

    async def interruptible() -> T:
        this = asyncio.current_task()
        assert this is not None
        for number in termination_signals():
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
        return await work

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def needs_training() -> Iterator[None]:
    """Around imports of what training needs: says how to get it where it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("sandbox", "rollout", "trainer", "daemon", "ebpf"):
            raise
        raise Unsupported(f"training needs {error.name}, which is not installed", hint=hints.training()) from None


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Failures of ours get codes that commands seldom have, as those of a shell and of docker do."""
    try:
        yield
    except PagurusError as error:
        output.complain(str(error))
        raise typer.Exit(exit_code(error)) from None


def exit_code(error: PagurusError) -> int:
    """127: no such program; 126: it cannot be executed; 125: we failed, not the command.

    >>> exit_code(CommandNotFound("nosuch: no such program"))
    127
    """
    if not isinstance(error, CommandNotFound):
        return 125
    return 127 if error.message.endswith(": no such program") else 126


def item(names: list[str], act: Callable[[Client, str], Awaitable[None]]) -> None:
    """Do the same to each of these, whatever becomes of the others. What failed is said, and makes the exit code 1."""

    async def work(host: Client) -> list[str]:
        failed = []
        for name in names:
            try:
                await act(host, name)
            except PagurusError as error:
                failed.append(str(error))
        return failed

    failed = call(work)
    for line in failed:
        output.complain(line)
    raise typer.Exit(1 if failed else 0)


def existing(names: Callable[[Client], Awaitable[Iterable[str | None]]], incomplete: str) -> list[str]:
    """What the shell's completion offers; nothing when no daemon answers."""
    try:
        result = call(names)
    except PagurusError:
        return []
    return [name for name in result if name and name.isprintable() and name.startswith(incomplete)]


def sandbox_names(incomplete: str) -> list[str]:
    """Names and ids of sandboxes, for completion."""

    async def names(host: Client) -> list[str | None]:
        return [name for sandbox in await host.sandboxes() for name in (sandbox.name, sandbox.id)]

    return existing(names, incomplete)


def image_names(incomplete: str) -> list[str]:
    """Names of images, for completion."""

    async def names(host: Client) -> list[str]:
        return [image.name for image in await host.images.list()]

    return existing(names, incomplete)


def checkpoint_ids(incomplete: str) -> list[str]:
    """Ids of checkpoints, for completion: the newest first."""

    async def names(host: Client) -> list[str]:
        return [checkpoint.id for checkpoint in reversed(await host.store.checkpoints())]

    return existing(names, incomplete)


def sources(incomplete: str) -> list[str]:
    """Sandboxes and checkpoints, for completion."""
    return sandbox_names(incomplete) + checkpoint_ids(incomplete)


Env = Annotated[
    Path,
    typer.Argument(help="Its .py file or directory, or a directory of Harbor tasks.", metavar="ENVIRONMENT"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SandboxName = Annotated[
    str,
    typer.Argument(help="Its name, its id, or a beginning of the id.", metavar="SANDBOX", autocompletion=sandbox_names),
]
SandboxNames = Annotated[
    list[str] | None,
    typer.Argument(help="Names, ids, or beginnings of ids.", metavar="[SANDBOX...]", autocompletion=sandbox_names),
]
WhoOption = Annotated[
    str | None,
    typer.Option("--user", "-u", help="NAME, UID, NAME:GROUP or UID:GID; else the sandbox's default.", metavar="USER"),
]
ServiceOption = Annotated[
    str | None,
    typer.Option("--service", help="Of a sandbox of several, which is meant; else its main one.", metavar="NAME"),
]
ImageName = Annotated[str, typer.Argument(metavar="IMAGE", help="Name of an image.", autocompletion=image_names)]
NewImage = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new image.")]
CheckpointName = Annotated[
    str,
    typer.Argument(help="Its id, how that begins, or its label.", metavar="CHECKPOINT", autocompletion=checkpoint_ids),
]
