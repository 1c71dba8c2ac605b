"""Where in a sandbox a call acts: in its one tree, or in a service of a composition.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

from daemon.catalogue import SandboxRow
from sandbox.container import services
from sandbox.errors import Invalid, NotFound


@dataclass(frozen=True)
class Place:
    """What a command has there that says nothing else."""

    root: str = ""  # of a service; "": that of the sandbox
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""  # "": root
    service: str = ""


def place(row: SandboxRow, service: str | None) -> Place:
    """The place of a call that names this service; None: the main one, or the sandbox. Raises Invalid, NotFound."""
    composition = row.composition
    env = {"HOSTNAME": row.hostname, **row.env}
    if composition is None:
        if service is None:
            return Place(env=env, workdir=row.workdir, user=row.user)
        raise Invalid("it has no services", hint="leave `service` out", sandbox=row.id)
    name = service or composition.main
    if not name:
        return Place(env=env, workdir=row.workdir, user=row.user)
    said, main = composition.services.get(name), composition.services.get(composition.main)
    if said is None:
        raise NotFound(f"no service {name}", hint=f"there are: {', '.join(composition.services)}", sandbox=row.id)
    named = {"HOSTNAME": said.hostname or row.hostname}
    if name == composition.main:
        return Place(services.root(name), named | row.env, row.workdir, row.user, name)
    host: dict[str, str] = {}  # gateway, credentials; a container that a program has added gets none of it
    if main is not None and not said.container:
        host = {key: value for key, value in row.env.items() if key not in main.env}
    return Place(
        services.root(name),
        named | host | said.env,
        said.workdir or "/",
        "" if said.user is None else str(said.user),
        name,
    )


def located(row: SandboxRow, at: Place, path: str) -> tuple[str, str]:
    """The directory of the sandbox below which a path of this place lies, and the path from there.

    What is in a volume, or in another part of the sandbox's tree, lies below that: the file routes pass no mount.
    """
    if not at.service or row.composition is None:
        return "", path
    inner = PurePosixPath("/", path)
    for tree in row.composition.services[at.service].trees:
        if inner == PurePosixPath(tree.target):
            return "", tree.source
        if inner.is_relative_to(tree.target):
            return tree.source, str("/" / inner.relative_to(tree.target))
    for volume in row.composition.services[at.service].volumes:
        if inner.is_relative_to(volume.target):
            return f"{services.VOLUMES}/{volume.name}", str("/" / inner.relative_to(volume.target))
    return at.root, path
