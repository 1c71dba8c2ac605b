"""The seal of a published weights folder: hashes of its files and of each tensor.

Owns: ``manifest.json``. Does not own: how the folder came to be, who loads it.
Guarantee: a folder with a manifest is complete (the manifest is written last, atomically), and `verify_folder`
returns only when every file is bit-identical to what was sealed (I9). No torch: launchers import this.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import msgspec
from blake3 import blake3

from sandbox import durable
from sandbox.errors import EngineFailed

NAME = "manifest.json"


class FileHash(msgspec.Struct, frozen=True):
    blake3: str
    size: int


class Manifest(msgspec.Struct, kw_only=True):
    """trainer -> engine: what version `version` consists of."""

    version: int
    files: dict[str, FileHash]
    tensors: dict[str, str] = {}  # sha256 of the raw bytes, by tensor name


class _TensorEntry(msgspec.Struct):
    data_offsets: tuple[int, int]


def write_manifest(folder: Path | str, version: int) -> Manifest:
    """Seal `folder`: hash all its files, then write ``manifest.json`` aside, sync it and rename it into place."""
    folder = Path(folder)
    files = {path.name: _hash(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != NAME}
    tensors: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(tensor_hashes(path))
    manifest = Manifest(version=version, files=files, tensors=tensors)
    durable.publish(folder / NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def read_manifest(folder: Path | str) -> Manifest:
    path = Path(folder) / NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise EngineFailed(
            f"{folder} is not a published weights folder: no {NAME}", remedy="publish it again"
        ) from None
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"{path} is damaged: {error}", remedy="publish it again") from error


def digest_of(folder: Path | str) -> str:
    """blake3 of the seal itself, which names the hash of every file: one word for all of a version."""
    return blake3((Path(folder) / NAME).read_bytes()).hexdigest()


def verify_folder(folder: Path | str, version: int | None = None) -> Manifest:
    """The manifest, after every file was read and hashed again. Raises EngineFailed naming what differs."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if version is not None and manifest.version != version:
        raise EngineFailed(f"{folder} holds version {manifest.version}, not {version}", remedy="publish it again")
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file() or _hash(path) != expected:
            raise EngineFailed(f"{path} differs from its manifest (or is gone)", remedy="publish it again")
    return manifest


def absolute(folder: Path | str) -> Path:
    """An engine has a working directory of its own: it is told absolute names."""
    return Path(folder).absolute()


def tensor_hashes(path: Path) -> dict[str, str]:
    """sha256 of each tensor's bytes in a safetensors file, read from its header (no torch)."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        hashes = {}
        for name, raw in header.items():
            start, end = msgspec.json.decode(raw, type=_TensorEntry).data_offsets
            file.seek(8 + length + start)
            hashes[name] = hashlib.sha256(file.read(end - start)).hexdigest()
    return hashes


def _hash(path: Path) -> FileHash:
    hasher = blake3()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
            size += len(chunk)
    return FileHash(blake3=hasher.hexdigest(), size=size)
