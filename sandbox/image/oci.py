"""OCI image layouts and what ``docker save`` writes: layers and configuration.

Owns: the formats (OCI image specification 1.1, Docker's archive of version 1.2): which image, which layers in which
order, whiteouts. Does not own: safe unpacking of one layer (:mod:`sandbox.tree.archive`).
Guarantee: every blob that an OCI layout names by digest is checked before it is used; an archive never leaves its
directory; sizes are bounded.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import platform
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import zstandard

from sandbox.errors import Invalid, Unsupported
from sandbox.messages import ImageConfig
from sandbox.tree import archive

MAX_DOCUMENT = 16 << 20  # bytes of a manifest or a configuration
MAX_LAYERS = 512
MAX_IMAGE = 256 << 30  # bytes of the files of one image
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BLOB = re.compile(r"(sha256|sha512):([0-9a-f]{64,128})")


def is_layout(path: Path) -> bool:
    """Whether a tar archive holds an image rather than a root file system: told by its first entries."""
    try:
        with tarfile.open(path) as found:
            for _, member in zip(range(4096), found, strict=False):
                name = member.name.removeprefix("./")
                if name in ("oci-layout", "index.json", "manifest.json") and member.isreg():
                    return True
    except (tarfile.TarError, OSError, EOFError, zstandard.ZstdError):
        return False
    return False


def extract_layout(layout: tarfile.TarFile, folder: Path) -> None:
    """Unpack the archive of a layout: plain files and directories, and links between them."""
    for count, member in enumerate(layout):
        if count > 100_000:
            raise Invalid("an image archive of more than 100,000 entries")
        parts = Path(member.name.removeprefix("./")).parts
        if ".." in parts or member.name.startswith("/"):
            raise Invalid(f"the image archive leaves its directory: {member.name!r}")
        target = folder.joinpath(*parts)
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
        elif member.isreg() or member.islnk() or member.issym():  # docker save links layers that images share
            try:
                source = layout.extractfile(member)
            except (KeyError, RecursionError):  # what it names is not in the archive, or is itself
                source = None
            if source is None:
                raise Invalid(f"{member.name!r} of the image archive points nowhere")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)


def unpack(layout: Path, tree: Path) -> ImageConfig:
    """Unpack the image of this machine's architecture into the empty directory `tree`; its configuration."""
    if (layout / "index.json").is_file():
        config, layers = _from_index(layout)
    elif (layout / "manifest.json").is_file():
        config, layers = _from_docker(layout)
    else:
        raise Invalid("neither an OCI layout nor an archive of docker save")
    if len(layers) > MAX_LAYERS:
        raise Invalid(f"an image of more than {MAX_LAYERS} layers")
    directory = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    left = MAX_IMAGE
    try:
        for layer in layers:
            with _opened(layer) as stream:
                left -= archive.unpack(stream, directory, limit=left, rules=archive.LAYER)
    finally:
        os.close(directory)
    return _config(config)


# --------------------------------------------------------------------------- the two formats


def _from_index(layout: Path) -> tuple[dict[str, Any], list[Path]]:
    document = _document(layout / "index.json")
    for _ in range(4):  # an index may point to an index
        if "layers" in document:
            break
        document = _document(_blob(layout, chosen(document.get("manifests"))))
    else:
        raise Invalid("the image's index points to indexes only")
    layers = [_blob(layout, layer) for layer in _list(document["layers"])]
    return _document(_blob(layout, document.get("config"))), layers


def chosen(manifests: object) -> dict[str, Any]:
    """The manifest for this machine."""
    wanted = ARCHITECTURES.get(platform.machine(), platform.machine())
    offered = [entry for entry in _list(manifests) if isinstance(entry, dict)]
    for entry in offered:
        about = entry.get("platform")
        if not isinstance(about, dict) or (about.get("os"), about.get("architecture")) == ("linux", wanted):
            return entry
    known = ", ".join(str(entry["platform"].get("architecture")) for entry in offered)
    raise Unsupported(f"the image is for {known or 'nothing'}, not for {wanted}")


def _from_docker(layout: Path) -> tuple[dict[str, Any], list[Path]]:
    manifests = _list(_document(layout / "manifest.json", kind=list))
    if len(manifests) != 1:
        raise Invalid(f"the archive holds {len(manifests)} images", remedy="save one")
    manifest = manifests[0]
    if not isinstance(manifest, dict):
        raise Invalid("the manifest of the image archive is not what it should be")
    layers = [_inside(layout, name) for name in _list(manifest.get("Layers"))]
    return _document(_inside(layout, manifest.get("Config"))), layers


def _config(document: dict[str, Any]) -> ImageConfig:
    found = document.get("config") or {}
    try:
        return msgspec.convert(
            {
                "env": dict(str(pair).split("=", 1) for pair in found.get("Env") or [] if "=" in str(pair)),
                "workdir": found.get("WorkingDir") or "/",
                "user": found.get("User") or "",
                "entrypoint": found.get("Entrypoint") or [],
                "cmd": found.get("Cmd") or [],
                "labels": found.get("Labels") or {},
            },
            ImageConfig,
        )
    except (msgspec.ValidationError, AttributeError, TypeError, ValueError) as error:
        raise Invalid(f"the image's configuration cannot be read: {error}") from None


# --------------------------------------------------------------------------- blobs


def _document(path: Path, kind: type = dict) -> Any:
    if not path.is_file() or path.stat().st_size > MAX_DOCUMENT:
        raise Invalid(f"{path.name} of the image is missing or larger than {MAX_DOCUMENT} bytes")
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, RecursionError) as error:
        raise Invalid(f"{path.name} of the image is no JSON: {error}") from None
    if not isinstance(found, kind):
        raise Invalid(f"{path.name} of the image is not what it should be")
    return found


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise Invalid("a list is missing in the image's manifest")
    return value


def _blob(layout: Path, descriptor: object) -> Path:
    """A blob by its descriptor, checked."""
    name = descriptor.get("digest") if isinstance(descriptor, dict) else None
    match = _BLOB.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise Invalid(f"not a digest: {str(name)[:80]!r}")
    path = layout / "blobs" / match[1] / match[2]
    if not path.is_file():
        raise Invalid(f"the blob {name} is missing in the image")
    with path.open("rb") as file:
        if hashlib.file_digest(file, match[1]).hexdigest() != match[2]:
            raise Invalid(f"the blob {name} is damaged", remedy="fetch the image again")
    return path


def _inside(layout: Path, name: object) -> Path:
    if not isinstance(name, str) or ".." in Path(name).parts or name.startswith("/"):
        raise Invalid(f"not a name in the image archive: {str(name)[:80]!r}")
    path = layout / name
    if not path.is_file():
        raise Invalid(f"{name} is missing in the image archive")
    return path


@contextlib.contextmanager
def _opened(layer: Path) -> Iterator[IO[bytes]]:
    """The tar stream of a layer, told by its first bytes rather than by its media type."""
    with layer.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        try:
            if magic[:2] == b"\x1f\x8b":
                with gzip.open(file) as stream:
                    yield cast("IO[bytes]", stream)
            elif magic == b"\x28\xb5\x2f\xfd":
                with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file) as stream:
                    yield cast("IO[bytes]", stream)
            else:
                yield file
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
            raise Invalid(f"a layer of the image is damaged: {error}", remedy="fetch the image again") from error
