"""``pagurus image``: list, bring in, build, commit, remove.

``import``, ``docker`` and ``debootstrap`` write to the image store itself, so they need root and no daemon; the others
speak to the daemon, which knows what is in use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import output
from pagurus.common import CheckpointName, ImageName, Json, NewImage, call
from sandbox.errors import Forbidden, Invalid

if TYPE_CHECKING:
    from sandbox import Client
    from sandbox.messages import ImageInfo, StepInfo

application = typer.Typer(help="Images that sandboxes start from.", no_args_is_help=True)
Replace = Annotated[bool, typer.Option("--replace", help="Let the name point to the new image when it exists.")]


@application.command("ls")
def list_images(json: Json = False) -> None:
    """The images of this host."""

    async def work(host: Client) -> tuple[list[ImageInfo], Sequence[StepInfo]]:
        return await host.images.list(), await host.images.steps()

    result, steps = call(work)
    if json:
        output.as_json(result)
        return
    output.table(
        ("image", "digest", "size", "used by", "source", "made"),
        [(i.name, i.digest[:12], output.size(i.size), i.used_by, i.source, output.when(i.created_at)) for i in result],
    )
    if steps:
        size = output.size(sum(step.size for step in steps))
        print(f"kept steps of builds: {len(steps)}, {size} (pagurus image steps, pagurus image prune)")


@application.command()
def steps(json: Json = False) -> None:
    """The steps of builds that are kept, the one used last first."""
    result = call(lambda host: host.images.steps())
    if json:
        output.as_json(result)
        return
    output.table(
        ("step", "key", "checkpoint", "size", "used"),
        [(s.title, s.key[:12], s.checkpoint, output.size(s.size), output.when(s.used_at)) for s in result],
    )


@application.command()
def prune(json: Json = False) -> None:
    """Remove the kept steps of builds. The next builds carry every step out again; images stay."""
    gone = call(lambda host: host.images.prune())
    if json:
        output.as_json(gone)
        return
    print(f"{gone.steps} steps, {output.size(gone.bytes)}")


@application.command("import")
def import_image(
    name: NewImage,
    source: Annotated[
        Path, typer.Argument(help="A directory, an OCI layout, or an archive (tar, OCI, docker save).", exists=True)
    ],
    replace: Replace = False,
) -> None:
    """Make an image from what is on this host's disk. Needs no daemon; root only."""
    store = _store()
    complete = source.is_dir() and not (source / "index.json").is_file()
    work = store.import_directory if complete else store.import_archive
    with output.working(f"import {source}"):
        work(name, source, replace=replace)
    _made(store.info(name))


@application.command()
def pull(
    reference: Annotated[str, typer.Argument(help="[registry/]path[:tag][@digest], such as python:3.12-slim.")],
    name: Annotated[str | None, typer.Option(help="What it is called here; else as it is there.")] = None,
) -> None:
    """Take an image from a registry. Only what is missing is fetched. Needs no Docker Engine.

    Credentials are the daemon's: `docker login` or `skopeo login` as its user, or REGISTRY_AUTH_FILE.
    """
    with output.progress(f"pull {reference}", None) as advanced:
        made = call(lambda host: host.images.pull(reference, name, progress=advanced))
    _made(made)


@application.command()
def docker(
    name: NewImage,
    reference: Annotated[str, typer.Argument(help="What the Docker Engine calls it, such as python:3.12.")],
    replace: Replace = False,
) -> None:
    """Take an image from the local Docker Engine. It pulls it when need be. Needs no daemon; root only."""
    store = _store()
    with output.working(f"take {reference} from the Docker Engine"):
        store.import_docker(name, reference, replace=replace)
    _made(store.info(name))


@application.command()
def debootstrap(
    name: NewImage,
    suite: Annotated[str, typer.Option(help="Debian release.")] = "bookworm",
    include: Annotated[str, typer.Option(help="Packages in addition to the essential ones, separated by commas.")] = "",
) -> None:
    """Make a minimal Debian. Needs no daemon; root only."""
    store = _store()
    with output.working(f"install Debian {suite}"):
        store.debootstrap(name, suite=suite, include=[item for item in include.split(",") if item])
    _made(store.info(name))


@application.command()
def upload(
    name: NewImage,
    archive: Annotated[Path, typer.Argument(help="tar, OCI or docker save.", exists=True, dir_okay=False)],
    replace: Replace = False,
) -> None:
    """Make an image of an archive through the daemon. It may be on another host."""
    with output.progress(f"send {archive.name}", archive.stat().st_size) as advanced:
        info = call(lambda host: host.images.upload(name, archive, replace=replace, progress=advanced))
    _made(info)


