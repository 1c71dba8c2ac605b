"""What a coordinator answers, as OpenAPI: a host's own description, and the routes of the cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import msgspec
from aiohttp import web

from daemon.api.openapi import describe
from daemon.api.route import ApiRoute
from daemon.auth.access import Scope
from sandbox.messages.cluster import (
    CopyInfo,
    HostChange,
    HostInfo,
    HostRequest,
    JobInfo,
    JobRequest,
    MoveRequest,
    MoveResult,
    PastPhase,
    PhaseAnswer,
    PhaseInfo,
    PhaseLeave,
    PhaseRequest,
    PlaceInfo,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TITLE = "Pagurus cluster"
#: By method and path: what comes in, and what goes out.
TYPES: dict[tuple[str, str], tuple[type | None, type | None]] = {
    ("GET", "/v1/cluster/hosts"): (None, list[HostInfo]),
    ("GET", "/v1/cluster/hosts/{name}/doctor"): (None, list[dict[str, str]]),
    ("PUT", "/v1/cluster/hosts/{name}"): (HostRequest, HostInfo),
    ("PATCH", "/v1/cluster/hosts/{name}"): (HostChange, HostInfo),
    ("DELETE", "/v1/cluster/hosts/{name}"): (None, None),
    ("GET", "/v1/cluster/places"): (None, list[PlaceInfo]),
    ("GET", "/v1/cluster/copies"): (None, list[CopyInfo]),
    ("GET", "/v1/cluster/phases"): (None, list[PhaseInfo]),
    ("GET", "/v1/cluster/phases/past"): (None, list[PastPhase]),
    ("POST", "/v1/cluster/moves"): (MoveRequest, MoveResult),
    ("GET", "/v1/cluster/jobs"): (None, list[JobInfo]),
    ("GET", "/v1/cluster/jobs/{job}"): (None, JobInfo),
    ("GET", "/v1/cluster/jobs/{job}/log"): (None, bytes),
    ("POST", "/v1/cluster/jobs"): (JobRequest, JobInfo),
    ("DELETE", "/v1/cluster/jobs/{job}"): (None, JobInfo),
    ("POST", "/v1/phases"): (PhaseRequest, PhaseAnswer),
    ("POST", "/v1/phases/leave"): (PhaseLeave, None),
}
CREATED = {("PUT", "/v1/cluster/hosts/{name}"), ("POST", "/v1/cluster/jobs")}  # answered with 201


class _Components(msgspec.Struct):
    schemas: dict[str, msgspec.Raw]
    securitySchemes: dict[str, msgspec.Raw]


class _Description(msgspec.Struct):
    openapi: str
    info: dict[str, msgspec.Raw]
    servers: msgspec.Raw
    security: msgspec.Raw
    paths: dict[str, dict[str, msgspec.Raw]]
    components: _Components


def described(
    host: bytes | None, table: Iterable[tuple[str, str, Handler]], scope: Callable[[str, str], Scope]
) -> object:
    """The description of a host (JSON; None: no host lives) with those routes of `table` that are the cluster's."""
    own = [
        ApiRoute(
            method=method,
            path=path,
            handler=handler,
            takes=(),
            body=TYPES[method, path][0],
            answer=TYPES[method, path][1],
            status=201 if (method, path) in CREATED else 200,
            scope=scope(method, path),
        )
        for method, path, handler in table
        if (method, path) in TYPES
    ]
    made = describe(own)
    for operations in made["paths"].values():
        for operation in operations.values():
            operation["operationId"] = f"cluster.{operation['operationId'].rpartition('.')[2]}"
            operation["tags"] = ["cluster"]
    result = msgspec.json.decode(msgspec.json.encode(made), type=_Description)
    if host is not None:
        existing = msgspec.json.decode(host, type=_Description)
        result.paths = {**existing.paths, **result.paths}
        result.components.schemas = {**existing.components.schemas, **result.components.schemas}
    result.info["title"] = msgspec.Raw(msgspec.json.encode(TITLE))
    return msgspec.json.decode(msgspec.json.encode(result))
