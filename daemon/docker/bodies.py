"""What clients of Docker's Engine API send, and what it is as a service.

No I/O. The names are those of the API, version 1.43; what is not named here changes nothing that a container can
observe. `options` says what is refused, and of what a client is warned.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection
from typing import Annotated, Any

import msgspec

from daemon.docker import options
from sandbox.compose.connections import FIRST_FREE
from sandbox.container import services
from sandbox.errors import Invalid, Unsupported
from sandbox.messages import Service
from sandbox.messages.services import (
    Probe,
    PublishedPort,
    Restart,
    ServiceLimits,
    TreeMount,
    Volume,
)

BRIDGE = "bridge"  # the network of containers that name none
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_PORT = re.compile(r"(\d{1,5})(?:/(tcp|udp|sctp))?")
NANOSECONDS = 1e9
Words = list[str] | str | None


class _Body(msgspec.Struct, kw_only=True, rename="pascal"):
    """Clients send null for what they do not say."""


class PortBinding(_Body):
    host_port: str = ""


class MountBody(_Body):
    type: str = "volume"
    source: str = ""
    target: str = ""
    read_only: bool = False


class RestartBody(_Body):
    name: str = ""
    maximum_retry_count: int = 0


class HostConfig(_Body):
    binds: list[str] | None = None
    mounts: list[MountBody] | None = None
    port_bindings: dict[str, list[PortBinding] | None] | None = None
    restart_policy: RestartBody | None = None
    auto_remove: bool = False
    network_mode: str = ""
    memory: int = 0
    nano_cpus: int = 0
    pids_limit: int | None = None
    tmpfs: dict[str, str] | None = None
    extra_hosts: list[str] | None = None
    privileged: bool = False
    cap_add: Words = None
    devices: list[Any] | None = None
    volumes_from: list[str] | None = None
    links: list[str] | None = None
    pid_mode: str = ""
    ipc_mode: str = ""
    uts_mode: str = msgspec.field(default="", name="UTSMode")
    userns_mode: str = ""
    cgroupns_mode: str = ""
    cgroup_parent: str = ""
    runtime: str = ""
    readonly_rootfs: bool = False
    publish_all_ports: bool = False
    sysctls: dict[str, str] | None = None
    dns: list[str] | None = None
    dns_options: list[str] | None = None
    dns_search: list[str] | None = None
    device_requests: list[Any] | None = None
    device_cgroup_rules: list[str] | None = None
    group_add: list[str] | None = None
    ulimits: list[Any] | None = None
    cap_drop: Words = None
    security_opt: list[str] | None = None
    shm_size: int = 0


class HealthBody(_Body):
    test: list[str] | None = None
    interval: int = 0  # nanoseconds, as all times here
    timeout: int = 0
    retries: int = 0
    start_period: int = 0
    start_interval: int = 0


class AddressBody(_Body):
    address: str = msgspec.field(default="", name="IPv4Address")


class EndpointBody(_Body):
    aliases: list[str] | None = None
    address: AddressBody | None = msgspec.field(default=None, name="IPAMConfig")


class NetworkingBody(_Body):
    endpoints_config: dict[str, EndpointBody | None] | None = None


class ContainerBody(_Body):
    """POST /containers/create"""

    image: str = ""
    cmd: Words = None
    entrypoint: Words = None
    env: list[str] | None = None
    user: str = ""
    working_dir: str = ""
    labels: dict[str, str] | None = None
    tty: bool = False
    open_stdin: bool = False
    hostname: str = ""
    domainname: str = ""
    exposed_ports: dict[str, Any] | None = None
    stop_signal: str = ""
    stop_timeout: int | None = None
    healthcheck: HealthBody | None = None
    volumes: dict[str, Any] | None = None
    host_config: HostConfig | None = None
    networking_config: NetworkingBody | None = None


class ExecBody(_Body):
    """POST /containers/{id}/exec"""

    cmd: Words = None
    env: list[str] | None = None
    user: str = ""
    working_dir: str = ""
    tty: bool = False
    attach_stdin: bool = False
    privileged: bool = False


class ExecStartBody(_Body):
    detach: bool = False
    tty: bool = False


class NetworkBody(_Body):
    name: Annotated[str, msgspec.Meta(pattern=_NAME.pattern)]
    driver: str = ""
    internal: bool = False
    labels: dict[str, str] | None = None


class ConnectBody(_Body):
    container: str
    endpoint_config: EndpointBody | None = None


class VolumeBody(_Body):
    name: str = ""
    labels: dict[str, str] | None = None


def words(said: Words) -> list[str] | None:
    return [said] if isinstance(said, str) else said


def variables(said: list[str] | None) -> dict[str, str]:
    """``["A=1", "B"]`` as variables; one without a value is left out, as it is of the client's own environment."""
    return {name: value for name, equals, value in (text.partition("=") for text in said or []) if equals}


