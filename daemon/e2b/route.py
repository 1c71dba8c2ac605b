"""How routes of E2B's data plane are declared: each lies below a sandbox, which headers or the host's name say.

Owns: the form. Does not own: finding the sandbox (:mod:`daemon.e2b.limiter`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from daemon.api.route import MAX_BODY, ApiRoute
from daemon.auth.access import Scope

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
BELOW = "/sandboxes/{id}"  # of the path of each such route: by this the gate knows that there is a sandbox


def declared(method: str, path: str, handler: Callable[..., Awaitable[Any]], **options: Any) -> ApiRoute:
    """The route that calls `handler` with what its parameters name."""
    takes = tuple(inspect.signature(handler).parameters)
    return ApiRoute(method=method, path=path, handler=handler, takes=takes, **options)


class Service:
    """The calls of one service of Connect."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.routes: list[ApiRoute] = []

    def call(self, name: str, *, scope: Scope = "exec") -> Callable[[F], F]:
        def declare(handler: F) -> F:
            path = f"{BELOW}/{self._name}/{name}"
            self.routes.append(declared("POST", path, handler, scope=scope, max_body=MAX_BODY))
            return handler

        return declare

    stream = call
