"""What a route is: where it lies, what goes in and comes out, who may call it, how much it may bring.

Owns: the form in which every area declares its ROUTES. The gate (:mod:`daemon.api.gate`) enforces it,
:mod:`daemon.api.openapi` describes it, so that the description is never a twin kept by hand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Scope = Literal["open", "read", "exec", "admin"]

BODY_MOST = 4 << 20  # bytes of a body that holds a struct
NAME_MOST = 200  # characters of a name in a path


@dataclass(frozen=True)
class Stream:
    """An answer of many values of one type, one after another (see :func:`daemon.api.wire.frame`)."""

    of: type


class WebSocket:
    """An answer that upgrades the connection."""


@dataclass(frozen=True)
class Route:
    """One route. The first line of the handler's docstring is its summary.

    `answer`: the type of a 2xx body; ``bytes``, a :class:`Stream` or :class:`WebSocket`; None: an empty object.
    `body`: a struct, or ``bytes`` for raw content that the handler reads itself; None: there is none.
    `query`: a struct of the query parameters. `keyed`: honours ``Idempotency-Key``, and says what a call gets that a
    killed daemon had begun, when it is sent again: "once": Interrupted; "again": it is carried out again, which is
    harmless; "anew": the sandboxes that it made are removed first.
    """

    method: str
    path: str
    handler: Handler
    answer: type | Stream | WebSocket | None = None
    body: type | None = None
    query: type[msgspec.Struct] | None = None
    status: int = 200
    scope: Scope = "read"
    body_most: int = BODY_MOST
    keyed: Literal["once", "again", "anew"] | None = None
    content: str = "application/octet-stream"  # of raw bodies and raw answers

    @property
    def name(self) -> str:
        """Example: ``commands.exec``."""
        module = self.handler.__module__.rpartition(".")[2]
        return f"{module}.{self.handler.__name__.strip('_')}"

    @property
    def summary(self) -> str:
        text = (self.handler.__doc__ or "").strip().partition("\n")[0]
        return text or self.handler.__name__.strip("_").replace("_", " ").capitalize() + "."

    @classmethod
    def of(cls, route: Route | web.RouteDef) -> Route:
        """A route that was declared without saying who may call it is for administrators."""
        if isinstance(route, Route):
            return route
        return cls(route.method, route.path, route.handler, scope="admin", body=bytes, body_most=256 << 20)
