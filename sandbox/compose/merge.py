"""How the values of several compose files become one, by Compose's rules. Pure.

Mappings are merged, lists are joined, the later of two scalars counts; commands are replaced; `volumes`, `ports`,
`secrets` and `configs` are joined by what they name in the container; ``!reset`` drops a value, ``!override`` puts
another in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sandbox.compose.values import Value

_MAPS = {  # which may be lists of texts, and what separates name and value there
    "environment": "=",
    "labels": "=",
    "annotations": "=",
    "sysctls": "=",
    "extra_hosts": "=:",
}
_LISTS = ("env_file", "tmpfs", "dns", "dns_search", "dns_opt", "label_file", "profiles")  # which may be one text
_REPLACED = (("command",), ("entrypoint",), ("healthcheck", "test"))
SECTIONS = ("services", "networks", "volumes", "configs", "secrets")


def normalised(service: Value) -> Value:
    """A service whose fields have the longer of the forms that Compose allows."""
    made: dict[str, Value] = {}
    for name, value in service.map().items():
        if value.tag == "!reset" or value.is_null:
            made[name] = value
        elif name in _MAPS:
            made[name] = value.with_map(value.entries(_MAPS[name]))
        elif name in _LISTS:
            made[name] = value.with_list(value.several())
        elif name == "build":
            made[name] = _build(value)
        elif name in ("depends_on", "networks") and isinstance(value.data, list):
            nothing = replace(value, data="", kind="null")
            made[name] = value.with_map(
                {item.name(): replace(nothing, place=item.place, key=item.key) for item in value.data}
            )
        else:
            made[name] = value
    return service.with_map(made)


def _build(value: Value) -> Value:
    if isinstance(value.data, str):
        return value.with_map({"context": value})
    entries = dict(value.map())
    for name in ("args", "labels", "additional_contexts"):
        if name in entries and not entries[name].is_null:
            entries[name] = entries[name].with_map(entries[name].entries("="))
    return value.with_map(entries)


def merged_service(below: Value, above: Value) -> Value:
    """Two normalised services."""
    return _merged(below, above, ())


def merged(below: Value, above: Value) -> Value:
    """Two files whose services are normalised."""
    made = dict(below.map())
    for name, value in above.map().items():
        if name in SECTIONS and name in made and not value.is_null and not made[name].is_null:
            parts = dict(made[name].map())
            for item, said in value.map().items():
                if item not in parts or said.tag:
                    parts[item] = said
                elif not said.is_null:
                    parts[item] = said if parts[item].is_null else _merged(parts[item], said, ())
            made[name] = made[name].with_map({item: said for item, said in parts.items() if said.tag != "!reset"})
        elif not value.is_null or name not in made:
            made[name] = value
    return below.with_map(made)


def _merged(below: Value, above: Value, path: tuple[str, ...]) -> Value:
    if above.tag or above.is_null or below.is_null:
        return below if above.is_null and not above.tag else above
    if isinstance(below.data, dict) and isinstance(above.data, dict):
        if path == ("logging",) and _driver(below) != _driver(above):
            return above
        made = dict(below.data)
        for name, value in above.data.items():
            made[name] = _merged(made[name], value, (*path, name)) if name in made else value
        return above.with_map({name: value for name, value in made.items() if value.tag != "!reset"})
    if isinstance(below.data, list) and isinstance(above.data, list):
        if path in _REPLACED:
            return above
        return above.with_list(_joined([*below.data, *above.data], _IDENTITIES.get(path[-1] if path else "", _same)))
    return above


def _driver(logging: Value) -> str:
    driver = logging.map().get("driver")
    return driver.text() if driver is not None else ""


def _joined(items: list[Value], identity: Callable[[Value], object]) -> list[Value]:
    """Each once, in the order of their first places; the latest of equal ones counts."""
    return list({identity(item): item for item in items}.values())


def _same(value: Value) -> object:
    """What is equal for two values wherever they stand."""
    if isinstance(value.data, list):
        return tuple(_same(item) for item in value.data)
    if isinstance(value.data, dict):
        return tuple((name, _same(item)) for name, item in value.data.items())
    return (value.kind == "null", value.data)


def _target(value: Value) -> object:
    """The place in the container of a volume."""
    if isinstance(value.data, str):
        parts = value.data.split(":")
        return (parts[0] if len(parts) == 1 else parts[1]).rstrip("/") or "/"
    target = value.map().get("target")
    return target.text().rstrip("/") if target is not None else _same(value)


def _handed(value: Value) -> object:
    """The place in the container of a config or secret."""
    if isinstance(value.data, str):
        return value.data
    named = value.map().get("target") or value.map().get("source")
    return named.text() if named is not None else _same(value)


_IDENTITIES: dict[str, Callable[[Value], object]] = {
    "volumes": _target,
    "secrets": _handed,
    "configs": _handed,
    "env_file": lambda value: id(value),  # a file that is named twice is read twice
}
