"""Coordinator <-> daemons, and the command line <-> coordinator: hosts that work as one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sandbox.messages.brief import Brief
from sandbox.messages.commands import TurnInfo
from sandbox.messages.gateway import Gateway
from sandbox.messages.sandboxes import Limits

SOLE = "on."  # labels of a sandbox that begin so ask for a label of the host: on.zone=a
HostName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
SandboxId = Annotated[str, msgspec.Meta(pattern="^s-[0-9a-f]{10}$")]
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]  # bytes
SomeSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]  # bytes that others are divided by


class HostedSandbox(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sandbox, as its daemon reports it to the coordinator."""

    id: SandboxId
    owner: str = ""
    name: str | None = None
    image: str = ""
    limits: Limits = Limits()
    state: str = ""
    head: str = ""  # checkpoint that its current state descends from
    durable: str = ""  # the newest durable checkpoint that its state descends from
    durable_turn: int = 0  # after which that was taken
    turn: int = 0
    created_at: float = 0.0
    replicated_answers: bool = False
    labels: dict[str, str] = {}  # those that ask for a label of the host: on.NAME
    idle_s: float | None = None  # seconds for which it was not used; None: it is in use
    bound: str = ""  # what it would lose if it went on elsewhere


class HostReport(Brief, kw_only=True, omit_defaults=True):
    """daemon -> coordinator: POST /v1/host. What a host has, holds and does."""

    clock: Moment  # of a clock that runs evenly since `boot`, while the host sleeps too
    boot: str  # another one after each start of the host
    cpus: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    memory_bytes: SomeSize
    memory_free: Size
    disk_bytes: SomeSize
    disk_free: Size
    load: Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # tasks that run or want to, over the last minute
    images: Annotated[dict[str, str], msgspec.Meta(max_length=100_000)] = {}  # digests by name
    sandboxes: Annotated[list[HostedSandbox], msgspec.Meta(max_length=10_000)] = []


class LeaseRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """coordinator -> daemon: POST /v1/host. `until`: a moment of the host's clock; None: the lease stays as it is.

    `boot`: the start of the host whose clock that is; for another one it means nothing. `release`: it needs none.
    """

    until: Moment | None = None
    boot: str = ""
    release: bool = False


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class ReportedExchange(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """daemon -> coordinator -> daemon: an exchange of an agent with its model, as the gateway's journal has it."""

    checkpoint: Annotated[str, msgspec.Meta(max_length=200)] | None
    turn: Count
    key: Annotated[bytes, msgspec.Meta(max_length=64)]
    path: Annotated[str, msgspec.Meta(max_length=4096)]
    state: Literal["requested", "answered", "failed"]
    started: Moment
    ended: Moment | None
    status: Annotated[int, msgspec.Meta(ge=100, le=999)] | None
    requested: Count
    answered: Count
    recorded: Count
    headers: bytes | None
    envelope: bytes
    response: bytes | None
    request_bytes: Count
    response_bytes: Count
    parts: Annotated[list[Hash], msgspec.Meta(max_length=10_000)] = []  # hashes of texts


class ConversationExport(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """daemon -> coordinator -> daemon: GET /v1/checkpoints/{id}/conversation. What the gateway of another host must
    know of a sandbox, as of a checkpoint."""

    gateway: Gateway | None = None  # None: the sandbox has none
    token: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # hash of that of an agent outside
    exchanges: Annotated[list[ReportedExchange], msgspec.Meta(max_length=10_000)] = []  # the newest first
    texts: Annotated[dict[Hash, bytes], msgspec.Meta(max_length=100_000)] = {}  # compressed, by hash


class ArriveRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """coordinator -> daemon: POST /v1/checkpoints/{id}/arrive. A sandbox of another host continues here, as itself."""

    id: SandboxId
    name: str | None = None
    owner: str = ""
    created_at: Moment = 0.0
    programs: dict[str, Any] = {}  # its sessions, processes and terminals, as the other host reported them
    turns: Annotated[list[TurnInfo], msgspec.Meta(max_length=1000)] = []  # its record of them, as far as it is known
    conversation: ConversationExport = msgspec.field(default_factory=ConversationExport)
    verify: bool = True
    ahead: bool = False  # only prepare what it needs, for a later call that says the same but for the checkpoint
    newer: bool = True  # `ahead`: it will be a newer checkpoint, of which only what changed will come; else this one,
    # all of which is restored, and frozen until then


class HoldRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """coordinator -> daemon: PUT /v1/sandboxes/{id}/hold. The sandbox is about to be held: prepare that."""

    since: str  # the checkpoint that the other host has


class HeldSandbox(Brief, kw_only=True, omit_defaults=True):
    """daemon -> coordinator: POST /v1/sandboxes/{id}/hold. A sandbox is frozen: what the other host must know."""

    checkpoint: str  # its last one
    programs: dict[str, Any] = {}
    conversation: ConversationExport = msgspec.field(default_factory=ConversationExport)
    turns: list[TurnInfo] = []  # the newest


class DepartedSandbox(Brief, kw_only=True, omit_defaults=True):
    """daemon -> coordinator: POST /v1/sandboxes/{id}/left. A sandbox that went on elsewhere is removed there."""

    checkpoint: str = ""  # its newest durable state, which stays for copies to build upon


class MoveRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """CLI -> coordinator: POST /v1/cluster/moves"""

    sandbox: str
    host: str


class MoveResult(Brief, kw_only=True, omit_defaults=True):
    """coordinator -> CLI: a sandbox has moved."""

    sandbox: str
    host: str
    pause_ms: float  # for which calls on it waited
    copied_bytes: int = 0  # while it ran, and after
    parts_ms: dict[str, float] = {}  # of the pause


class CopyInfo(Brief, kw_only=True, omit_defaults=True):
    """coordinator -> CLI: GET /v1/cluster/copies. A state of a sandbox that outlives its host."""

    sandbox: str
    checkpoint: str
    host: str  # where the copy is: a host, or "(store)"


class HostRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """CLI -> coordinator: PUT /v1/cluster/hosts/{name}"""

    address: str  # a URL, or the path of a socket
    token: str | None = None  # of scope admin
    ca: str | None = None  # certificate or fingerprint of its daemon
    labels: dict[str, str] = {}


class HostChange(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """CLI -> coordinator: PATCH /v1/cluster/hosts/{name}. Labels with null are removed."""

    draining: bool | None = None
    labels: dict[str, str | None] = {}


class HostInfo(Brief, kw_only=True, omit_defaults=True):
    """coordinator -> CLI: a host of the cluster, as listed."""

    name: str
    address: str
    state: Literal["alive", "draining", "silent"]  # silent: its lease is over
    labels: dict[str, str] = {}
    sandboxes: int = 0
    cpus: int = 0
    load: float = 0.0
    memory_bytes: int = 0
    memory_free: int = 0
    disk_free: int = 0
    since_seen_s: float | None = None  # seconds since its last report
    error: str = ""  # why there is no newer one


class PlaceInfo(Brief, kw_only=True, omit_defaults=True):
    """coordinator -> CLI: GET /v1/cluster/places. Where a sandbox is."""

    sandbox: str
    host: str


Amounts = dict[
    Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")], Annotated[float, msgspec.Meta(gt=0, le=1e15)]
]
Needs = Annotated[Amounts, msgspec.Meta(min_length=1, max_length=16)]
Apart = Annotated[Amounts, msgspec.Meta(max_length=16)]


class JobRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """CLI -> coordinator: POST /v1/cluster/jobs. A run directory with its plan, which every machine of Ray can read."""

    run: str  # an absolute path
    needs: Needs  # resources of Ray, all of one machine: CPU, GPU, memory, or names that its machines were given
    trainer_needs: Apart = {}  # of each of the trainer's machines, if it is to have its own
    trainer_hosts: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1  # how many, with those on standby
    engine_needs: Apart = {}  # of each engine, if they are to be
    engines: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0  # how many
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0


class JobInfo(Brief, kw_only=True, omit_defaults=True):
    """coordinator -> CLI: a job, as listed."""

    id: str
    run: str
    owner: str = ""
    state: Literal["queued", "starting", "running", "done", "failed", "cancelled"] = "queued"
    reason: str = ""  # why it waits, or failed
    needs: dict[str, float] = {}
    trainer_needs: dict[str, float] = {}
    trainer_hosts: int = 1
    engine_needs: dict[str, float] = {}
    engines: int = 0
    priority: int = 0
    submitted_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    cost: float | None = None  # so far, at the prices of `pagurus cluster up --price`; None: it has none


Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e7)]
Machines = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Gigabytes = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class JobShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A run -> coordinator: what a job that takes turns on machines needs. Durations are worst cases."""

    rollout: Seconds
    train: Seconds
    rollout_nodes: Machines = 1
    train_nodes: Machines = 1
    rollout_gb: Gigabytes = 0.0  # of host memory on each of its rollout machines, while others have their turn
    train_gb: Gigabytes = 0.0
    slowdown: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 2.0  # a step may take so many times `rollout + train`


JobName = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
PhaseKind = Literal["rollout", "train"]


class PhaseRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A run -> coordinator: POST /v1/phases. May this phase begin? It ends the job's phase before.

    Repeated while it runs, this says that the job lives.
    """

    job: JobName
    kind: PhaseKind
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]  # of the version that is played, or trained on
    shape: JobShape
    wait: Annotated[float, msgspec.Meta(ge=0, le=30)] = 0.0  # seconds to wait for the turn before it is answered


class PhaseAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """coordinator -> a run. `past`: the job has requested a later phase since."""

    state: Literal["begun", "waiting", "past"]
    reason: str = ""  # why it waits


class PhaseLeave(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A run -> coordinator: POST /v1/phases/leave. The job is over."""

    job: JobName


class PhaseInfo(Brief, kw_only=True, omit_defaults=True):
    """coordinator -> CLI: GET /v1/cluster/phases. A job that takes turns."""

    job: str
    kind: PhaseKind
    number: int
    state: Literal["begun", "waiting", "silent", "left"]  # silent: no message for too long, others have its turns
    reason: str = ""
    group: int | None = None
    since: float = 0.0
    rollout_hours: float = 0.0  # machine-hours of its phases, as far as they are known: for 30 days
    train_hours: float = 0.0
    cost: float | None = None  # of these, at the prices of `--share`; None: it has none


class PastPhase(Brief, kw_only=True, omit_defaults=True):
    """coordinator -> CLI: GET /v1/cluster/phases/past. A phase of a job that takes turns; the newest ones."""

    job: str
    kind: PhaseKind
    number: int
    group: int
    machines: list[int]  # of the group, of this kind
    requested: float
    begun: float | None = None  # None: it waits
    ended: float | None = None
    silent: float = 0.0  # seconds before its end without a message of its job, which was then passed over
