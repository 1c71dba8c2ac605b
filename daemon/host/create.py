"""The request for a new sandbox, checked before anything is made.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from daemon.auth.budget import bounded
from daemon.auth.visibility import polls_like_id
from daemon.catalogue import Template
from daemon.host import compositions
from daemon.network.policy import compile_policy
from daemon.verdict import ignore
from daemon.wording import plain
from sandbox import paths
from sandbox.container.cgroup import parse_bytes
from sandbox.errors import Invalid
from sandbox.image.store import StoredImage, filed
from sandbox.messages import CreateRequest, Limits, Mount
from sandbox.messages.sandboxes import Settings

SANDBOX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_SETTINGS = 512 << 10  # bytes of all that is said of a sandbox: each turn writes it down
MAX_LABELS = 64 << 10  # bytes of its labels, names and values


def template(request: CreateRequest, image: StoredImage, mounts: Sequence[Mount], *, login: bool = False) -> Template:
    """All that is said of a sandbox of this image, whose `mounts` are admitted. Raises Invalid."""
    workdir = image.config.workdir if request.workdir is None else request.workdir
    if not workdir.startswith("/") or "\0" in workdir:
        raise Invalid(f"workdir must be absolute and without NUL bytes, not {workdir!r}", hint="such as /srv")
    _need_variables(request.env)
    _need_sizes(request.limits)
    ignore.checked(request.ignore)
    compile_policy(request.network)
    if request.composition is not None:
        compositions.need(request.composition, added=request.docker)
    made = Template(
        **{name: getattr(request, name) for name in Settings.__struct_fields__},
        image_digest=image.digest,
        login=login,
        layer=paths.runtime_layer().name,
        workdir=workdir,
        user=image.config.user if request.user is None else str(request.user),
    )
    made.limits, made.env, made.mounts = bounded(request.limits), {**image.config.env, **request.env}, list(mounts)
    if made.composition is not None and made.composition.main:
        main = made.composition.services[made.composition.main]
        made.env = {**main.env, **request.env}
        made.workdir = request.workdir or main.workdir or "/"
        made.user = str(main.user or "") if request.user is None else str(request.user)
    need_labels(made.labels)
    if len(msgspec.json.encode(made)) > MAX_SETTINGS:
        raise Invalid(f"the settings of a sandbox are {MAX_SETTINGS} bytes at most", hint="put large values in files")
    return made


def need_labels(labels: Mapping[str, str]) -> None:
    """Raise Invalid for labels of a sandbox that are too long together."""
    if sum(len(name.encode()) + len(value.encode()) for name, value in labels.items()) > MAX_LABELS:
        raise Invalid(f"the labels of a sandbox are {MAX_LABELS} bytes at most", hint="remove some, or use files")


def need_sense(request: CreateRequest, memory: int) -> None:
    """Refuse what only a slip can mean. `memory`: bytes that this host has. Raises Invalid."""
    if request.name is not None and polls_like_id(request.name):
        raise Invalid(f"{request.name!r} looks like an id, and is no name", hint="choose another name")
    if request.name is not None and SANDBOX_NAME.fullmatch(request.name) is None:
        fitting = re.sub(r"[^A-Za-z0-9._-]+", "-", request.name).strip("-._")[:64] or "web"
        raise Invalid(
            f"{request.name[:80]!r} is no name for a sandbox",
            hint=f"use up to 64 letters, digits, dots, dashes and underscores, such as {fitting}",
        )
    if request.limits.memory is not None and parse_bytes(request.limits.memory) > memory:
        raise Invalid(
            f"{request.limits.memory} of memory are more than this host has: {memory / (1 << 30):.1f} GiB",
            hint="ask for less, or for no limit (None)",
        )


def imported(settings: Mapping[str, Any], image: StoredImage, *, host_mounts: bool) -> Template:
    """The settings of a checkpoint that comes from elsewhere, held to the rules of a new sandbox. Raises Invalid.

    `host_mounts`: the importer lets it name directories of this host, which are then to be admitted.
    """
    try:
        said = msgspec.convert(settings, Template)
        requested = {name: getattr(said, name) for name in Settings.__struct_fields__}
        request = CreateRequest(**requested, workdir=said.workdir, user=said.user or None)
        msgspec.convert(msgspec.to_builtins(request), CreateRequest)  # holds the user to the bounds of a request
    except msgspec.ValidationError as error:
        raise Invalid(
            f"the settings for forks cannot be read: {plain(error)}", hint="export the checkpoint again"
        ) from None
    if filed(said.image) is None:
        raise Invalid(f"not an image name: {said.image[:80]!r}", hint="export the checkpoint again")
    if said.gateway is not None:
        raise Invalid("how an agent reaches a model is no matter of a checkpoint", hint="export it without a gateway")
    sources = [mount.source[:200] for mount in said.mounts if mount.source is not None]
    if sources and not host_mounts:
        raise Invalid(
            f"the checkpoint mounts directories of this host: {', '.join(map(repr, sources[:8]))}",
            hint="if its forks may read them, import it so that it may (`--mounts`, `mounts=True`)",
        )
    if said.layer:
        paths.runtime_layer(said.layer)
    if request.docker and request.composition is not None:  # what was built there is not here
        request.composition = msgspec.structs.replace(request.composition, images={})
    made = template(request, image, request.mounts, login=said.login)
    return msgspec.structs.replace(made, env=said.env, user=said.user, layer=said.layer)


def _need_sizes(limits: Limits) -> None:
    for size in (limits.memory, limits.disk, limits.checkpoints):
        if size is not None:
            parse_bytes(size)


def _need_variables(env: Mapping[str, str]) -> None:
    """What no program could be started with would make a sandbox in which nothing runs."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise Invalid(
                f"{name!r} is no name of an environment variable", hint="leave it out, or name it without = and NUL"
            )
        if "\0" in value:
            raise Invalid(f"the environment variable {name} holds a NUL byte", hint="leave the byte out")
