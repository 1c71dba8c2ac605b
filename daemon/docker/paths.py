"""Which request of Docker's Engine API is which call."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web
from multidict import MultiMapping

from daemon.docker import streams
from sandbox.errors import Invalid, NotFound, PagurusError

if TYPE_CHECKING:
    from daemon.docker.engine import Engine

MAX_BODY = 1 << 20
_VERSION = re.compile(r"/v1\.\d{1,2}(?=/)")
T = TypeVar("T")


class Call:
    """One request. `id`: the one that its path names."""

    def __init__(self, request: web.BaseRequest, id: str) -> None:
        self.request = request
        self.id = id

    @property
    def query(self) -> MultiMapping[str]:
        return self.request.query

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("1", "true")

    def seconds(self, name: str) -> float | None:
        """A number of seconds; None: not said, or without end. Raises Invalid."""
        said = self.query.get(name, "")
        if not said:
            return None
        try:
            return max(0.0, float(said)) if float(said) >= 0 else 1e6
        except ValueError:
            raise Invalid(f"{said[:40]!r} is no number of seconds", hint="such as 10") from None

    @property
    def filters(self) -> dict[str, list[str]]:
        """``{"label": ["a=1"]}`` or ``{"label": {"a=1": true}}``, as older and newer clients say it."""
        try:
            said = json.loads(self.query.get("filters", "") or "{}")
        except (ValueError, RecursionError):
            raise Invalid("`filters` is no JSON", hint="an object of lists") from None
        if not isinstance(said, dict):
            raise Invalid("`filters` is no object", hint="an object of lists")
        return {
            str(key): [str(value) for value in values]
            for key, values in said.items()
            if isinstance(values, list | dict)
        }

    async def body(self, kind: type[T]) -> T:
        """Raises Invalid."""
        raw = await streams.body(self.request, MAX_BODY)
        try:
            return msgspec.json.decode(raw or b"{}", type=kind)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise Invalid(f"the body is not as the API says: {error}", hint="see Docker's Engine API") from None


Handler = Callable[["Engine", Call], Awaitable[web.StreamResponse]]


class DockerRoutes:
    """All that the API is here."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, re.Pattern[str], Handler]] = []

    def __call__(self, method: str, path: str) -> Callable[[Handler], Handler]:
        """Register a handler; ``{id}`` is one part of the path, ``{name}`` may hold slashes."""
        pattern = re.escape(path).replace(r"\{id\}", "(?P<id>[^/]+)").replace(r"\{name\}", "(?P<id>.+)")

        def register(handler: Handler) -> Handler:
            self._routes.append((method, re.compile(pattern), handler))
            return handler

        return register

    def find(self, method: str, path: str) -> tuple[Handler, str]:
        """The handler of a path, with or without a version in front. Raises NotFound."""
        path = _VERSION.sub("", path, count=1)
        for registered, pattern, handler in self._routes:
            if registered == method and (match := pattern.fullmatch(path)) is not None:
                return handler, unquote(match.groupdict().get("id") or "")
        raise NotFound(f"{method} {path[:200]} is no call of the Engine API in a sandbox", hint="see docs/compose.md")


def json_answer(content: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=json.dumps(content).encode(), content_type="application/json")


def refusal(error: PagurusError) -> web.Response:
    """An error as Docker's clients show it: the message, then what to do."""
    hint = f" ({error.hint})" if error.hint else ""
    return json_answer({"message": f"{error.message}{hint}"}, status=error.status)


ROUTES = DockerRoutes()
