"""The OpenAPI description of the API, made from its routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from daemon.api.route import MAX_NAME, ApiRoute, ValueStream, WebSocket
from sandbox.errors import ErrorBody

VERSION = "3.1.0"
_REF = "#/components/schemas/{name}"
_RAW = {"type": "string", "format": "binary"}
_JSON, _PACKED, _LINES = "application/json", "application/msgpack", "application/x-ndjson"
_IN_PATH = re.compile(r"\{(\w+)(?::[^}]*)?\}")


def describe(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """The description of these routes, as OpenAPI 3.1."""
    types = [ErrorBody, *(kind for route in routes for kind in _types(route))]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    existing = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _IN_PATH.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, existing, components)
    made = {
        "openapi": VERSION,
        "info": {
            "title": "Pagurus sandbox daemon",
            "version": "1",
            "description": "Bodies are JSON (bytes as base64) or, where the caller says so, MessagePack.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    description: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))  # defaults hold tuples and structs
    return description


def _types(route: ApiRoute) -> list[Any]:
    answer = route.answer.of if isinstance(route.answer, ValueStream) else route.answer
    result = [answer, route.body, route.query]
    return [kind for kind in result if kind not in (None, bytes, WebSocket)]


def _operation(route: ApiRoute, existing: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "tags": [route.name.partition(".")[0]],
        "summary": route.summary,
        "parameters": [*_in_path(route), *_in_query(route, components), *_in_header(route)],
        "responses": {
            "101" if route.answer is WebSocket else str(route.status): _answer(route, existing),
            "default": {
                "description": "What is wrong, and what to do.",
                "content": {_JSON: {"schema": existing[repr(ErrorBody)]}},
            },
        },
        "x-scope": route.scope,
    }
    if route.scope == "open":
        operation["security"] = []
    if route.body is bytes:
        operation["requestBody"] = {"required": False, "content": {route.content: {"schema": _RAW}}}
    elif route.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": existing[repr(route.body)]}}}
    return operation


def _answer(route: ApiRoute, existing: dict[str, Any]) -> dict[str, Any]:
    kind = route.answer
    if kind is WebSocket:
        return {"description": "The connection is a WebSocket from now on."}
    if kind is bytes:
        return {"description": "The content.", "content": {route.content: {"schema": _RAW}}}
    if isinstance(kind, ValueStream):
        text = "One value on each line (MessagePack: behind its length in four bytes, big end first)."
        return {"description": text, "content": {_LINES: {"schema": _RAW, "x-item": existing[repr(kind.of)]}}}
    schema = {"type": "object"} if kind is None else existing[repr(kind)]
    return {"description": "Done.", "content": {_JSON: {"schema": schema}}}


def _in_path(route: ApiRoute) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in _IN_PATH.findall(route.path)]


def _in_query(route: ApiRoute, components: dict[str, Any]) -> list[dict[str, Any]]:
    """A struct of parameters becomes one parameter for each field."""
    if route.query is None:
        return []
    struct = components[route.query.__name__]
    required = struct.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _plain(schema)}
        for name, schema in struct.get("properties", {}).items()
    ]


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter is absent rather than null."""
    options = [item for item in schema.get("anyOf", ()) if item != {"type": "null"}]
    if len(options) == 1:
        return {**options[0], **{key: value for key, value in schema.items() if key not in ("anyOf", "default")}}
    return {key: value for key, value in schema.items() if not (key == "default" and value is None)}


def _in_header(route: ApiRoute) -> list[dict[str, Any]]:
    if route.keyed is None:
        return []
    text = "The same key with the same body gets the same answer, also from a daemon that was started again."
    schema = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"}
    return [{"name": "Idempotency-Key", "in": "header", "required": False, "description": text, "schema": schema}]
