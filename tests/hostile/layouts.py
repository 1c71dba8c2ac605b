"""Acts of whoever prepared an image archive that an administrator imports: each is refused with a reason."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable

from sandbox import PagurusError
from tests.hostile.api import ApiScene, act

Entries = list[tuple[str, bytes | None, str]]  # name, content or None for a link, target


def _archive(entries: Entries) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content, target in entries:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, target
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return out.getvalue()


def _layout(config: object, layer: bytes | None = None, extra: Entries | None = None) -> Entries:
    """An OCI layout with this configuration and layer."""
    blobs: Entries = []

    def blob(content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs.append((f"blobs/sha256/{digest}", content, ""))
        return {"digest": f"sha256:{digest}", "size": len(content)}

    empty = _archive([("etc/issue", b"x", "")])
    manifest = {"layers": [blob(empty if layer is None else layer)], "config": blob(json.dumps(config).encode())}
    index = {"manifests": [blob(json.dumps(manifest).encode())]}
    return [("oci-layout", b"{}", ""), ("index.json", json.dumps(index).encode(), ""), *blobs, *(extra or [])]


def _broken_gzip() -> bytes:
    packed = bytearray(gzip.compress(bytes(range(256)) * 400))
    packed[20:60] = bytes(40)
    return bytes(packed)


def _index_of_itself() -> Entries:
    inner = json.dumps({"manifests": [{"digest": "sha256:" + "0" * 64}]}).encode()
    digest = hashlib.sha256(inner).hexdigest()
    index = json.dumps({"manifests": [{"digest": f"sha256:{digest}"}]}).encode()
    return [("oci-layout", b"{}", ""), ("index.json", index, ""), (f"blobs/sha256/{digest}", inner, "")]


def _saved(layer: Entries) -> Entries:
    """What docker save writes, with this for its one layer."""
    manifest = [{"Config": "config.json", "Layers": ["layer"]}]
    return [("manifest.json", json.dumps(manifest).encode(), ""), ("config.json", b"{}", ""), *layer]


_ODD: dict[str, Callable[[], Entries]] = {
    "has a link to itself for a layer": lambda: _saved([("layer", None, "layer")]),
    "has two links to each other for a layer": lambda: _saved([("layer", None, "b"), ("b", None, "layer")]),
    "has a link to nothing for a layer": lambda: _saved([("layer", None, "nowhere")]),
    "has a list for its configuration": lambda: _layout({"config": ["x"]}),
    "has a number for its variables": lambda: _layout({"config": {"Env": 5}}),
    "has objects for its command": lambda: _layout({"config": {"Cmd": [{"a": 1}]}}),
    "has a list for its labels": lambda: _layout({"config": {"Labels": [1, 2]}}),
    "has a configuration that is nested without end": lambda: [
        ("oci-layout", b"{}", ""),
        ("index.json", b'{"manifests":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    ],
    "has a manifest of numbers (docker save)": lambda: [("manifest.json", b"[7]", "")],
    "has a layer whose compressed bytes are damaged": lambda: _layout({}, _broken_gzip()),
    "has an index that leads nowhere": _index_of_itself,
    "has a file in place of a directory": lambda: _layout(
        {}, extra=[("blobs/sha256/x/y", b"", ""), ("blobs/sha256/x", b"", "")]
    ),
}


async def _refused(scene: ApiScene, entries: Entries) -> str:
    async def parts() -> object:
        yield _archive(entries)

    try:
        made = await scene.host.raw("PUT", "/v1/images/odd-image", parts(), "application/x-tar")  # type: ignore[arg-type]
    except PagurusError as error:
        return "" if error.status in (400, 422) else f"{error.status}: {error}"
    with contextlib.suppress(PagurusError):  # for the next act; the answer does not matter
        await scene.host.call("DELETE", "/v1/images/odd-image", dict[str, object])
    return f"it was taken: {made!r}"


for _name, _entries in _ODD.items():

    @act(f"import an image that {_name}")
    async def _import(scene: ApiScene, entries: Callable[[], Entries] = _entries) -> str:
        return await _refused(scene, entries())
