"""Names of images in registries, read as docker reads them. Pure.

>>> parse("python:3.12-slim").address
'docker.io/library/python:3.12-slim'
>>> parse("docker.io/library/python:3.12-slim").name
'python:3.12-slim'
>>> parse("registry.example:5000/team/app").name
'registry.example:5000/team/app:latest'
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandbox.errors import Invalid

MAX_LENGTH = 200  # characters: a name is that of a file, too
DOCKER, LIBRARY, LATEST = "docker.io", "library/", "latest"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,62}[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """An image of a registry. With a digest, its tag says nothing."""

    registry: str
    path: str
    tag: str
    digest: str = ""

    @property
    def repository(self) -> str:
        return f"{self.registry}/{self.path}"

    @property
    def address(self) -> str:
        """In full."""
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"

    @property
    def name(self) -> str:
        """As people write it: what the image is called on this host."""
        short = self.address.removeprefix(f"{DOCKER}/")
        return short.removeprefix(LIBRARY) if short != self.address else short

    @property
    def local(self) -> bool:
        """Whether the registry is on this machine, where docker also speaks without TLS."""
        host = self.registry.rsplit(":", 1)[0] if not self.registry.endswith("]") else self.registry
        return host in ("localhost", "[::1]") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def is_one(text: str) -> bool:
    try:
        parse(text)
    except Invalid:
        return False
    return True


def parse(text: str) -> Reference:
    """Raises Invalid, which says what a name looks like."""
    rest, at, digest = text.partition("@")
    first, slash, path = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry = DOCKER if first in ("index.docker.io", "registry-1.docker.io") else first
    else:
        registry, path = DOCKER, rest
    path, colon, tag = path.partition(":")
    if registry == DOCKER and "/" not in path:
        path = LIBRARY + path
    complete = (
        len(text) <= MAX_LENGTH
        and _HOST.fullmatch(registry)
        and _PATH.fullmatch(path)
        and (not colon or _TAG.fullmatch(tag))
        and (not at or _DIGEST.fullmatch(digest))
    )
    if not complete:
        raise Invalid(
            f"{text[:80]!r} is no name of an image",
            hint="registry/path:tag or registry/path@sha256:HEX, in small letters",
        )
    return Reference(registry, path, tag or LATEST, digest)
