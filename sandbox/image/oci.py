"""OCI image layouts and what ``docker save`` writes: layers and configuration.

Guarantee: every blob that an OCI layout names by digest is checked before it is used; an archive never leaves its
directory; sizes are bounded.
"""

from __future__ import annotations

import hashlib
import platform
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from sandbox.errors import Invalid, NotFound, Unsupported
from sandbox.messages import ImageConfig
from sandbox.tree import archive, host_files, tar
from sandbox.tree.compressed import decompressed
from sandbox.tree.safe_path import directory

MAX_DOCUMENT = 16 << 20  # bytes of a manifest or a configuration
MAX_LAYERS = 512
BASIC = ("", "v1", "v8")  # variants of a processor that each one has
NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
MAX_INDEXES = 3  # above one another
MAX_MANIFESTS = 64  # of an index that are looked at
MAX_IMAGE = 64 << 30  # bytes of data of the files of one image
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BLOB = re.compile(r"(sha256|sha512):([0-9a-f]{64,128})")


def is_layout(source: Path) -> bool:
    """Whether a tar archive holds an image rather than a root file system: by its first entries."""
    try:
        with source.open("rb") as file, decompressed(file) as stream, tar.Reader(stream) as result:
            for _, member in zip(range(4096), result, strict=False):
                name = member.name.removeprefix("./")
                if name in ("oci-layout", "index.json", "manifest.json") and member.isreg():
                    return True
    except tarfile.TarError:
        return False
    return False


def unpack(layout: Path, tree: Path, blobs: Path | None = None) -> ImageConfig:
    """Unpack the image of this machine's architecture into the empty directory `tree`; its configuration.

    `blobs`: where those of the layout lie, if not in it.
    """
    if (layout / "index.json").is_file():
        config, layers = _from_index(_Blobs(layout, blobs))
    elif (layout / "manifest.json").is_file():
        config, layers = _from_docker(layout)
    else:
        raise Invalid("neither an OCI layout nor an archive of docker save")
    if len(layers) > MAX_LAYERS:
        raise Invalid(f"an image of more than {MAX_LAYERS} layers")
    left = MAX_IMAGE
    with directory(tree) as root:
        for layer in layers:
            with layer.open() as file, decompressed(file) as stream:
                left -= archive.unpack(stream, root, limit=left, rules=archive.LAYER)
    return _config(config)


def unpack_root(source: Path, tree: Path) -> None:
    """Unpack a tar archive of a root file system into the empty directory `tree`."""
    with source.open("rb") as file, decompressed(file) as stream, directory(tree) as root:
        archive.unpack(stream, root, limit=MAX_IMAGE, rules=archive.ROOT)


def extract_layout(source: Path, dir_path: Path) -> None:
    """Unpack the archive of a layout: files and directories, and links between them."""
    with source.open("rb") as file, decompressed(file) as stream, directory(dir_path) as into:
        host_files.unpack(stream, into, limit=MAX_IMAGE)


# --------------------------------------------------------------------------- the two formats


def _from_index(blobs: _Blobs) -> tuple[dict[str, Any], list[_File]]:
    document = _document(_File(blobs.layout, "index.json"))
    named: dict[str, str] = {}
    for entry in _list(document.get("manifests") or []):
        notes = entry.get("annotations") if isinstance(entry, dict) else None
        if not isinstance(notes, dict):
            continue
        named |= {str(notes[key]): str(entry.get("digest")) for key in NAMES if key in notes}
    if len({*named.values()}) > 1:
        raise Invalid(f"the layout holds {len({*named.values()})} images", hint="save one")
    return _for_this_machine(blobs, document, MAX_INDEXES)


def _for_this_machine(blobs: _Blobs, document: dict[str, Any], depth: int) -> tuple[dict[str, Any], list[_File]]:
    """Configuration and layers of a manifest, or of the first one of an index that is for this machine."""
    if "layers" in document:
        config = _document(blobs.find(document.get("config")))
        if (other := foreign(config)) is not None:
            raise Unsupported(f"the image is for {other}, not for {_here()}")
        return config, [blobs.find(layer) for layer in _list(document["layers"])]
    if not depth:
        raise Invalid("the image's index points to indexes only")
    refusals = []
    for entry in chosen(document.get("manifests")):
        try:
            return _for_this_machine(blobs, _document(blobs.find(entry)), depth - 1)
        except Unsupported as error:
            refusals.append(error)
    raise refusals[0]


