"""A registry on loopback that speaks the OCI distribution API, and misbehaves when it is told to.

``with Registry() as registry: registry.push("team/app", "1", layers)``; `registry.requested` is what was asked for.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import platform
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import zstandard

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
#: The same layer is the same bytes.
PACKINGS = {"gzip": lambda tar: gzip.compress(tar, mtime=0), "zstd": zstandard.compress, "": bytes}


def tar_of(files: dict[str, bytes]) -> bytes:
    """A layer: path -> content. A path that ends in a slash is a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name.rstrip("/"))
            if name.endswith("/"):
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Registry:
    """Each attribute below the line is a fault or a rule that a test sets."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}  # (repository, tag or digest) -> kind, content
        self.requested: list[str] = []  # methods and paths
        self._uploads: dict[str, bytes] = {}  # by their address, what has come
        # ---
        self.user: tuple[str, str] | None = None  # name and password: others are refused a token
        self.busy = 0  # so many answers to come are 429
        self.truncated: set[str] = set()  # blobs whose connection breaks in the middle
        self.damaged: set[str] = set()  # blobs with one other byte
        self.silent: set[str] = set()  # blobs of which the second half never comes
        self.endless: set[str] = set()  # blobs that are far longer than they should be
        self._ended = threading.Event()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                registry.take(self)

            do_PATCH = do_PUT = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Registry:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    # ------------------------------------------------------------------ content

    def blob(self, data: bytes) -> str:
        self.blobs[digest_of(data)] = data
        return digest_of(data)

    def manifest(self, repository: str, tag: str, document: dict[str, Any]) -> str:
        data = json.dumps(document).encode()
        for name in (tag, digest_of(data)):
            self.manifests[repository, name] = document["mediaType"], data
        return digest_of(data)

    def push(
        self,
        repository: str,
        tag: str,
        layers: list[dict[str, bytes]],
        *,
        config: dict[str, Any] | None = None,
        packing: str = "gzip",
        kind: str = MANIFEST,
        change: dict[str, Any] | None = None,
    ) -> str:
        """An image of these layers; its digest. `change`: fields of its first layer's descriptor."""
        described, plain = [], []
        for files in layers:
            tar = tar_of(files)
            plain.append(digest_of(tar))
            data = PACKINGS[packing](tar)
            media = LAYER + (f"+{packing}" if packing else "")
            if kind == DOCKER_MANIFEST:
                media = "application/vnd.docker.image.rootfs.diff.tar.gzip"
            described.append({"mediaType": media, "digest": self.blob(data), "size": len(data)})
        if change and described:
            described[0] |= change
        about = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": plain},
        }
        raw = json.dumps(about).encode()
        media = "application/vnd.docker.container.image.v1+json" if kind == DOCKER_MANIFEST else CONFIG
        document = {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {"mediaType": media, "digest": self.blob(raw), "size": len(raw)},
            "layers": described,
        }
        return self.manifest(repository, tag, document)

    def index(self, repository: str, tag: str, by_architecture: dict[str, str]) -> str:
        entries = [
            {
                "mediaType": MANIFEST,
                "digest": digest,
                "size": len(self.manifests[repository, digest][1]),
                "platform": {"os": "linux", "architecture": architecture},
            }
            for architecture, digest in by_architecture.items()
        ]
        return self.manifest(repository, tag, {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})

    def blobs_requested(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.requested if path.startswith("GET") and "/blobs/" in path]

    # ------------------------------------------------------------------ answers

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requested.append(f"{request.command} {path}")
        if path == "/token":
            return self._token(request)
        if self.user is not None and request.headers.get("Authorization") != "Bearer sesame":
            realm = f'Bearer realm="http://{self.host}/token",service="test"'
            return self._send(request, 401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', {"WWW-Authenticate": realm})
        if self.busy > 0 and path != "/v2/":
            self.busy -= 1
            return self._send(request, 429, b'{"errors":[{"code":"TOOMANYREQUESTS"}]}', {"Retry-After": "1"})
        if path == "/v2/":
            return self._send(request, 200, b"{}", {})
        repository, _, name = path.removeprefix("/v2/").rpartition("/")
        repository, _, what = repository.rpartition("/")
        if what == "manifests" and (repository, name) in self.manifests:
            kind, data = self.manifests[repository, name]
            return self._send(request, 200, data, {"Content-Type": kind, "Docker-Content-Digest": digest_of(data)})
        if what == "blobs" and name in self.blobs:
            return self._blob(request, name, self.blobs[name])
        code = "MANIFEST_UNKNOWN" if what == "manifests" else "BLOB_UNKNOWN"
        return self._send(request, 404, json.dumps({"errors": [{"code": code, "message": "unknown"}]}).encode(), {})

    def take(self, request: BaseHTTPRequestHandler) -> None:
        """The half of the API that receives: blobs by upload, manifests."""
        path, _, query = request.path.partition("?")
        data = _body(request)
        self.requested.append(f"{request.command} {path}")
        if self.user is not None and request.headers.get("Authorization") != "Bearer sesame":
            realm = f'Bearer realm="http://{self.host}/token",service="test"'
            return self._send(request, 401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', {"WWW-Authenticate": realm})
        repository, _, name = path.removeprefix("/v2/").rpartition("/")
        if repository.endswith("/manifests"):
            repository = repository.removesuffix("/manifests")
            for item in (name, digest_of(data)):
                self.manifests[repository, item] = request.headers["Content-Type"], data
            return self._send(request, 201, b"", {"Docker-Content-Digest": digest_of(data)})
        if request.command == "POST":
            location = f"{path.rstrip('/')}/{len(self._uploads)}"
            self._uploads[location] = b""
            return self._send(request, 202, b"", {"Location": location})
        self._uploads[path] += data
        end = len(self._uploads[path])
        if request.command == "PATCH":
            return self._send(request, 202, b"", {"Location": path, "Range": f"0-{end - 1}"})
        (target,) = parse_qs(query)["digest"]
        if self.blob(self._uploads.pop(path)) != target:
            return self._send(request, 400, b'{"errors":[{"code":"DIGEST_INVALID"}]}', {})
        return self._send(request, 201, b"", {"Docker-Content-Digest": target})

    def _token(self, request: BaseHTTPRequestHandler) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Basic ")
        existing = base64.b64encode(":".join(self.user or ()).encode()).decode()
        if given != existing:
            return self._send(request, 401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', {})
        return self._send(request, 200, b'{"token":"sesame"}', {"Content-Type": "application/json"})

    def _blob(self, request: BaseHTTPRequestHandler, name: str, data: bytes) -> None:
        if name in self.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if name in self.endless:
            data += b"\0" * (64 << 20)
        longer = name in self.truncated or name in self.silent
        length = {"Content-Length": str(len(data) + 1000)} if longer else {}
        self._send(request, 200, data, {"Content-Type": "application/octet-stream", **length})
        if name in self.silent:
            self._ended.wait()
        if name in self.truncated:
            request.close_connection = True

    def _send(self, request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            try:
                request.wfile.write(data)
            except OSError:  # who asked has heard enough
                request.close_connection = True


def _body(request: BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    data = b""
    while size := int(request.rfile.readline().split(b";")[0], 16):
        data += request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()
    return data
