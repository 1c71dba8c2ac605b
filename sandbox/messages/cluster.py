"""Coordinator <-> daemons, and the command line <-> coordinator: hosts that work as one."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sandbox.messages.brief import Brief
from sandbox.messages.sandboxes import Limits

HostName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class HostedSandbox(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sandbox, as its daemon tells the coordinator of it."""

    id: str
    owner: str = ""
    name: str | None = None
    image: str = ""
    limits: Limits = Limits()
    state: str = ""
    head: str = ""  # checkpoint that its current state descends from


class HostReport(Brief, kw_only=True, omit_defaults=True):
    """daemon -> coordinator: GET /v1/host. What a host has, holds and does."""

    clock: float  # seconds of a clock that runs evenly since `boot`, while the host sleeps too
    boot: str  # another one after each start of the host
    cpus: int
    memory_bytes: int
    memory_free: int
    disk_bytes: int
    disk_free: int
    load: float  # tasks that run or want to, over the last minute
    images: dict[str, str] = {}  # digests by name
    sandboxes: list[HostedSandbox] = []


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
    heard_s: float | None = None  # seconds since its last report
    error: str = ""  # why there is no newer one


class PlaceInfo(Brief, kw_only=True, omit_defaults=True):
    """coordinator -> CLI: GET /v1/cluster/places. Where a sandbox is."""

    sandbox: str
    host: str