def chosen(manifests: object) -> list[dict[str, Any]]:
    """The manifests that may be for this machine: those that say so first, then those that say nothing."""
    offered = [entry for entry in _list(manifests) if isinstance(entry, dict)][:MAX_MANIFESTS]
    named = [(entry, about) for entry in offered if isinstance(about := entry.get("platform"), dict)]
    mine = [(entry, str(about.get("variant") or "")) for entry, about in named if foreign(about) is None]
    result = [entry for entry, variant in mine if variant in BASIC]
    result += [entry for entry, variant in mine if variant not in BASIC]  # for newer processors
    result += [entry for entry in offered if not isinstance(entry.get("platform"), dict)]
    if not result:
        existing = ", ".join(foreign(about) or "" for _, about in named)
        raise Unsupported(f"the image is for {existing or 'nothing'}, not for {_here()}")
    return result


def foreign(about: dict[str, Any]) -> str | None:
    """What a platform, or a configuration, says of another machine than this one; what it leaves out fits."""
    system, architecture = (str(about.get(name) or "") for name in ("os", "architecture"))
    if system not in ("", "linux") or architecture not in ("", _here()):
        return "/".join(part for part in (system if system != "linux" else "", architecture) if part)
    return None


def _here() -> str:
    return ARCHITECTURES.get(platform.machine(), platform.machine())


def _from_docker(layout: Path) -> tuple[dict[str, Any], list[_File]]:
    manifests = _list(_document(_File(layout, "manifest.json"), kind=list))
    if len(manifests) != 1:
        raise Invalid(f"the archive holds {len(manifests)} images", hint="save one")
    manifest = manifests[0]
    if not isinstance(manifest, dict):
        raise Invalid("the manifest of the image archive is not what it should be")
    config = _document(_inside(layout, manifest.get("Config")))
    if (other := foreign(config)) is not None:
        raise Unsupported(f"the image is for {other}, not for {_here()}")
    return config, [_inside(layout, name) for name in _list(manifest.get("Layers"))]


def _config(document: dict[str, Any]) -> ImageConfig:
    result = document.get("config") or {}
    try:
        check = result.get("Healthcheck")
        return msgspec.convert(
            {
                "env": dict(str(pair).split("=", 1) for pair in result.get("Env") or [] if "=" in str(pair)),
                "workdir": result.get("WorkingDir") or "/",
                "user": result.get("User") or "",
                "entrypoint": result.get("Entrypoint") or [],
                "cmd": result.get("Cmd") or [],
                "labels": result.get("Labels") or {},
                "exposed_ports": sorted(result.get("ExposedPorts") or {}),
                "volumes": sorted(result.get("Volumes") or {}),
                "stop_signal": result.get("StopSignal") or "",
                "health_check": check and {_snake(key): value for key, value in check.items()},
                "shell": result.get("Shell") or [],
                "on_build": result.get("OnBuild") or [],
                "author": document.get("author") or "",
            },
            ImageConfig,
        )
    except (msgspec.ValidationError, AttributeError, TypeError, ValueError) as error:
        raise Invalid(f"the image's configuration cannot be read: {error}") from None


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


# --------------------------------------------------------------------------- blobs


@dataclass(frozen=True)
class _File:
    """A file of a layout. No link leads out of its directory."""

    directory: Path
    name: str

    def open(self) -> IO[bytes]:
        try:
            return host_files.open_file(self.directory, self.name)
        except NotFound:
            raise Invalid(f"{self.name[-160:]} is missing in the image") from None


@dataclass(frozen=True)
class _Blobs:
    """What a layout names by digest, checked."""

    layout: Path
    elsewhere: Path | None

    def find(self, descriptor: object) -> _File:
        name = descriptor.get("digest") if isinstance(descriptor, dict) else None
        match = _BLOB.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise Invalid(f"not a digest: {str(name)[:80]!r}")
        path = f"{match[1]}/{match[2]}"
        result = _File(self.layout, f"blobs/{path}") if self.elsewhere is None else _File(self.elsewhere, path)
        with result.open() as file:
            if hashlib.file_digest(file, match[1]).hexdigest() != match[2]:  # type: ignore[arg-type]
                raise Invalid(f"the blob {name} is damaged", hint="fetch the image again")
        return result


def _document(target: _File, kind: type = dict) -> Any:
    with target.open() as file:
        raw = file.read(MAX_DOCUMENT + 1)
    if len(raw) > MAX_DOCUMENT:
        raise Invalid(f"{target.name} of the image is larger than {MAX_DOCUMENT} bytes")
    try:
        result = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Invalid(f"{target.name} of the image is no JSON: {error}") from None
    if not isinstance(result, kind):
        raise Invalid(f"{target.name} of the image does not have the expected form")
    return result


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise Invalid("a list is missing in the image's manifest")
    return value


def _inside(layout: Path, name: object) -> _File:
    if not isinstance(name, str) or ".." in Path(name).parts or name.startswith("/"):
        raise Invalid(f"not a name in the image archive: {str(name)[:80]!r}")
    return _File(layout, name)
