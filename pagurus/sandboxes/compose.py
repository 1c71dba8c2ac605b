"""``pagurus up``, ``down``, ``ps`` and ``services``: sandboxes of several services, from compose files."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import output
from pagurus.common import Json, call, carry_out, client, sandbox_names
from pagurus.sandboxes import net
from pagurus.sandboxes.exec import pairs
from sandbox.errors import Conflict, Invalid, NotFound, PagurusError

if TYPE_CHECKING:
    from sandbox import Client, LogChunk, Sandbox
    from sandbox.compose.project import Project
    from sandbox.messages import ServiceInfo
    from sandbox.sdk.services import ServiceHandle

verbs = typer.Typer()

PROJECT = "compose.project"  # the label that says of which project a sandbox is
TAIL = 4096  # bytes of each output of a service that failed
FileOption = Annotated[
    list[Path] | None,
    typer.Option("--file", "-f", help="A compose file; several are merged. Else that of this directory."),
]

OfProject = Annotated[
    str | None,
    typer.Argument(
        help="Its name or id; else the one of this directory's compose file.",
        metavar="[SANDBOX]",
        autocompletion=sandbox_names,
    ),
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


async def of_project(host: Client, sandbox: str | None, file: list[Path] | None = None) -> Sandbox:
    """The sandbox of this name, or the one that the compose file of this directory was started in.

    Raises Conflict where there are several, NotFound.
    """
    if sandbox is not None:
        return await host.get(sandbox)
    name = _project(file).name
    existing = await host.sandboxes({PROJECT: name})
    if not existing:
        raise NotFound(f"no sandbox of the project {name}", hint="pagurus up -d, or name the sandbox")
    if len(existing) > 1:
        ids = ", ".join(info.id for info in existing)
        raise Conflict(f"several sandboxes are of the project {name}: {ids}", hint="name one of them")
    return await host.get(existing[0].id)


def _project(file: list[Path] | None) -> Project:
    import os

    from sandbox.compose.load import load

    return load([*file] if file else ["."], env=os.environ)


@verbs.command()
def down(
    sandbox: OfProject = None,
    file: FileOption = None,
    volumes: Annotated[
        bool, typer.Option("--volumes", "-v", help="Also where the services have volumes, which go with it.")
    ] = False,
) -> None:
    """Remove the sandbox of a compose file, with its checkpoints. Volumes are part of it: -v agrees to that."""

    async def work(host: Client) -> str:
        box = await of_project(host, sandbox, file)
        if sandbox is None and not volumes:
            services = _project(file).composition.services.values()
            if named := sorted({volume.name for one in services for volume in one.volumes}):
                raise Conflict(
                    f"the volumes are in the sandbox and go with it: {', '.join(named)}",
                    hint="pagurus down -v; `pagurus services --stop NAME` only stops",
                )
        await box.remove()
        return box.id

    print(call(work))


@verbs.command()
def ps(sandbox: OfProject = None, file: FileOption = None, json: Json = False) -> None:
    """The services of the sandbox of a compose file."""

    async def work(host: Client) -> list[ServiceInfo]:
        return [*await (await of_project(host, sandbox, file)).services.list()]

    _show(call(work), json)


@verbs.command()
def services(
    sandbox: OfProject = None,
    file: FileOption = None,
    start: Annotated[bool, typer.Option("--up", help="Start those that do not run.")] = False,
    restart: Annotated[
        list[str] | None, typer.Option(help="Restart this one. May be repeated.", metavar="NAME")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop this one. May be repeated.", metavar="NAME")] = None,
    json: Json = False,
) -> None:
    """The services of a sandbox; start, stop or restart some."""

    async def work(host: Client) -> list[ServiceInfo]:
        box = await of_project(host, sandbox, file)
        for name in stop or ():
            await (await box.services.get(name)).stop()
        for name in restart or ():
            await (await box.services.get(name)).restart()
        if start:
            await _start(box, wait=True, timeout=300.0)
        return [*await box.services.list()]

    _show(call(work), json)


def _show(result: list[ServiceInfo], json: bool) -> None:
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


async def show_logs(host: Client, target: str | None, service: str | None, follow: bool) -> None:
    """What the services of a sandbox say, or one of them; `target`: the sandbox, or a service of this directory's."""
    import sys

    try:
        box = await of_project(host, target)
    except NotFound:
        if target is None or service is not None:
            raise
        box, service = await _with_service(host, target), target
    if service is None:
        await (_follow(box) if follow else _show_all(box))
        return
    handle = await box.services.get(service)
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


async def _with_service(host: Client, name: str) -> Sandbox:
    """The sandbox of this directory, which has this service. Raises NotFound."""
    with contextlib.suppress(PagurusError):
        box = await of_project(host, None)
        if any(info.name == name for info in await box.services.list()):
            return box
    raise NotFound(
        f"no job, no sandbox and no service {name}", hint="pagurus ls, pagurus ps and pagurus jobs list them"
    )


async def _show_all(box: Sandbox) -> None:
    """What all services have said, service by service."""
    infos = await box.services.list()
    width = max(len(info.name) for info in infos)
    for info in infos:
        if info.program is not None:
            logs = await (await box.services.get(info.name)).logs()
            for line in (logs.stdout + logs.stderr).decode("utf-8", "replace").splitlines():
                output.say(f"{info.name:<{width}} | {line}")
