"""SDK <-> daemon: sandboxes and the host."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from sandbox.messages.brief import Brief
from sandbox.messages.gateway import Gateway
from sandbox.messages.ignore import IgnoreRules
from sandbox.messages.network import Network
from sandbox.messages.processes import User
from sandbox.messages.services import Composition


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Resource limits of a sandbox. Example: ``Limits(cpus=1, memory="1GiB")``."""

    cpus: Annotated[float, msgspec.Meta(ge=0.01, le=100_000)] | None = None  # cores; 0.5 is half of one
    memory: str | int | None = "1GiB"  # bytes, or a string with KiB/MiB/GiB
    processes: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)] | None = 256  # tasks, threads included; None: 1,024
    open_files: Annotated[int, msgspec.Meta(ge=16, le=1 << 20)] = 4096  # RLIMIT_NOFILE of each process
    disk: str | int | None = "4GiB"  # bytes written, scratch included, as far as it or a checkpoint holds them
    checkpoints: str | int | None = None  # bytes of memory that its checkpoints hold; None: half of the host's disk


class Retention(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which checkpoints of a living sandbox are kept. Example: ``Retention(last=20)``.

    A checkpoint stays when any of these names it, and always while a sandbox is based on it, a fork was made from it,
    or it is being read.
    """

    last: int | None = None  # the newest N, at least 1; None keeps all
    labelled: bool = True  # those with a label
    leaves: bool = True  # those from which nothing descends

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ValueError("retention must keep at least the last checkpoint")


class Mount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A directory in addition to the file tree of a sandbox, and no part of its checkpoints.

    Example: ``Mount.read_only("/srv/datasets", "/data")``, ``Mount.scratch("/scratch", size="10GiB")``.
    """

    target: str  # in the sandbox: absolute; made when it is missing
    source: str | None = None  # of the host, read-only; None: scratch of the sandbox's own
    size: str | int = "1GiB"  # of scratch, at most

    @classmethod
    def read_only(cls, source: str, target: str) -> Mount:
        """A directory of the host, which only administrators may mount."""
        return cls(target=target, source=source)

    @classmethod
    def scratch(cls, target: str, *, size: str | int = "1GiB") -> Mount:
        """Space that a restore leaves as it is; a fork begins with an empty one."""
        return cls(target=target, size=size)


class AtEnd(enum.StrEnum):
    """What happens to a sandbox whose time is over."""

    STOP = "stop"  # a last checkpoint, then its processes are killed; restore() revives it
    REMOVE = "remove"


Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Settings(msgspec.Struct, kw_only=True):
    """What a sandbox is created with, and keeps: the request, the sandbox's row and what forks inherit have these."""

    image: str  # of a request with a composition: ""
    limits: Limits = Limits()
    network: Network = Network()
    env: dict[str, str] = {}  # of a request: on top of the image's
    labels: dict[str, str] = {}
    durable_answers: bool = False  # hold answers until durable instead of until captured
    replicated_answers: bool = False  # hold answers until another host or the store has the state: in a cluster
    gateway: Gateway | None = None  # how its agent reaches a model
    retention: Retention | None = None  # which checkpoints are kept; None: as the host does by default
    mounts: list[Mount] = []  # in addition to the file tree
    ignore: IgnoreRules | None = None  # what alone makes no checkpoint
    composition: Composition | None = None  # the services that it consists of, instead of an image
    docker: bool = False  # its programs find an Engine API at DOCKER_HOST, whose containers are services of the sandbox
    no_new_privs: bool = False  # set-user-ID programs and file capabilities give nothing: no sudo, su, ping
    lifetime: Seconds | None = None  # from its creation; never cuts a call short
    idle_timeout: Seconds | None = None  # without any call
    at_end: AtEnd = AtEnd.STOP


class CreateRequest(Settings, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes"""

    name: str | None = None
    workdir: str | None = None  # absolute; None: the image's
    user: User | None = None  # who commands run as that do not say; None: the image's, root where it names none


class SandboxState(enum.StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    RESTORING = "restoring"
    DEAD = "dead"  # pid 1 is gone; restore() brings it back
    REMOVED = "removed"


class SandboxInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a sandbox, as listed."""

    id: str
    image: str
    state: SandboxState
    created_at: float  # seconds since the epoch
    name: str | None = None
    turn: int = 0  # turns ended so far
    head: str | None = None  # checkpoint that its current state descends from
    labels: dict[str, str] = {}
    limits: Limits = Limits()
    lifetime: float | None = None  # seconds from its creation
    idle_timeout: float | None = None  # seconds without a call
    at_end: AtEnd = AtEnd.STOP
    owner: str = ""  # whose it is; "": the host's own


class LifetimeRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: PUT /v1/sandboxes/{id}/lifetime"""

    seconds: Seconds | None  # from now; None: it does not end by itself


class LabelsRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: PATCH /v1/sandboxes/{id}/labels: set those with a value, remove those with null."""

    labels: dict[str, str | None]


class Statistics(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: GET /v1/statistics"""

    sandboxes: int = 0
    turns: int = 0
    verdicts: dict[str, int] = {}
    checkpoints: dict[str, int] = {}  # by what they captured: files, processes, both
    checkpoints_failed: int = 0
    in_flight: int = 0  # being taken now
    queued: int = 0
    stored_bytes: int = 0
    full_bytes: int = 0
    restores: int = 0
    stages: dict[str, dict[str, float]] = {}  # of the checkpoint queue: queued, running, started, wait_ms_p50, _p99
    exposed_ms_p50: float = 0.0  # how long the latest commands waited for the checkpoint before them
    exposed_ms_p99: float = 0.0
    store: dict[str, int] = {}  # checkpoints removed, pages collected, snapshots hashed, verified, damaged
