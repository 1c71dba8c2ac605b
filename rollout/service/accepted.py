"""The version that a run's engines are to serve, as the trainer published it last. On disk, in the rollout's
directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollout.service.protocol import PublishedVersion
from sandbox import durable

NAME = "version.json"


def write(directory: Path, ref: PublishedVersion) -> None:
    """It survives a loss of power from now on."""
    durable.publish(directory / NAME, msgspec.json.encode(ref))


def read(directory: Path) -> PublishedVersion | None:
    """None: nothing was published yet."""
    try:
        return msgspec.json.decode((directory / NAME).read_bytes(), type=PublishedVersion)
    except FileNotFoundError:
        return None
