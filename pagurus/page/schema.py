"""The types of the API for the page: ``python -m pagurus.page.schema FILE`` writes them as TypeScript.

A field that a struct leaves out when it has its default is optional here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from daemon.api import routes
from daemon.api.openapi import describe
from pagurus.page.messages import RunGrid, RunMember, RunPieces, RunStates, RunTimes
from rollout.messages import Trajectory
from rollout.store.status import Status
from sandbox.messages.cluster import CopyInfo, HostInfo, JobInfo, MoveResult, PastPhase, PhaseInfo, PlaceInfo

HEAD = "// Written by pagurus/page/schema.py from the API's own description.\n\n"
# What `pagurus view RUN` answers, and a coordinator, which no daemon does.
_OTHERS = (
    *(Trajectory, RunGrid, RunMember, RunStates, RunPieces, RunTimes, Status),
    *(HostInfo, PlaceInfo, CopyInfo, MoveResult, JobInfo, PhaseInfo, PastPhase),
)
_PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def typescript() -> str:
    """All structs of the API as interfaces."""
    schemas: dict[str, Any] = describe(routes())["components"]["schemas"]
    schemas |= msgspec.json.schema_components(_OTHERS, ref_template="#/{name}")[1]
    return HEAD + "\n".join(_declared(name, schema) for name, schema in sorted(schemas.items()))


def _declared(name: str, schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return f"export type {name} = {_type(schema)};\n"
    required = set(schema.get("required", ()))
    lines = [
        f"  {field}{'' if field in required else '?'}: {_type(item)};" for field, item in schema["properties"].items()
    ]
    return "\n".join([f"export interface {name} {{", *lines, "}\n"])


def _type(schema: dict[str, Any]) -> str:
    """The type of a field.

    >>> _type({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]})
    'number[] | null'
    """
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(item) for item in schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(f'"{item}"' for item in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:  # a struct that is written as an array
            return f"[{', '.join(map(_type, schema['prefixItems']))}]"
        inner = _type(schema["items"]) if schema.get("items") else "unknown"
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {_type(values) if isinstance(values, dict) and values else 'unknown'}>"
    return _PLAIN.get(str(kind), "unknown")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(typescript())
