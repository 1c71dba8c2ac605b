"""Bodies of E2B's control plane, and what they mean here."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from typing import Annotated

import msgspec

from daemon.auth.visibility import visible
from daemon.catalogue import CheckpointRow, SandboxRow
from daemon.e2b.steps import Value
from sandbox.container.cgroup import parse_bytes
from sandbox.errors import Invalid, Unsupported
from sandbox.messages import AtEnd, Metrics, Network, SandboxState
from sandbox.messages.checkpoints import Label

ENVD_VERSION = "0.5.7"  # what clients may ask of us: see docs/integrations.md
OWN = "e2b."  # labels that begin so are no metadata of the client's
TEMPLATE, PUBLIC = "e2b.template", "e2b.public"
EVERYTHING = "0.0.0.0/0"
SAMPLE = 0.1  # seconds over which the use of processors is measured
_ADDRESS = re.compile(r"[0-9.]+(/[0-9]+)?(:.*)?")
Seconds = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Never = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class NetworkBody(msgspec.Struct, kw_only=True):
    allowOut: list[str] | None = None
    denyOut: list[str] | None = None
    allowPublicTraffic: bool | None = None
    allow_internet_access: bool | None = None
    dnsServers: Value = None
    egressProxy: Value = None
    maskRequestHost: Value = None
    httpsPorts: Value = None
    rules: Value = None


class AutoResume(msgspec.Struct, kw_only=True):
    enabled: bool = False


class CreateBody(msgspec.Struct, kw_only=True):
    templateID: Annotated[str, msgspec.Meta(min_length=1, max_length=400)] = "base"
    timeout: Seconds | None = None
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] = {}
    allow_internet_access: bool | None = None
    autoPause: bool | None = None
    autoResume: AutoResume | None = None
    network: NetworkBody | None = None
    mcp: Value = None
    iam: Value = None
    volumeMounts: list[Value] | None = None

    @property
    def pauses(self) -> bool:
        return bool(self.autoPause)


class TimeoutBody(msgspec.Struct, kw_only=True):
    timeout: Seconds


class RefreshBody(msgspec.Struct, kw_only=True):
    duration: Seconds = 0


class ConnectBody(msgspec.Struct, kw_only=True):
    timeout: Seconds | None = None
    memory: bool | None = None


class PauseBody(msgspec.Struct, kw_only=True):
    memory: bool | None = None


class ForkBody(msgspec.Struct, kw_only=True):
    count: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    timeout: Seconds | None = None


class SnapshotBody(msgspec.Struct, kw_only=True):
    name: Label | None = None
    memory: bool | None = None


# --------------------------------------------------------------------------- in


def refuse(body: CreateBody) -> None:
    """Raise Unsupported for what is requested and not there, by its name."""
    requested = {
        "mcp": body.mcp,
        "iam": body.iam,
        "volumeMounts": body.volumeMounts,
        "autoResume": body.autoResume is not None and body.autoResume.enabled,
    }
    if missing := [name for name, value in requested.items() if value]:
        raise Unsupported(f"{', '.join(missing)}: not served here", hint="create the sandbox without")


def labels(body: CreateBody) -> dict[str, str]:
    made = dict(body.metadata or {})
    if own := [name for name in made if name.startswith(OWN)]:
        raise Invalid(f"metadata must not begin with {OWN}: {own[0][:60]}", hint="choose another name")
    made[TEMPLATE] = body.templateID
    return with_public(made, body.network is not None and body.network.allowPublicTraffic is True)


def with_public(labels: dict[str, str], public: bool) -> dict[str, str]:
    """The labels of a sandbox whose ports are open to everyone who knows its id, or not."""
    rest = {name: value for name, value in labels.items() if name != PUBLIC}
    return {**rest, PUBLIC: "yes"} if public else rest


def network(body: NetworkBody | None, internet: bool | None) -> Network:
    """What the sandbox may reach. Raises Unsupported for what a policy of ours cannot say."""
    if body is None:
        return Network.none() if internet is False else Network.open()
    fields = ("dnsServers", "egressProxy", "maskRequestHost", "httpsPorts", "rules")
    if missing := [f"network.{name}" for name in fields if getattr(body, name)]:
        raise Unsupported(f"{', '.join(missing)}: not served here", hint="use allowOut and denyOut")
    allowed, denied = body.allowOut or [], body.denyOut or []
    if denied and EVERYTHING not in denied:
        raise Unsupported(
            "network.denyOut of single destinations: not served here",
            hint=f"deny {EVERYTHING} and allow what is needed by allowOut",
        )
    cidrs = [item for item in allowed if _ADDRESS.fullmatch(item)]
    names = [item for item in allowed if not _ADDRESS.fullmatch(item)]
    if denied or internet is False:
        return Network.allow(names=names, cidrs=cidrs) if allowed else Network.none()
    return Network.open(cidrs=[item for item in cidrs if item != EVERYTHING])


# --------------------------------------------------------------------------- out


def spelled(sandbox: str) -> str:
    """The id of a sandbox as E2B's clients take it: no dash is in it, since it is part of a host's name.

    >>> spelled("s-4f1c00aa12")
    's4f1c00aa12'
    """
    return sandbox.replace("-", "", 1)


def metadata(row: SandboxRow) -> dict[str, str]:
    return {name: value for name, value in row.labels.items() if not name.startswith(OWN)}


def state(row: SandboxRow) -> str:
    return "paused" if row.state is SandboxState.DEAD else "running"


def sandbox(row: SandboxRow, *, token: str, traffic: str, domain: str) -> dict[str, object]:
    """What a client needs to use a sandbox."""
    return {
        "templateID": row.labels.get(TEMPLATE, row.image),
        "sandboxID": spelled(row.id),
        "clientID": "pagurus",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": token,
        "trafficAccessToken": traffic,
        "domain": domain,
    }


def listed(row: SandboxRow) -> dict[str, object]:
    limits = row.limits
    end = Never if row.lifetime is None else _moment(row.created_at + row.lifetime)
    return {
        "templateID": row.labels.get(TEMPLATE, row.image),
        "sandboxID": spelled(row.id),
        "clientID": "pagurus",
        "envdVersion": ENVD_VERSION,
        "startedAt": written(_moment(row.created_at)),
        "endAt": written(end),
        "cpuCount": max(1, round(limits.cpus or 1)),
        "memoryMB": 0 if limits.memory is None else parse_bytes(limits.memory) >> 20,
        "diskSizeMB": 0 if limits.disk is None else parse_bytes(limits.disk) >> 20,
        "state": state(row),
        "metadata": metadata(row),
        "lifecycle": {"autoResume": False, "onTimeout": "pause" if row.at_end is AtEnd.STOP else "kill"},
    }


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(min(seconds, 2e11), datetime.UTC)


def written(moment: datetime.datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def snapshots(rows: Iterable[CheckpointRow]) -> list[CheckpointRow]:
    """Those that outlive their sandboxes and are no steps of builds, which the call sees."""
    return [row for row in rows if row.template is not None and row.step is None and visible(row.owner)]


def snapshot(row: CheckpointRow) -> dict[str, object]:
    return {"snapshotID": row.id, "names": [row.label] if row.label else []}


def metrics(row: SandboxRow, used: Metrics, processors: float) -> dict[str, object]:
    now = datetime.datetime.now(datetime.UTC)
    return {
        "timestamp": written(now),
        "timestampUnix": int(now.timestamp()),
        "cpuCount": max(1, round(row.limits.cpus or 1)),
        "cpuUsedPct": round(100 * processors, 2),
        "memUsed": used.memory_bytes or 0,
        "memTotal": used.memory_limit_bytes or 0,
        "memCache": 0,
        "diskUsed": used.disk_bytes or 0,
        "diskTotal": used.disk_limit_bytes or 0,
    }
