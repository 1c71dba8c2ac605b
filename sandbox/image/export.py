"""Images as other programs read them: an OCI layout that is also an archive of ``docker save``.

Guarantee: the tree is one layer, with owners, modes, times, extended attributes, hard links, holes and FIFOs as they
are; an equal image gives the same bytes. Blocks.

::

    oci-layout, index.json             what OCI tools read
    manifest.json                      what `docker load` reads
    blobs/sha256/DIGEST                the layer, its configuration, its manifest
"""

from __future__ import annotations

import hashlib
import platform
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from sandbox.image import reference, registry
from sandbox.image.oci import ARCHITECTURES
from sandbox.messages import ImageConfig
from sandbox.tree import archive
from sandbox.tree.safe_path import directory

TAG = "image"  # by which skopeo finds it in the layout
_TYPE = "application/vnd.oci.image."
_CHUNK = 1 << 20


class _HashingWriter:
    """A file that knows the digest of what was written to it."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out, self._observed, self.size = out, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._observed.update(data)
        self.size += len(data)
        return self._out.write(data)

    @property
    def digest(self) -> str:
        return self._observed.hexdigest()


def write_layout(tree: Path, config: ImageConfig, created_at: float, name: str, dir_path: Path) -> None:
    """Fill an empty directory with the image. `name`: what it is called where it is loaded."""
    blobs = dir_path / "blobs/sha256"
    blobs.mkdir(parents=True)
    with (blobs / "layer").open("wb", buffering=_CHUNK) as file, directory(tree) as root:
        layer = _HashingWriter(file)
        archive.pack(root, "/", layer, complete=True)  # type: ignore[arg-type]
    (blobs / "layer").rename(blobs / layer.digest)
    described = _descriptor("layer.v1.tar", layer.digest, layer.size)
    about = _blob(blobs, "config.v1+json", document(config, layer.digest, created_at))
    manifest = _blob(
        blobs,
        "manifest.v1+json",
        {"schemaVersion": 2, "mediaType": f"{_TYPE}manifest.v1+json", "config": about, "layers": [described]},
    )
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    manifest["annotations"] = {"org.opencontainers.image.ref.name": TAG, "io.containerd.image.name": tagged}
    index = {"schemaVersion": 2, "mediaType": f"{_TYPE}index.v1+json", "manifests": [manifest]}
    paths = {
        part: f"blobs/sha256/{result['digest'].partition(':')[2]}" for part, result in (("c", about), ("l", described))
    }
    docker = [{"Config": paths["c"], "RepoTags": [tagged], "Layers": [paths["l"]]}]
    for file_name, content in (
        ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
        ("index.json", index),
        ("manifest.json", docker),
    ):
        (dir_path / file_name).write_bytes(msgspec.json.encode(content))


def push(tree: Path, config: ImageConfig, created_at: float, target: str, directory: Path) -> str:
    """Send the image to a registry; the digest of its manifest there. `directory`: an empty directory."""
    required = reference.parse(target)
    write_layout(tree, config, created_at, required.name, directory)
    return registry.push(required, directory, TAG)


def pack_layout(directory: Path, out: IO[bytes]) -> None:
    """The archive of a layout. What distinguishes it from a root file system comes first."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as packed:
        names = ["oci-layout", "index.json", "manifest.json"]
        names += sorted(f"blobs/sha256/{path.name}" for path in (directory / "blobs/sha256").iterdir())
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mode = (directory / name).stat().st_size, 0o644
            with (directory / name).open("rb") as file:
                packed.addfile(member, file)


def document(config: ImageConfig, layer: str, created_at: float) -> dict[str, Any]:
    """The configuration as OCI and Docker have it; `layer`: the SHA-256 of the only one."""
    created = datetime.fromtimestamp(created_at, UTC).isoformat().replace("+00:00", "Z")
    check = config.health_check
    result: dict[str, object] = {
        "Env": [f"{name}={value}" for name, value in config.env.items()],
        "WorkingDir": config.workdir,
        "User": config.user,
        "Entrypoint": list(config.entrypoint),
        "Cmd": list(config.cmd),
        "Labels": dict(config.labels),
        "ExposedPorts": {port: {} for port in config.exposed_ports},
        "Volumes": {path: {} for path in config.volumes},
        "StopSignal": config.stop_signal,
        "Shell": list(config.shell),
        "OnBuild": list(config.on_build),
        "Healthcheck": check
        and {
            "Test": list(check.test),
            "Interval": check.interval,
            "Timeout": check.timeout,
            "StartPeriod": check.start_period,
            "StartInterval": check.start_interval,
            "Retries": check.retries,
        },
    }
    about = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": created,
        "author": config.author,
        "config": {name: value for name, value in result.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer}"]},
        "history": [{"created": created, "created_by": "pagurus image export"}],
    }
    return {name: value for name, value in about.items() if value}


def _blob(blobs: Path, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    data = msgspec.json.encode(content)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return _descriptor(kind, digest, len(data))


def _path(descriptor: dict[str, Any]) -> str:
    return f"blobs/sha256/{descriptor['digest'].partition(':')[2]}"


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": _TYPE + kind, "digest": f"sha256:{digest}", "size": size}
