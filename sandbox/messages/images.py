"""SDK <-> daemon: images."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sandbox.errors import ErrorBody
from sandbox.messages.brief import Brief

ImageName = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$")]


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How Docker would ask whether a container is well; times in nanoseconds. Recorded; sandboxes do not use it."""

    test: list[str] = []  # ["NONE"], ["CMD", program, ...] or ["CMD-SHELL", command]
    interval: int = 0
    timeout: int = 0
    start_period: int = 0
    start_interval: int = 0
    retries: int = 0


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an image asks of those who start it; the names are those of the OCI image configuration."""

    env: dict[str, str] = {}
    workdir: str = "/"
    user: str = ""  # "name[:group]" or numbers; "": root
    entrypoint: list[str] = []  # recorded; a sandbox runs the commands that it is given
    cmd: list[str] = []
    labels: dict[str, str] = {}
    # From here on recorded for other programs and for builds that begin with the image.
    exposed_ports: list[str] = []  # "80/tcp"
    volumes: list[str] = []
    stop_signal: str = ""
    health_check: HealthCheck | None = None
    shell: list[str] = []  # of the shell form; []: /bin/sh -c
    on_build: list[str] = []  # instructions for builds that begin with the image
    author: str = ""


class ImageInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: an image, as listed. Two names with one digest share one tree."""

    name: str
    digest: str  # of the content of its tree, hexadecimal blake3
    source: str = ""  # where it came from
    created_at: float = 0.0  # seconds since the epoch
    size: int = 0  # bytes of its files
    used_by: int = 0  # sandboxes that use its tree
    config: ImageConfig = ImageConfig()


class CommitRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/checkpoints/{id}/image: make an image of a checkpoint's files."""

    name: ImageName
    config: ImageConfig | None = None  # None: that of the image below
    replace: bool = False  # let the name point to the new image when it exists


class NameImage(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/images/{name}/name: another name for the tree of an image, with its own configuration."""

    name: ImageName
    config: ImageConfig | None = None  # None: that of the image
    replace: bool = False


class PushImage(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/images/{name}/push: send an image to a registry, by the credentials of the host."""

    reference: str  # registry/path[:tag]


class PushResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: where an image is now."""

    reference: str
    digest: str  # of its manifest there


class CopyRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: PUT /v1/sandboxes/{id}/copy: what one COPY or ADD does to the file tree.

    In the body it stands in MessagePack behind its length (4 bytes, big-endian); a tar archive follows, from which is
    copied unless the request names an image or a checkpoint.
    """

    sources: list[str] = []  # paths or patterns in the source; what is copied of each follows Dockerfile's COPY
    target: str  # absolute; one that ends in a slash is a directory
    image: str = ""
    checkpoint: str = ""
    owner: str = ""  # "user[:group]", names as the sandbox's tree knows them; "": that of the source
    directory_owner: str = ""  # of directories that are made on the way; "": `owner`
    mode: str = ""  # octal, or symbolic as chmod reads it; "": that of the source
    parents: bool = False  # keep the directories of the sources, as COPY --parents
    exclude: list[str] = []  # patterns
    unpack: bool = False  # archives become what is in them
    make_directory: bool = False  # no source: make the directory `target`


class CopyResult(msgspec.Struct, kw_only=True):
    """daemon -> SDK: what was made of a CopyRequest."""

    entries: int = 0
    bytes: int = 0


class PullImage(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/images/pull: take an image from a registry, as the host's credentials allow."""

    reference: ImageName  # [registry/]path[:tag][@digest], as docker reads it
    name: ImageName | None = None  # None: as it is called there


class PullProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: POST /v1/images/pull/stream, in parts: how far it is; at last the image, or why there is none."""

    done: int = 0  # bytes of its layers that are here
    total: int = 0
    image: ImageInfo | None = None
    error: ErrorBody | None = None


MAX_LINE = 2000  # characters of a line of a build's log


class BuildRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/builds. A build of an image begins, which the client carries out."""

    name: ImageName


class BuildReport(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/builds/{build}. What it says, and how it ended. Empty: it is still there."""

    lines: Annotated[list[Annotated[str, msgspec.Meta(max_length=MAX_LINE)]], msgspec.Meta(max_length=1000)] = []
    state: Literal["running", "done", "failed"] = "running"
    error: Annotated[str, msgspec.Meta(max_length=10_000)] = ""


class BuildInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> page: a build, under way or over."""

    id: str
    name: str  # of the image
    started_at: float
    ended_at: float | None = None
    state: Literal["running", "done", "failed", "lost"] = "running"  # lost: its client reports no more
    error: str = ""
    lines: int = 0  # of its log
    cut: bool = False  # later lines were too many


class BuildLines(Brief, kw_only=True, omit_defaults=True):
    """daemon -> page: a part of a build's log. `next`: the number of the line after it."""

    build: BuildInfo
    lines: list[str] = []
    next: int = 0


StepKey = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class StepInfo(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a step of a build that is kept, so that an equal one need not be carried out."""

    key: str  # of everything that it was made of
    checkpoint: str
    title: str = ""  # the instruction
    size: int = 0  # bytes that it added
    created_at: float = 0.0
    used_at: float = 0.0


class StepsTarget(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/steps/find"""

    keys: Annotated[list[StepKey], msgspec.Meta(max_length=10_000)] = []


class KeepStep(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: PUT /v1/steps"""

    key: StepKey
    checkpoint: Annotated[str, msgspec.Meta(max_length=100)]
    title: Annotated[str, msgspec.Meta(max_length=200)] = ""


class StepsRemoved(msgspec.Struct, kw_only=True):
    """daemon -> SDK: what a removal of kept steps freed, or will soon."""

    steps: int = 0
    bytes: int = 0
