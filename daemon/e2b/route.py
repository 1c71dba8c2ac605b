"""How routes of E2B are declared: those of its control plane with a path for each version of the clients, those of its
data plane below a sandbox, which headers or the host's name say.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from daemon.api.route import MAX_BODY, ApiRoute
from daemon.auth.access import Scope

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
ALIASES: web.AppKey[dict[str, str]] = web.AppKey("e2b names of images", dict)
BELOW = "/sandboxes/{id}"  # of the path of each such route: by this the gate knows that there is a sandbox


def declared(method: str, path: str, handler: Callable[..., Awaitable[Any]], **options: Any) -> ApiRoute:
    """The route that calls `handler` with what its parameters name."""
    takes = tuple(inspect.signature(handler).parameters)
    return ApiRoute(method=method, path=path, handler=handler, takes=takes, **options)


class RouteTable:
    """Routes of the control plane: ``@AT("GET", "/sandboxes", "/v2/sandboxes")``."""

    def __init__(self) -> None:
        self.routes: list[ApiRoute] = []

    def __call__(self, method: str, *paths: str, scope: Scope = "read", **options: Any) -> Callable[[F], F]:
        def declare(handler: F) -> F:
            body = inspect.get_annotations(handler, eval_str=True).get("body")
            for path in paths:
                self.routes.append(declared(method, path, handler, scope=scope, **{"body": body, **options}))
            return handler

        return declare


def json_answer(value: object, status: int = 200, **headers: str) -> web.Response:
    raw = msgspec.json.encode(value)
    return web.Response(body=raw, status=status, content_type="application/json", headers=headers)


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
