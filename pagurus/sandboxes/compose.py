"""``pagurus up`` and ``pagurus services``: sandboxes of several services, from compose files."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import output
from pagurus.common import Json, SandboxName, call, carry_out, client
from pagurus.sandboxes import net
from pagurus.sandboxes.exec import pairs
from sandbox.errors import Invalid, PagurusError

if TYPE_CHECKING:
    from sandbox import Client, LogChunk, Sandbox
    from sandbox.messages import ServiceInfo
    from sandbox.sdk.services import ServiceHandle

verbs = typer.Typer()

TAIL = 4096  # bytes of each output of a service that failed
FileOption = Annotated[
    list[Path] | None,
    typer.Option("--file", "-f", help="A compose file; several are merged. Else that of this directory."),
]


@verbs.command()
def up(
    file: FileOption = None,
    name: Annotated[str | None, typer.Option(help="A name for the sandbox.")] = None,
    profile: Annotated[list[str] | None, typer.Option(help="Its services, too. May be repeated.")] = None,
    main: Annotated[str | None, typer.Option(help="The service that commands mean which name none.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", help="A variable of the files. May be repeated.", metavar="NAME=VALUE"),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the sandbox's id and leave it running.")
    ] = False,
    build: Annotated[bool, typer.Option("--build/--no-build", help="Build the images that say how.")] = True,
    pull: Annotated[str, typer.Option(help="missing, always or never.", metavar="WHEN")] = "missing",
    copy_binds: Annotated[
        bool, typer.Option("--copy-binds", help="Copy directories of this machine instead of mounting the host's.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until all are healthy.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds until they have to be up.")] = 300.0,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="May be repeated.", metavar="NAME=VALUE")
    ] = None,
    docker: Annotated[bool, typer.Option("--docker", help="The main service may use docker, within it.")] = False,
    network: net.Mode = None,
    allow: net.Allow = None,
    credential: net.CredentialNames = None,
) -> None:
    """Start the services of a compose file in one sandbox. Without -d, show their output, and remove it on Ctrl-C."""
    import os

    from sandbox.messages import Network

    if pull not in ("missing", "always", "never"):
        raise Invalid(f"pull {pull!r}?", hint="--pull is missing, always or never")
    settings: dict[str, Any] = {
        "name": name,
        "profiles": profile or (),
        "main": main,
        "env": {**os.environ, **pairs(env, "--env")},
        "build": build,
        "pull": pull,
        "copy_binds": copy_binds,
        "docker": docker,
        "labels": pairs(label, "--label"),
        "network": net.policy(network, allow, credential) or Network.none(),
        "up": False,
        "output": output.report,
    }
    carry_out(_up([*file] if file else ["."], settings, detach=detach, wait=wait, timeout=timeout))


async def _up(paths: list[Any], settings: dict[str, Any], *, detach: bool, wait: bool, timeout: float) -> None:
    async with client() as host:
        sandbox = await host.compose(paths, **settings)
        try:
            await _start(sandbox, wait=wait, timeout=timeout)
            if not detach:
                await _follow(sandbox)
        except BaseException:
            await sandbox.remove()
            raise
        if detach:
            print(sandbox.id)
        else:
            await sandbox.remove()


async def _start(sandbox: Sandbox, *, wait: bool, timeout: float) -> None:
    try:
        await sandbox.services.up(wait=wait, timeout=timeout)
    except PagurusError:
        with contextlib.suppress(PagurusError):
            for info in await sandbox.services.list():
                if info.exit_code or info.health == "unhealthy" or info.error:
                    await _show_end(await sandbox.services.get(info.name))
        raise


async def _show_end(service: ServiceHandle) -> None:
    """The end of what a service said that failed."""
    logs = await service.logs()
    for data in (logs.stdout, logs.stderr):
        for line in data[-TAIL:].decode("utf-8", "replace").splitlines():
            output.report(f"{service.name} | {line}")
    if service.info.error:
        output.report(f"{service.name} | {service.info.error}")


async def _follow(sandbox: Sandbox) -> None:
    """The output of all services, line by line, until all have ended."""
    import asyncio

    infos = await sandbox.services.list()
    width = max(len(info.name) for info in infos)

    async def one(name: str) -> None:
        service = await sandbox.services.get(name)
        async for line in _lines(service.stream()):
            output.say(f"{name:<{width}} | {line}")

    await asyncio.gather(*(one(info.name) for info in infos))


async def _lines(chunks: AsyncIterator[LogChunk]) -> AsyncIterator[str]:
    """The lines of both outputs of a service, each as it is complete."""
    rest: dict[str, bytes] = {}
    async for chunk in chunks:
        *complete, rest[chunk.stream] = (rest.get(chunk.stream, b"") + chunk.data).split(b"\n")
        for line in complete:
            yield line.decode("utf-8", "replace").rstrip("\r")
    for last in filter(None, rest.values()):
        yield last.decode("utf-8", "replace")


@verbs.command()
def services(
    sandbox: SandboxName,
    start: Annotated[bool, typer.Option("--up", help="Start those that do not run.")] = False,
    restart: Annotated[
        list[str] | None, typer.Option(help="Restart this one. May be repeated.", metavar="NAME")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop this one. May be repeated.", metavar="NAME")] = None,
    json: Json = False,
) -> None:
    """The services of a sandbox; start, stop or restart some."""

    async def work(host: Client) -> list[ServiceInfo]:
        box = await host.get(sandbox)
        for name in stop or ():
            await (await box.services.get(name)).stop()
        for name in restart or ():
            await (await box.services.get(name)).restart()
        if start:
            await _start(box, wait=True, timeout=300.0)
        return [*await box.services.list()]

    result = call(work)
    if json:
        output.as_json(result)
        return
    output.table(
        ("service", "image", "state", "health", "address", "ports", "restarts", "since", "command"),
        [
            (
                info.name,
                info.image,
                info.state if info.exit_code is None else f"{info.state} ({info.exit_code})",
                "" if info.health == "none" else info.health,
                info.address,
                " ".join(f"{port.published}->{port.target}" for port in info.ports),
                info.restarts,
                output.when(info.started_at) if info.started_at else "",
                info.command[:60],
            )
            for info in result
        ],
    )


async def show_logs(host: Client, sandbox: str, service: str, follow: bool) -> None:
    """What a service of a sandbox says, as it says it."""
    import sys

    handle = await (await host.get(sandbox)).services.get(service)
    if not follow:
        logs = await handle.logs()
        for stream, data in ((sys.stdout, logs.stdout), (sys.stderr, logs.stderr)):
            stream.buffer.write(data)
            stream.buffer.flush()
        return
    async for chunk in handle.stream():
        stream = sys.stdout if chunk.stream == "stdout" else sys.stderr
        stream.buffer.write(chunk.data)
        stream.buffer.flush()