@application.command()
def build(
    name: NewImage,
    context: Annotated[str, typer.Argument(help="The directory that COPY reads, or a repository: URL#REF:DIRECTORY.")],
    file: Annotated[str | None, typer.Option("--file", "-f", help="The Dockerfile.")] = None,
    argument: Annotated[list[str] | None, typer.Option("--build-arg", help="NAME=VALUE")] = None,
    target: Annotated[str | None, typer.Option(help="Stop at this stage.")] = None,
    network: Annotated[str, typer.Option(help="What RUN may reach: none or open.")] = "none",
    replace: Replace = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Carry out steps that are kept, too.")] = False,
    secret: Annotated[
        list[str] | None, typer.Option("--secret", help="id=NAME,src=FILE or id=NAME,env=VARIABLE, for RUN --mount.")
    ] = None,
    ssh: Annotated[
        list[str] | None, typer.Option("--ssh", help="ID or ID=SOCKET of an agent of keys, for RUN --mount=type=ssh.")
    ] = None,
    build_context: Annotated[
        list[str] | None,
        typer.Option("--build-context", help="NAME=FOLDER, NAME=REPOSITORY or NAME=docker-image://IMAGE."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show the output.")] = False,
) -> None:
    """Build a Dockerfile, every step in a sandbox. Needs no Docker Engine."""
    from sandbox.messages import Network

    existing, agents = dict(_secret(item) for item in secret or []), dict(_agent(item) for item in ssh or [])
    pairs = {given.partition("=")[0]: given.partition("=")[2] for given in argument or []}
    contexts = {given.partition("=")[0]: given.partition("=")[2] for given in build_context or []}
    if network not in ("none", "open"):
        raise Invalid(f"--network is none or open, not {network!r}", hint="leave it out for none")
    reach = Network.open() if network == "open" else Network.none()

    def show(line: str) -> None:
        print(output.printable(line), file=sys.stderr, flush=True)

    _made(
        call(
            lambda host: host.images.build(
                name,
                context,
                file=file,
                arguments=pairs,
                target=target,
                network=reach,
                replace=replace,
                cache=not no_cache,
                secrets=existing,
                ssh=agents,
                contexts=contexts,
                output=None if quiet else show,
            )
        )
    )


@application.command()
def export(
    name: ImageName,
    archive: Annotated[Path, typer.Argument(help="A file that is not there yet: a tar of an OCI layout.")],
) -> None:
    """Write an image to an archive for docker, podman and skopeo."""
    if archive.exists():
        raise Invalid(f"{archive} exists already", hint="remove it, or choose another name")
    with output.progress(f"write {archive.name}", None) as advanced:
        call(lambda host: host.images.export(name, archive, progress=advanced))


@application.command()
def push(
    name: ImageName,
    reference: Annotated[str, typer.Argument(help="[registry/]path[:tag], such as registry:5000/team/web:2.")],
) -> None:
    """Send an image to a registry. Credentials are the daemon's, as with `pull`."""
    with output.working(f"push {reference}"):
        done = call(lambda host: host.images.push(name, reference))
    print(output.line(f"{done.reference}@{done.digest}"))


@application.command()
def commit(
    name: NewImage,
    checkpoint: CheckpointName,
    replace: Replace = False,
) -> None:
    """Make an image of the files of a checkpoint."""
    _made(call(lambda host: host.images.commit(checkpoint, name, replace=replace)))


@application.command()
def rm(name: ImageName) -> None:
    """Remove the name of an image. Its tree stays while another name or a sandbox needs it."""
    call(lambda host: host.images.remove(name))


def _secret(text: str) -> tuple[str, bytes]:
    """Of ``id=NAME,src=FILE``."""
    options = dict(word.partition("=")[::2] for word in text.split(","))
    name, file, variable = options.get("id"), options.get("src") or options.get("source"), options.get("env")
    if not name or (file is None) == (variable is None):
        raise Invalid(f"--secret {text.split(',')[0]}: not a secret", hint="id=NAME,src=FILE or id=NAME,env=VARIABLE")
    if variable is not None:
        if variable not in os.environ:
            raise Invalid(f"--secret id={name}: the variable {variable} is not set", hint="export it first")
        return name, os.environb[variable.encode()]
    try:
        return name, Path(file or "").read_bytes()
    except OSError as error:
        raise Invalid(f"--secret id={name}: {error}", hint="name a readable file: src=FILE") from None


def _agent(text: str) -> tuple[str, str]:
    """Of ``ID[=SOCKET]``."""
    name, _, place = text.partition("=")
    place = place or os.environ.get("SSH_AUTH_SOCK", "")
    if not name or not place:
        raise Invalid(
            f"--ssh {text}: no agent of keys", hint="start ssh-agent, or say ID=SOCKET, such as default=/a/socket"
        )
    return name, place


def _made(info: ImageInfo) -> None:
    print(output.line(f"{info.name} {info.digest[:12]} {output.size(info.size)}"))


def _store() -> Any:
    from sandbox.image.store import ImageStore
    from sandbox.tree.pool import BtrfsPool

    pool = BtrfsPool()
    try:
        pool.images.mkdir(mode=0o700, parents=True, exist_ok=True)
    except PermissionError as error:
        raise Forbidden(f"{error.filename} is root's", hint="use sudo, or `pagurus image upload`") from None
    return ImageStore(pool.images)
