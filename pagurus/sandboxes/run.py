"""``pagurus run``: a new sandbox, and a command in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus.common import IN_ORDER, ImageName, WhoOption, call, exit_codes
from pagurus.sandboxes import net
from pagurus.sandboxes.exec import (
    EnvOption,
    StdinOption,
    TerminalOption,
    carry_out,
    conclude,
    given,
    meant,
    need_no_options,
    pairs,
)
from sandbox.errors import Invalid

if TYPE_CHECKING:
    from sandbox import Client, Mount, Sandbox
    from sandbox.messages import ExecResult

verbs = typer.Typer()


UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}

LabelOption = Annotated[list[str] | None, typer.Option("--label", "-l", help="May be repeated.", metavar="NAME=VALUE")]


@verbs.command(context_settings=IN_ORDER)
def run(
    image_name: ImageName,
    command: Annotated[list[str] | None, typer.Argument(help="Run this, then remove the sandbox.")] = None,
    name: Annotated[str | None, typer.Option(help="A name for the sandbox.")] = None,
    label: LabelOption = None,
    cpus: Annotated[float | None, typer.Option(help="Cores.")] = None,
    memory: Annotated[str, typer.Option(help="Memory, such as 512MiB.")] = "1GiB",
    disk: Annotated[str, typer.Option(help="What it may write, such as 4GiB.")] = "4GiB",
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", "-v", help="A directory of the host, read-only.", metavar="SOURCE:TARGET"),
    ] = None,
    scratch: Annotated[
        list[str] | None,
        typer.Option(help="Space that no checkpoint holds.", metavar="TARGET[:SIZE]"),
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(help="The upstream that its agent's model calls go to.", metavar="UPSTREAM")
    ] = None,
    lifetime: Annotated[str | None, typer.Option(help="When it ends, such as 90s, 15m, 2h, 1d.")] = None,
    idle_timeout: Annotated[str | None, typer.Option(help="The same, counted without any call.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove it when its time is over, not only stop.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the sandbox after the command.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave the command running, and print the sandbox's id.")
    ] = False,
    no_new_privs: Annotated[bool, typer.Option("--no-new-privs", help="sudo, su and the like give nothing.")] = False,
    docker: Annotated[bool, typer.Option("--docker", help="Its programs may use docker, within it.")] = False,
    user: WhoOption = None,
    env: EnvOption = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", help="Directory of its commands.")] = None,
    interactive: StdinOption = False,
    terminal: TerminalOption = False,
    network: net.Mode = None,
    allow: net.Allow = None,
    credential: net.CredentialNames = None,
) -> None:
    """Start a sandbox; with a command, run it there. Without one, print the id and leave it running."""
    with exit_codes():
        from sandbox.messages import AtEnd, Gateway, Limits, Network

        need_no_options(command, "the image", f"pagurus run [OPTIONS] {image_name}")
        settings: dict[str, Any] = {
            "name": name,
            "labels": pairs(label, "--label"),
            "limits": Limits(cpus=cpus, memory=memory, disk=disk),
            "mounts": mounts(mount, scratch),
            "gateway": None if gateway is None else Gateway(upstream=gateway),
            "lifetime": seconds(lifetime),
            "idle_timeout": seconds(idle_timeout),
            "at_end": AtEnd.REMOVE if remove else AtEnd.STOP,
            "network": net.policy(network, allow, credential) or Network.none(),
            "env": pairs(env, "--env"),
        }
        settings |= {"user": user, "workdir": workdir, "docker": docker, "no_new_privs": no_new_privs}
        if terminal and not detach:
            raise typer.Exit(_sit(image_name, settings, command or [], keep))
        result = call(lambda host: _start(host, image_name, settings, command or [], interactive, keep, detach))
    if result is not None:
        conclude(result, memory)


async def _start(
    host: Client, image: str, settings: dict[str, Any], command: list[str], interactive: bool, keep: bool, detach: bool
) -> ExecResult | None:
    stdin = given(interactive) if command and not detach else b""
    sandbox = await host.create(image, **settings)
    if command and not detach:
        try:
            return await carry_out(sandbox, command, stdin=stdin)
        finally:
            if not keep:
                await sandbox.remove()
    if command:
        await sandbox.processes.start(meant(command))
    print(sandbox.id)
    return None


def _sit(image: str, settings: dict[str, Any], command: list[str], keep: bool) -> int:
    """At a terminal of a new sandbox; its program's exit code."""
    import asyncio

    from pagurus.sandboxes.terminal import visit

    async def create(host: Client) -> Sandbox:
        return await host.create(image, **settings)

    async def remove(host: Client) -> None:
        await (await host.get(sandbox)).remove()

    sandbox = call(create).id
    try:
        return asyncio.run(visit(sandbox, meant(command) or None))
    finally:
        if not keep:
            call(remove)


def mounts(directories: list[str] | None, scratch: list[str] | None) -> list[Mount]:
    """What the options name, as `SOURCE:TARGET` and `TARGET[:SIZE]`."""
    from sandbox.messages import Mount

    result = []
    for text in directories or ():
        source, _, target = text.removesuffix(":ro").partition(":")
        if not source.startswith("/") or not target.startswith("/") or ":" in target:
            raise Invalid(
                f"not a mount: {text!r}", hint="write --mount /of/this/host:/in/the/sandbox; it is read-only there"
            )
        result.append(Mount.read_only(source, target))
    for text in scratch or ():
        target, colon, size = text.partition(":")
        result.append(Mount.scratch(target, size=size) if colon else Mount.scratch(target))
    return result


def seconds(text: str | None) -> float | None:
    """The seconds of a duration.

    >>> seconds("1.5h"), seconds("90")
    (5400.0, 90.0)
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise Invalid(f"not a time: {text!r}", hint="write it like 90s, 15m, 2h or 1d")
    return float(match[1]) * UNITS[match[2]]
