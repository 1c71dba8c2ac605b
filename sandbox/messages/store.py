"""SDK <-> daemon: checkpoints as they lie in the store: verification, labels, export and import."""

from __future__ import annotations

import msgspec

from sandbox.messages.brief import Brief
from sandbox.messages.checkpoints import CheckpointInfo, Label


class VerifyRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/checkpoints/verify. Without ids: all."""

    checkpoints: list[str] = []
    restore: bool = False  # also restore each separately, compare it, and end it before it runs


class CheckpointReport(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: what a verification found of one checkpoint, or of the ``catalogue``."""

    checkpoint: str
    damage: list[str] = []  # by name; [] when it is whole
    notes: list[str] = []  # what could not be hashed, and why
    pages: int = 0  # memory pages that it refers to, all of them hashed again
    files: int = 0  # inodes of its file snapshot, all of them hashed again


class LabelRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: PUT /v1/checkpoints/{id}/label"""

    label: Label | None = None


class PullRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/checkpoints/pull. The daemon fetches the checkpoint from another one."""

    address: str  # a URL, or the path of a socket
    checkpoint: str
    token: str | None = None
    ca: str | None = None  # certificate or fingerprint of the other daemon
    mounts: bool = False  # its forks may mount the directories of this host that it names


class ImportResult(Brief, kw_only=True, omit_defaults=True):
    """daemon -> SDK: a checkpoint that came from elsewhere."""

    checkpoint: CheckpointInfo
    already: bool = False  # it was there, with the same content
    received_bytes: int = 0
    pages: int = 0
    new_pages: int = 0  # of these, came with the stream and were not known
    contents: int = 0  # different contents of files and images
    new_contents: int = 0
