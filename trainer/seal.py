"""The seal of a directory: hashes of its files.

Guarantee: a directory with a manifest is complete (the manifest is written last, atomically), and `verify_directory`
returns only when every file is bit-identical to what was sealed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from blake3 import blake3

from sandbox import durable
from sandbox.errors import EngineFailed

NAME = "manifest.json"


class FileHash(msgspec.Struct, frozen=True):
    blake3: str
    size: int


class SealManifest(msgspec.Struct, kw_only=True):
    """What a sealed directory consists of. `version`: a number of the owner's."""

    version: int
    files: dict[str, FileHash]


def write_manifest(directory: Path | str, version: int) -> SealManifest:
    """Seal `directory`: hash all its files, then write ``manifest.json`` aside, sync it and rename it into place."""
    directory = Path(directory)
    files = {path.name: _hash(path) for path in sorted(directory.iterdir()) if path.is_file() and path.name != NAME}
    manifest = SealManifest(version=version, files=files)
    durable.publish(directory / NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def read_manifest(directory: Path | str) -> SealManifest:
    path = Path(directory) / NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=SealManifest)
    except FileNotFoundError:
        raise EngineFailed(f"{directory} was not sealed: no {NAME}", hint="use the one before it") from None
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"{path} is damaged: {error}", hint="use the one before it") from error


def verify_directory(directory: Path | str, version: int | None = None) -> SealManifest:
    """The manifest, after every file was read and hashed again. Raises EngineFailed naming what differs."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    if version is not None and manifest.version != version:
        raise EngineFailed(f"{directory} holds version {manifest.version}, not {version}", hint="use the one before it")
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file() or _hash(path) != expected:
            raise EngineFailed(f"{path} differs from its manifest (or is gone)", hint="use the one before it")
    return manifest


def _hash(path: Path) -> FileHash:
    hasher = blake3()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
            size += len(chunk)
    return FileHash(blake3=hasher.hexdigest(), size=size)
