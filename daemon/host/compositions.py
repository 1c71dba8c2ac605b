"""The composition of a new sandbox: checked, and filled with what the images of its services say.

No I/O.
"""

from __future__ import annotations

import ipaddress
import signal
from collections.abc import Mapping

import msgspec

from sandbox.container import services
from sandbox.container.cgroup import parse_bytes
from sandbox.errors import Invalid
from sandbox.image.store import StoredImage
from sandbox.messages import Composition, HealthCheck, Mount, Service
from sandbox.messages.services import MAX_SERVICES, Condition, Probe


def mounts(composition: Composition) -> list[Mount]:
    """What its services have of the host, outer directories first."""
    return [
        Mount.read_only(mount.source, services.below(name, mount.target))
        for name, service in composition.services.items()
        for mount in sorted(service.mounts, key=lambda mount: mount.target.count("/"))
    ]


def filled(requested: Composition, bases: Mapping[str, StoredImage]) -> Composition:
    """A composition with what the images of its services say where it is silent. Raises Invalid."""
    made = {name: completed(name, one, bases[name]) for name, one in requested.services.items()}
    for name, service in made.items():
        for other, dependency in service.depends_on.items():
            needs = dependency.condition is Condition.HEALTHY and other in made
            if needs and ((check := made[other].healthcheck) is None or not check.test):
                raise Invalid(f"service {name} waits for the health of {other}, which has no check", hint="add one")
    return msgspec.structs.replace(requested, services=made)


def completed(name: str, said: Service, base: StoredImage) -> Service:
    """Likewise one service."""
    image = base.config
    entrypoint = image.entrypoint if said.entrypoint is None else said.entrypoint
    command = said.command
    if command is None:
        command = image.cmd if said.entrypoint is None else []
    if not [*entrypoint, *command]:
        raise Invalid(f"service {name}: neither it nor its image {said.image} names a command", hint="give `command`")
    env = {**image.env, **said.env}
    return msgspec.structs.replace(
        said,
        entrypoint=entrypoint,
        command=command,
        env=env,
        user=said.user if said.user is not None else image.user or None,
        workdir=said.workdir or image.workdir,
        healthcheck=said.healthcheck or _probe(image.health_check),
        image_digest=base.digest,
        stop_signal=said.stop_signal or _signal(image.stop_signal),
    )


def _probe(check: HealthCheck | None) -> Probe | None:
    """The health check of an image, whose times are in nanoseconds and 0 where Docker's defaults are meant."""
    if check is None or not check.test or check.test[0] == "NONE":
        return None
    kind, *words = check.test
    times = {
        name: value / 1e9
        for name in ("interval", "timeout", "start_period", "start_interval")
        if (value := getattr(check, name)) > 0
    }
    argv = ["/bin/sh", "-c", *words[:1]] if kind == "CMD-SHELL" else words
    return Probe(test=argv, **times, retries=check.retries or 3)


def _signal(said: str) -> int | None:
    """A signal as an image names it; None for what is none."""
    if said.isdigit():
        return int(said) if 1 <= int(said) <= 64 else None
    return getattr(signal, said if said.startswith("SIG") else f"SIG{said}", None) if said else None


def need(requested: Composition, *, added: bool = False) -> None:
    """Raise Invalid for a composition that cannot be. `added`: programs of the sandbox have made its services."""
    if not (0 if added else 1) <= len(requested.services) <= MAX_SERVICES:
        raise Invalid(f"a composition has 1 to {MAX_SERVICES} services, not {len(requested.services)}", hint="split it")
    if requested.main not in requested.services and (requested.main or not added):
        raise Invalid(f"the main service {requested.main} is not there", hint="name one of the services")
    try:
        requested.order()
    except ValueError as error:
        raise Invalid(str(error), hint="change `depends_on`") from None
    published: dict[int, str] = {}
    for name, service in requested.services.items():
        for network in service.networks:
            if network not in requested.networks:
                raise Invalid(f"service {name}: no network {network}", hint="name it below `networks`")
        need_values(name, service)
        for port in service.ports:
            if (other := published.setdefault(port.published, name)) != name:
                raise Invalid(
                    f"services {other} and {name} both publish port {port.published}", hint="choose another for one"
                )


def need_values(name: str, service: Service) -> None:
    """Raise Invalid for values of one service that mean nothing."""
    for where in service.extra_hosts.values():
        _need_address(name, where)
    if service.limits.memory is not None:
        parse_bytes(service.limits.memory)


def _need_address(name: str, text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise Invalid(f"service {name}: {text!r} is no address of `extra_hosts`", hint="such as 10.0.0.7") from None
