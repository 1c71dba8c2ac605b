"""What a new sandbox is asked to be, checked before anything is made.

Owns: the rules of a request and how it goes with its image's configuration. Does not own: who may ask
(:mod:`daemon.auth.visibility`), mounts (:mod:`daemon.host.mounts`), making it (:mod:`daemon.host.host`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daemon.catalogue import Template
from daemon.network.policy import compile_policy
from daemon.verdict import ignore
from sandbox import paths
from sandbox.errors import Invalid
from sandbox.image.store import Image
from sandbox.messages import CreateRequest, Mount


def template(request: CreateRequest, image: Image, mounts: Sequence[Mount]) -> Template:
    """All that is said of a sandbox of this image, whose `mounts` are admitted. Raises Invalid."""
    workdir = image.config.workdir if request.workdir is None else request.workdir
    if not workdir.startswith("/") or "\0" in workdir:
        raise Invalid(f"workdir must be absolute and without NUL bytes, not {workdir!r}")
    _need_variables(request.env)
    ignore.checked(request.ignore)
    compile_policy(request.network)
    return Template(
        image=request.image,
        image_digest=image.digest,
        layer=paths.runtime_layer().name,
        limits=request.limits,
        network=request.network,
        env={**image.config.env, **request.env},
        workdir=workdir,
        user=image.config.user if request.user is None else str(request.user),
        labels=request.labels,
        mounts=list(mounts),
        durable_answers=request.durable_answers,
        gateway=request.gateway,
        retention=request.retention,
        ignore=request.ignore,
        lifetime=request.lifetime,
        idle_timeout=request.idle_timeout,
        at_end=request.at_end,
    )


def _need_variables(env: Mapping[str, str]) -> None:
    """What no program could be started with would make a sandbox in which nothing runs."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise Invalid(f"{name!r} is no name of an environment variable")
        if "\0" in value:
            raise Invalid(f"the environment variable {name} holds a NUL byte")
