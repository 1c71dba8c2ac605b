"""`HeadClient`: what a host of a trainer, or a rank there, asks of the host of rank 0, by HTTP."""

from __future__ import annotations

import http.client
import os
import shutil
import urllib.request
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from blake3 import blake3

from rollout.engine import tls
from sandbox.errors import EngineFailed, Invalid

T = TypeVar("T")
HEAD = "PAGURUS_TRAINER_HEAD"  # URL of the host that keeps the saves; on that host empty
TOKEN = "PAGURUS_TRAINER_TOKEN"
TLS = "PAGURUS_TRAINER_TLS"  # directory of the certificate that all hosts show, and of its key
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 20


class HeadAddress(msgspec.Struct, frozen=True, kw_only=True):
    """trainer -> who starts agents: where they find it. Private: the token is in it."""

    url: str
    token: str
    certificate: str = ""  # PEM that all hosts show; without: plain HTTP
    key: str = ""


class LogEntry(msgspec.Struct, frozen=True):
    """head -> hosts: content by name and hash."""

    name: str
    digest: str


def digest_of(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def entries(directory: Path) -> list[LogEntry]:
    """Of the files in it."""
    return [LogEntry(path.name, digest_of(path)) for path in sorted(directory.iterdir()) if path.is_file()]


class HeadClient:
    """``client.get("/log", list[LogEntry])``. Calls block; they raise OSError."""

    def __init__(self, url: str, token: str, *, certificate: str = ""):
        """`certificate`: directory of it and its key, for an https URL. Raises Invalid without."""
        self.url, self.token = url.rstrip("/"), token
        if url.startswith("https:") and not certificate:
            raise Invalid(f"{url} wants a certificate", hint=f"{TLS}=DIRECTORY with its {tls.CERTIFICATE}, {tls.KEY}")
        self.tls = tls.calling(Path(certificate)) if url.startswith("https:") else None

    @classmethod
    def of_environment(cls, url: str) -> HeadClient:
        return cls(url, os.environ.get(TOKEN, ""), certificate=os.environ.get(TLS, ""))

    def get(self, path: str, kind: type[T]) -> T:
        with self._open("GET", path) as response:
            return msgspec.msgpack.decode(response.read(), type=kind)

    def put(self, path: str, content: object, kind: type[T]) -> T:
        with self._open("PUT", path, msgspec.msgpack.encode(content)) as response:
            return msgspec.msgpack.decode(response.read(), type=kind)

    def fetch(self, area: str, entry: LogEntry, target: Path) -> None:
        """Content, whole or not at all. Raises EngineFailed if it is not what the head named."""
        aside = target.with_name(f".{target.name}.new")
        with self._open("GET", f"/{area}/{entry.name}") as response, aside.open("wb") as file:
            shutil.copyfileobj(response, file, BLOCK)
        if digest_of(aside) != entry.digest:
            aside.unlink()
            raise EngineFailed(f"{entry.name} arrived damaged", hint="it is fetched again")
        aside.rename(target)

    def upload(self, path: Path) -> None:
        """A shard of the save under way."""
        with path.open("rb") as file:
            self._open("PUT", f"/save/{path.name}", file, size=path.stat().st_size).close()

    def _open(
        self, method: str, path: str, body: bytes | BinaryIO | None = None, *, size: int | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self.token}"}
        if size is not None:
            headers["Content-Length"] = str(size)
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method=method)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT, context=self.tls)
        return response