def service(body: ContainerBody, name: str, taken: Collection[int] = ()) -> Service:
    """The service that a container is to be. `taken`: ports of others. Raises Invalid, Unsupported."""
    host = body.host_config or HostConfig()
    options.need_possible(body, host)
    binds, volumes, tmpfs = _mounts(host)
    policy = host.restart_policy or RestartBody()
    return Service(
        image=body.image,
        entrypoint=words(body.entrypoint) or None,
        command=words(body.cmd),
        env=variables(body.env),
        user=body.user or None,
        workdir=body.working_dir or None,
        healthcheck=_probe(body.healthcheck),
        restart=_restart(policy.name),
        restart_attempts=min(max(policy.maximum_retry_count, 0), 1000),
        volumes=volumes,
        trees=binds,
        tmpfs=[*(host.tmpfs or {}), *tmpfs],
        networks=_networks(body, host, name),
        extra_hosts=_extra_hosts(host.extra_hosts or []),
        hostname=body.hostname,
        ports=_ports(body, host, taken),
        limits=ServiceLimits(
            cpus=host.nano_cpus / NANOSECONDS if host.nano_cpus > 0 else None,
            memory=host.memory if host.memory > 0 else None,
            processes=host.pids_limit if host.pids_limit and host.pids_limit > 0 else None,
        ),
        stop_signal=signal_number(body.stop_signal) if body.stop_signal else None,
        stop_grace_period=10.0 if body.stop_timeout is None else float(max(body.stop_timeout, 0)),
        labels=body.labels or {},
        remove_at_end=host.auto_remove,
        stdin_open=body.open_stdin,
        tty=body.tty,
    )


def _networks(body: ContainerBody, host: HostConfig, name: str) -> dict[str, list[str]]:
    said = (body.networking_config or NetworkingBody()).endpoints_config or {}
    mode = host.network_mode if host.network_mode not in ("", "default") else BRIDGE
    if mode == "none":
        return {none_of(name): []}
    for network, endpoint in said.items():
        if endpoint is not None and endpoint.address is not None and endpoint.address.address:
            raise options.refuse_address(network, endpoint.address.address)
    networks = {network: (endpoint or EndpointBody()).aliases or [] for network, endpoint in said.items()}
    networks = {BRIDGE if network == "default" else network: aliases for network, aliases in networks.items()}
    return networks or {mode: []}


def none_of(name: str) -> str:
    """The network of a container that is to have none: it is alone in it."""
    return f"{services.ALONE}{name}"[:63]


