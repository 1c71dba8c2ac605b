"""SDK <-> daemon: images."""

from __future__ import annotations

from typing import Annotated

import msgspec

ImageName = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an image asks of those who start it; the names are those of the OCI image configuration."""

    env: dict[str, str] = {}
    workdir: str = "/"
    user: str = ""  # "name[:group]" or numbers; "": root
    entrypoint: list[str] = []  # recorded; a sandbox runs the commands that it is given
    cmd: list[str] = []
    labels: dict[str, str] = {}


class ImageInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: an image, as listed. Two names with one digest share one tree."""

    name: str
    digest: str  # of the content of its tree, hexadecimal blake3
    source: str = ""  # where it came from
    created_at: float = 0.0  # seconds since the epoch
    size: int = 0  # bytes of its files
    used_by: int = 0  # sandboxes that stand on its tree
    config: ImageConfig = ImageConfig()


class CommitRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/checkpoints/{id}/image: make an image of a checkpoint's files."""

    name: ImageName
    config: ImageConfig | None = None  # None: that of the image below
    replace: bool = False  # let the name point to the new image when it exists
