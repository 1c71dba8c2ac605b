"""What a route is: where it lies, what goes in and comes out, who may call it, how much it may bring.

The gate (:mod:`daemon.api.gate`) enforces it, :mod:`daemon.api.wire` calls the handler, :mod:`daemon.api.openapi`
describes it, so that the description is never a twin kept by hand.

::

    @AREA("PUT", "/v1/checkpoints/{checkpoint}/label", scope="exec")
    async def _label(host: Host, checkpoint: str, body: LabelRequest) -> CheckpointInfo:
        ...

A handler names what it needs: `request`, `host`, `gateway`, `tokens`, `live` (the sandbox of the path), `alive` (the
same, refused when it is dead), `body` and `query` (decoded as their structs), or a piece of the path. What it returns
is encoded for the caller; None is an empty object. A handler that makes the answer itself returns aiohttp's response.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec
from aiohttp import web

from daemon.auth.access import Scope

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

MAX_BODY = 4 << 20  # bytes of a body that holds a struct
MAX_NAME = 200  # characters of a name in a path


@dataclass(frozen=True)
class ValueStream:
    """An answer of many values of one type, one after another (see :func:`daemon.api.wire.frame`)."""

    of: type


class WebSocket:
    """An answer that upgrades the connection."""


@dataclass(frozen=True, kw_only=True)
class ApiRoute:
    """One route. The first line of the handler's docstring is its summary.

    `answer`: the type of a 2xx body; ``bytes``, a :class:`ValueStream` or :class:`WebSocket`; None: an empty object.
    `body`: a struct, or ``bytes`` for raw content that the handler reads itself; None: there is none.
    `query`: a struct of the query parameters. `keyed`: honours ``Idempotency-Key``, and says what a call gets that a
    killed daemon had begun, when it is sent again: "once": Interrupted; "again": it is carried out again, which is
    harmless; "anew": the sandboxes that it made are removed first.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    takes: tuple[str, ...]  # the names of the handler's parameters
    answer: type | ValueStream | WebSocket | None = None
    body: type | None = None
    query: type[msgspec.Struct] | None = None
    status: int = 200
    scope: Scope = "read"
    max_body: int = MAX_BODY
    keyed: Literal["once", "again", "redo"] | None = None
    content: str = "application/octet-stream"  # of raw bodies and raw answers

    @property
    def name(self) -> str:
        """Example: ``commands.exec``."""
        module = self.handler.__module__.rpartition(".")[2]
        return f"{module}.{self.handler.__name__.strip('_')}"

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip().partition("\n")[0]


class Area:
    """The routes of one area of the API, in the order of their declaration."""

    def __init__(self) -> None:
        self.routes: list[ApiRoute] = []

    def __call__(self, method: str, path: str, **options: Any) -> Callable[[F], F]:
        def declare(handler: F) -> F:
            hints = get_type_hints(handler)
            names = {"body": "body", "query": "query", "return": "answer"}
            own = (type(None), web.Response, web.StreamResponse)  # answers that say nothing about their content
            existing = {field: hints[name] for name, field in names.items() if name in hints and hints[name] not in own}
            takes = tuple(inspect.signature(handler).parameters)
            self.routes.append(ApiRoute(method=method, path=path, handler=handler, takes=takes, **(existing | options)))
            return handler

        return declare
