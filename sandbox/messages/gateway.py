"""SDK <-> daemon: the LLM gateway of a host: settings of a sandbox, upstreams, exchanges, tokens."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from sandbox.messages.brief import Brief

UPSTREAM_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
UpstreamName = Annotated[str, msgspec.Meta(pattern=UPSTREAM_NAME.pattern)]
Glob = Annotated[str, msgspec.Meta(max_length=200)]


class SideRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Requests outside the main loop of an agent: they make no turn and their answers are not held.

    All fields that are given must fit. Example: ``SideRule(model="*-mini", max_tokens=512)``.
    """

    model: Glob | None = None  # shell pattern of the model that the agent names
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] | None = None  # asks for at most so many
    contains: Annotated[str, msgspec.Meta(max_length=1000)] | None = None  # in the system text or the last message


class Gateway(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the agent of a sandbox reaches its model. Example: ``Gateway(upstream="pool", hold="durable")``.

    `agent` inside: its process is part of the sandbox and of its checkpoints. outside: it lives elsewhere, speaks to
    the gateway with a token and runs its commands by ``sandbox.gateway.exec``.
    """

    upstream: UpstreamName  # as the daemon's configuration names it
    hold: Literal["captured", "durable"] = "captured"  # an answer waits until the state before it is
    model: Annotated[str, msgspec.Meta(max_length=200)] | None = None  # replaces the model that the agent names
    agent: Literal["inside", "outside"] = "inside"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 7000  # of 127.0.0.1 in the sandbox
    side: Annotated[tuple[SideRule, ...], msgspec.Meta(max_length=32)] = ()
    recognize_side: bool = True  # titles and the like, as well-known agents ask for them, make no turn either


class Upstream(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """operator -> daemon: PUT /v1/gateway/upstreams/{name}. Where requests go. The key stays with the host."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/]+(/[^\s]*)?$", max_length=2000)]  # without /v1
    key_file: Annotated[str, msgspec.Meta(pattern=r"^/[^\0]*$", max_length=4096)] | None = None
    headers: dict[str, str] = {}  # put into every request
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 600.0  # seconds of one whole answer
    idle: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 300.0  # seconds without a byte of it
    at_once: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256  # requests that it gets at the same time


class UpstreamInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> operator: an upstream, without its key."""

    name: str
    url: str = ""  # "" for who is no administrator, and then only the name is shown
    has_key: bool = False
    headers: list[str] = []  # their names
    in_flight: int = 0


class TokenInfo(msgspec.Struct, kw_only=True):
    """daemon -> SDK: POST /v1/sandboxes/{id}/gateway/token. The token is shown once and kept as a hash."""

    sandbox: str
    token: str
    base_url: str | None = None  # of the listener for agents outside, where the daemon has one


class ReplayRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/gateway/replay: answer from the record up to a checkpoint."""

    checkpoint: Annotated[str, msgspec.Meta(max_length=100)]


class ReplayInfo(msgspec.Struct, kw_only=True):
    """daemon -> SDK"""

    exchanges: int  # that will be answered from the record


class ExchangeInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: one request to a model and its answer."""

    id: int
    sandbox: str
    path: str
    main: bool  # of the agent's main loop: it ended a turn
    state: Literal["requested", "answered", "failed"]
    started_at: float
    parent: int | None = None  # the main-loop exchange before it
    checkpoint: str | None = None  # holds the state in which the request was made
    turn: int = 0
    key: str = ""  # hash of the request
    status: int | None = None
    ended_at: float | None = None
    requested: int = 0  # times that the upstream was called
    answered: int = 0  # times that the agent was given the whole answer
    from_record: int = 0  # of these, from the record
    request_bytes: int = 0
    response_bytes: int = 0


class Exchange(ExchangeInfo, kw_only=True, omit_defaults=True):
    """daemon -> SDK: with its content."""

    request: bytes = b""  # canonical JSON
    response: bytes = b""  # as the upstream sent it
    headers: dict[str, str] = {}


class GatewayStatistics(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: GET /v1/gateway. Counts since the daemon started."""

    requests: int = 0
    main: int = 0
    refused: int = 0
    upstream_calls: int = 0
    upstream_failures: int = 0
    from_record: int = 0
    held_ms: float = 0.0  # time for which answers were ready and waited for a capture
    journal_bytes: int = 0
