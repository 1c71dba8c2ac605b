"""The OpenAPI description of what is served to clients of E2B, made from its routes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from daemon.api.openapi import describe
from daemon.api.route import ApiRoute
from daemon.e2b.route import BELOW

PATH = "/e2b/openapi.json"
ERROR = {
    "type": "object",
    "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
    "required": ["code", "message"],
}
KEYS = {
    "token": {"type": "apiKey", "in": "header", "name": "X-API-KEY"},
    "sandbox": {"type": "apiKey", "in": "header", "name": "X-Access-Token"},
}


def description(control: Iterable[ApiRoute], envd: Iterable[ApiRoute]) -> dict[str, Any]:
    """`control`: for an API key; `envd`: for the token of one sandbox, which headers or the host's name say."""
    inner = [replace(route, path=route.path.removeprefix(BELOW)) for route in envd]
    made = describe([*(route for route in control if route.method != "*"), *inner])
    made["info"]["title"] = "E2B's API, as the Pagurus sandbox daemon serves it"
    made["components"]["schemas"]["ErrorBody"] = ERROR
    made["components"]["securitySchemes"] = KEYS
    own, used = {route.path for route in inner}, dict[str, int]()
    for path, operations in made["paths"].items():
        for operation in operations.values():
            name = operation["operationId"]
            used[name] = used.get(name, 0) + 1
            if used[name] > 1:  # the same call under another path
                operation["operationId"] = f"{name}.{used[name]}"
            if path in own:
                operation["security"] = [{"sandbox": []}]
    return made
