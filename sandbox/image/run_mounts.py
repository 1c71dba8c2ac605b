"""``RUN --mount``: what a command finds and leaves out of the image. Pure."""

from __future__ import annotations

import csv
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from sandbox.errors import Invalid
from sandbox.image.dockerfile import Instruction

Kind = Literal["bind", "cache", "tmpfs", "secret", "ssh"]
_TARGETS, _SOURCES = ("target", "dst", "destination"), ("source", "src")
_KEYS = {
    "bind": {"from", "readwrite", "rw", "readonly", "ro"},
    "cache": {"id", "from", "sharing", "mode", "uid", "gid", "readonly", "ro", "readwrite", "rw"},
    "tmpfs": {"size", "readwrite", "rw"},
    "secret": {"id", "required", "mode", "uid", "gid", "env"},
    "ssh": {"id", "required", "mode", "uid", "gid"},
}


@dataclass(frozen=True)
class BuildMount:
    """One of them. A cache is a directory kept from build to build; `origin` and `source` are of what lies there."""

    kind: Kind
    target: str = ""  # "": none, the secret is a variable only; of "ssh": a socket
    id: str = ""
    origin: str = ""  # a stage or an image; "": the context
    source: str = ""
    variable: str = ""  # of the environment, for a secret
    required: bool = False
    mode: int = 0o400
    owner: str = "0:0"


def mounts_of(instruction: Instruction, expand: Callable[[str], str], workdir: str) -> tuple[BuildMount, ...]:
    """The mounts of a RUN. Raises Invalid with its line."""
    given = instruction.lists.get("mount", ())
    result: list[BuildMount] = []
    for item in given:
        mount = _mount(item, expand, workdir, f"line {instruction.line}: RUN --mount")
        agents = sum(other.kind == "ssh" for other in result)
        unnamed = mount.kind == "ssh" and not mount.target
        result.append(replace(mount, target=f"/run/buildkit/ssh_agent.{agents}") if unnamed else mount)
    return tuple(result)


def _mount(given: str, expand: Callable[[str], str], workdir: str, here: str) -> BuildMount:
    options = _options(given, expand, here)
    kind = options.pop("type", "bind")
    if kind not in _KEYS:
        raise Invalid(f"{here}=type={kind} is not supported", hint="bind, cache, secret, ssh and tmpfs are")
    target = next((options.pop(name) for name in _TARGETS if name in options), "")
    source = next((options.pop(name) for name in _SOURCES if name in options), "")
    if unknown := set(options) - _KEYS[kind]:
        raise Invalid(
            f"{here}=type={kind}: {min(unknown)} is not supported",
            hint="correct it; the page about images says what is supported",
        )
    if kind not in ("secret", "ssh") and not target:
        raise Invalid(f"{here}=type={kind} needs a target", hint="add target=/PATH")
    where = posixpath.normpath(posixpath.join("/", workdir, target)) if target else ""
    if where == "/":
        raise Invalid(f"{here}: the target / is not a place for a mount", hint="name a directory below /")
    owner = f"{_number(options, 'uid', here)}:{_number(options, 'gid', here)}"
    if kind == "bind":
        return BuildMount("bind", where, origin=options.get("from", ""), source=source or "/")
    if kind == "tmpfs":
        return BuildMount("tmpfs", where, mode=0o1777)
    if kind == "cache":
        mode, name = _octal(options, 0o755, here), options.get("id") or posixpath.normpath(target)
        return BuildMount("cache", where, name, options.get("from", ""), source, mode=mode, owner=owner)
    if kind == "ssh":
        name, required = options.get("id") or "default", _required(options)
        return BuildMount("ssh", where, name, required=required, mode=_octal(options, 0o600, here), owner=owner)
    return _secret(options, where, source, owner, here)


def _secret(options: dict[str, str], target: str, source: str, owner: str, here: str) -> BuildMount:
    name, variable = options.get("id", "") or source, options.get("env", "")
    if not (name or target):
        raise Invalid(f"{here}=type=secret needs an id", hint="add id=NAME, and build with --secret id=NAME,src=FILE")
    name = name or posixpath.basename(target)
    if "env" in options and not variable:
        variable = name
    if not target and not variable:
        target = f"/run/secrets/{name}"
    mode = _octal(options, 0o400, here)
    return BuildMount("secret", target, name, "", "", variable, _required(options), mode, owner)


def _options(given: str, expand: Callable[[str], str], here: str) -> dict[str, str]:
    result = {}
    try:
        fields = next(csv.reader([given], strict=True), [])
    except csv.Error as error:
        raise Invalid(f"{here}={given}: {error}", hint="name a path below the directory of the build") from None
    for word in fields:
        key, equals, value = word.partition("=")
        key = key.lower()
        if not equals and key not in ("ro", "readonly", "rw", "readwrite", "required"):
            raise Invalid(f"{here}: {word!r} is no KEY=VALUE", hint="write KEY=VALUE, separated by commas")
        result[key] = expand(value)
    return result


def _required(options: dict[str, str]) -> bool:
    return options.get("required", "false").lower() in ("", "true", "1", "t")


def _number(options: dict[str, str], key: str, here: str) -> int:
    value = options.get(key, "0")
    if not value.isdecimal() or int(value) >= 1 << 32:
        raise Invalid(f"{here}: {key}={value} is no number of an owner", hint="give a number from 0 to 65535")
    return int(value)


def _octal(options: dict[str, str], default: int, here: str) -> int:
    try:
        return int(options["mode"], 8) & 0o7777 if "mode" in options else default
    except ValueError:
        raise Invalid(f"{here}: mode is an octal number", hint="write it as 0644") from None