def _mounts(host: HostConfig) -> tuple[list[TreeMount], list[Volume], list[str]]:
    trees: list[TreeMount] = []
    volumes: list[Volume] = []
    tmpfs: list[str] = []

    def add(source: str, target: str, read_only: bool) -> None:
        if not target.startswith("/"):
            raise Invalid(f"nothing can be mounted at {target!r}", hint="say an absolute path")
        if source.startswith("/"):
            trees.append(TreeMount(source=source, target=target, read_only=read_only))
        elif _NAME.fullmatch(source):
            volumes.append(Volume(name=source, target=target, read_only=read_only))
        else:
            raise Invalid(f"{source!r} names no volume and no directory", hint="say a name, or an absolute path")

    for bind in host.binds or []:
        source, _, rest = bind.partition(":")
        target, _, said = rest.partition(":")
        add(source, target, "ro" in said.split(","))
    for mount in host.mounts or []:
        if mount.type == "tmpfs":
            tmpfs.append(mount.target)
        elif mount.type in ("bind", "volume"):
            add(mount.source, mount.target, mount.read_only)
        else:
            raise Unsupported(f"a container in a sandbox has no mount of type {mount.type}", hint="bind, volume, tmpfs")
    return trees, volumes, tmpfs


def created_sources(body: ContainerBody) -> list[str]:
    """The directories of the sandbox that Docker makes where they are missing: of ``-v``, not of ``--mount``."""
    binds = (body.host_config or HostConfig()).binds or []
    return [source for source, _, _ in (bind.partition(":") for bind in binds) if source.startswith("/")]


def _ports(body: ContainerBody, host: HostConfig, taken: Collection[int]) -> list[PublishedPort]:
    bindings = dict(host.port_bindings or {})
    if host.publish_all_ports:
        bindings = {**{text: [PortBinding()] for text in body.exposed_ports or {}}, **bindings}
    result: list[PublishedPort] = []
    for text, places in bindings.items():
        match = _PORT.fullmatch(text)
        if match is None or not 0 < int(match[1]) < 65_536:
            raise Invalid(f"{text!r} is no port", hint="such as 80/tcp")
        if match[2] not in (None, "tcp"):
            continue  # within the sandbox every port of a container is reached anyway
        for place in places or []:
            used = {*taken, *(one.published for one in result)}
            result.append(PublishedPort(target=int(match[1]), published=_published(place.host_port, used)))
    return result


def _published(said: str, used: Collection[int]) -> int:
    """The number that is named, or the first free one of a range, or of all where none is named. Raises Invalid.

    >>> _published("8080", {8080}), _published("8000-8005", {8000}), _published("", set())
    (8080, 8001, 32768)
    """
    low, _, high = said.partition("-")
    if low.isdigit() and int(low) and not high:
        return int(low)
    numbers = range(int(low), int(high) + 1) if low.isdigit() and high.isdigit() else range(FIRST_FREE, 65_536)
    for number in numbers:
        if number not in used:
            return number
    raise Invalid(f"no port of {said[:20]} is free", hint="name a larger range")


def _restart(name: str) -> Restart:
    try:
        return Restart(name or "no")
    except ValueError:
        raise Invalid(f"{name[:40]!r} is no restart policy", hint=f"one of {', '.join(Restart)}") from None


def _extra_hosts(said: list[str]) -> dict[str, str]:
    result = {}
    for text in said:
        name, _, where = text.partition(":" if ":" in text else "=")
        result[name] = "127.0.0.1" if where == "host-gateway" else where
    return result


def _probe(body: HealthBody | None) -> Probe | None:
    if body is None or not body.test:
        return None
    kind, *rest = body.test
    if kind == "NONE":
        return Probe(test=[])
    times = {
        name: value / NANOSECONDS
        for name in ("interval", "timeout", "start_period", "start_interval")
        if (value := getattr(body, name)) > 0
    }
    test = ["/bin/sh", "-c", *rest[:1]] if kind == "CMD-SHELL" else rest
    return Probe(test=test, retries=min(max(body.retries, 1), 1000) if body.retries else 3, **times)


def signal_number(text: str) -> int:
    """``"SIGKILL"``, ``"KILL"`` or ``"9"``. Raises Invalid.

    >>> signal_number("KILL"), signal_number("SIGTERM"), signal_number("9")
    (9, 15, 9)
    """
    if text.isdigit() and 0 < int(text) <= 64:
        return int(text)
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    number = signal.Signals.__members__.get(name)
    if number is None:
        raise Invalid(f"{text[:40]!r} is no signal", hint="such as SIGTERM")
    return number.value
