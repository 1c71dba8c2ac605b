"""SDK <-> daemon: several services in one sandbox, each with the file tree of an image of its own.

The names are those of the Compose specification, which :mod:`sandbox.compose` reads.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

from sandbox.messages.brief import Brief
from sandbox.messages.images import ImageName
from sandbox.messages.processes import ServiceName, SignalNumber, User

MAX_SERVICES = 32
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_MainName = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,62})?$")]
_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=r"^/[^\0]*$")]


class Restart(enum.StrEnum):
    NO = "no"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"
    UNLESS_STOPPED = "unless-stopped"


class Condition(enum.StrEnum):
    STARTED = "service_started"
    HEALTHY = "service_healthy"
    COMPLETED = "service_completed_successfully"


class Dependency(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    condition: Condition = Condition.STARTED
    required: bool = True  # False: a service that cannot be started, or fails, holds no other up
    restart: bool = False  # it is restarted with the one that it depends on, when a client restarts that


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to ask a service whether it is well. Times in seconds, defaults as Docker's."""

    test: list[str]  # a program and its arguments; a shell line is ["/bin/sh", "-c", line]; []: none
    interval: _Seconds = 30.0
    timeout: _Seconds = 30.0
    retries: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3  # failures in a row that make it unhealthy
    start_period: _Seconds = 0.0  # in which failures do not count
    start_interval: _Seconds = 5.0  # between questions within the start period


class Volume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A directory that services share, part of the sandbox's file tree and so of its checkpoints.

    When it is made, it gets what the image of the first service that names it has at `target`, as in Docker.
    """

    name: ServiceName
    target: _Path  # in the service; a directory
    read_only: bool = False


class HostMount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A directory of the host, read-only and no part of checkpoints, as :class:`Mount` is."""

    source: _Path
    target: _Path  # in the service


class TreeMount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A file or directory of the sandbox's own tree, for a service that a program of the sandbox has made."""

    source: _Path  # in the sandbox
    target: _Path  # in the service
    read_only: bool = False


class PublishedPort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A port of a service under a number by which clients outside ask for it (`sandbox.ports`).

    Of one that a program of the sandbox has made, the sandbox's other programs find it at 127.0.0.1 by that number.
    """

    target: Port  # on which the service listens
    published: Port
    protocol: Literal["tcp"] = "tcp"


class ServiceLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one service, within those of the sandbox."""

    cpus: Annotated[float, msgspec.Meta(ge=0.01, le=100_000)] | None = None
    memory: str | int | None = None  # bytes, or a string with KiB/MiB/GiB
    processes: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)] | None = None


class Service(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One service. What is None or empty is as its image says."""

    image: ImageName
    entrypoint: list[str] | None = None  # one of its own drops the image's command, as in Docker
    command: list[str] | None = None
    env: dict[str, str] = {}  # on top of the image's
    user: User | None = None
    workdir: _Path | None = None
    depends_on: dict[ServiceName, Dependency] = {}
    healthcheck: Probe | None = None
    restart: Restart = Restart.NO
    restart_attempts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0  # of on-failure; 0: without end
    volumes: list[Volume] = []
    mounts: list[HostMount] = []
    trees: list[TreeMount] = []
    tmpfs: list[_Path] = []  # directories that are empty whenever it starts
    networks: dict[ServiceName, list[ServiceName]] = msgspec.field(
        default_factory=lambda: {"default": []}
    )  # its other names in each
    extra_hosts: dict[ServiceName, str] = {}  # name -> IPv4 or IPv6 address
    hostname: str = ""  # another name of it, for itself
    ports: list[PublishedPort] = []
    limits: ServiceLimits = ServiceLimits()
    stop_signal: SignalNumber | None = None  # None: the image's, SIGTERM
    stop_grace_period: _Seconds = 10.0
    labels: dict[str, str] = {}
    image_digest: str = ""  # the content that the image's name meant then; the daemon says
    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SERVICES)] | None = None  # of its address; None: its place in order
    container: str = ""  # the id of one that a program of the sandbox has added
    created_at: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0  # of such a one: seconds since the epoch
    claimed: list[PublishedPort] = []  # of such a one: those that another one has, which its next start takes over
    remove_at_end: bool = False  # of such a one: it goes when its program has ended
    stdin_open: bool = False  # its stdin is a pipe that stays open, so that a shell waits; else it is empty
    tty: bool = False  # its streams are a terminal


class ServiceNetwork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Services that share none of these cannot reach each other."""

    internal: bool = False  # a service with no other network reaches nothing outside the sandbox
    labels: dict[str, str] = {}


class Composition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The services of a sandbox. Example: ``Composition(services={"db": Service(image="postgres:17")}, main="db")``."""

    services: dict[ServiceName, Service]
    networks: dict[ServiceName, ServiceNetwork] = msgspec.field(default_factory=lambda: {"default": ServiceNetwork()})
    volume_labels: dict[ServiceName, dict[str, str]] = {}  # of volumes that programs of the sandbox have made
    #: Images that programs of the sandbox have built: by the name that they gave, that on the host.
    images: dict[Annotated[str, msgspec.Meta(max_length=200)], ImageName] = {}
    main: _MainName  # the one that calls mean which name none; "": the sandbox's own tree

    def order(self) -> list[str]:
        """The services, each after those that it depends on. Raises ValueError where that is not possible."""
        result: dict[str, None] = {}

        def visit(name: str, way: tuple[str, ...]) -> None:
            if name in way:
                raise ValueError(f"services depend on each other in a circle: {' -> '.join((*way, name))}")
            for needed, dependency in self.services[name].depends_on.items():
                if needed in self.services:
                    visit(needed, (*way, name))
                elif dependency.required:
                    raise ValueError(f"service {name} depends on {needed}, which is not there")
            result[name] = None

        for name in self.services:
            visit(name, ())
        return list(result)


class ServiceState(enum.StrEnum):
    CREATED = "created"  # not started yet
    RUNNING = "running"
    EXITED = "exited"
    RESTARTING = "restarting"  # it ended, and is started again after a pause


class ServiceHealth(enum.StrEnum):
    NONE = "none"  # it has no health check
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class ServiceInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a service, as it is in the sandbox's present state."""

    name: str
    image: str
    state: ServiceState
    address: str  # IPv4, inside the sandbox
    health: ServiceHealth = ServiceHealth.NONE
    command: str = ""  # its beginning
    program: str | None = None  # its process, by whose id logs are read and signals sent
    pid: int = 0  # inside the sandbox
    started_at: float = 0.0  # seconds since the epoch
    ended_at: float = 0.0  # the same; 0: it has not, or when is not known
    exit_code: int | None = None  # 128 + signal number when killed by one
    restarts: int = 0
    ports: list[PublishedPort] = []
    error: str = ""  # why it could not be started; the last answer of an unhealthy one
    oom_killed: bool = False  # it has ended, and the OOM killer acted in it: on a limit of its own alone


class UpRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/services/up: start those that do not run, in order. Ends a turn.

    Returns when each runs and those with a health check are healthy, or, like `docker compose up --wait`, raises when
    one cannot be started, ends with a failure or becomes unhealthy.
    """

    services: list[ServiceName] = []  # with those that they depend on; []: all
    timeout: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 300.0  # seconds
    wait: bool = True  # False: not for the health of those on which no other waits


class StopRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/services/{service}/stop and .../restart"""

    timeout: _Seconds | None = None  # seconds until it is killed; None: its own
