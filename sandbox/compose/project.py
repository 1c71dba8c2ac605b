"""What a compose file is to a host: a composition, and what comes before it is created."""

from __future__ import annotations

from dataclasses import dataclass, field

from sandbox.messages import Composition


@dataclass(frozen=True)
class ServiceBuild:
    """The image of a service that is built from a Dockerfile."""

    image: str  # its name on the host
    context: str  # a directory of this machine, or a git repository
    dockerfile: str | None = None  # a path, of a repository within it; None: Dockerfile in the context
    inline: str = ""  # its text instead
    arguments: dict[str, str] = field(default_factory=dict)
    target: str | None = None
    contexts: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, bytes] = field(default_factory=dict)
    network: bool = True  # whether RUN may reach anything
    cache: bool = True


@dataclass(frozen=True)
class FileCopy:
    """A file that is copied into a service before it starts."""

    service: str
    target: str
    source: str | None = None  # a file of this machine
    content: bytes = b""  # where there is no source
    mode: int | None = None  # None: that of the source, or 0444


@dataclass(frozen=True)
class DirectoryCopy:
    """A directory whose content is copied into a service before it starts."""

    service: str
    source: str  # of this machine; "": an empty one is made
    target: str


@dataclass(frozen=True)
class Project:
    """All of it."""

    name: str
    composition: Composition
    builds: dict[str, ServiceBuild] = field(default_factory=dict)  # by service
    policies: dict[str, str] = field(default_factory=dict)  # pull_policy by service: always, missing, never, build
    files: list[FileCopy] = field(default_factory=list)
    directories: list[DirectoryCopy] = field(default_factory=list)
    open_files: int | None = None  # of the largest `ulimits`
    no_new_privs: bool = False  # every service says so
    notes: list[str] = field(default_factory=list)  # what is accepted and does something else than in Docker
