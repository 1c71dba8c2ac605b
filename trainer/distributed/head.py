"""`HeadClient`: what a host of a trainer, or a rank there, asks of the host of rank 0, by HTTP."""

from __future__ import annotations

import http.client
import os
import select
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3

from rollout.engine import tls
from sandbox.errors import EngineFailed, Invalid

T = TypeVar("T")
R = TypeVar("R")
HEAD = "PAGURUS_TRAINER_HEAD"  # URL of the host that keeps the saves; on that host empty
TOKEN = "PAGURUS_TRAINER_TOKEN"
TLS = "PAGURUS_TRAINER_TLS"  # directory of the certificate that all hosts show, and of its key
DIGEST = "X-Blake3"  # of a part of a save
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
    """``client.put("/signs/h-2", Signs(start=3), HostAnswer)``. Calls block; they raise OSError. Each thread has a
    connection of its own, which stays open."""

    def __init__(self, url: str, token: str, *, certificate: str = ""):
        """`certificate`: directory of it and its key, for an https URL. Raises Invalid without."""
        self.url, self.token = url.rstrip("/"), token
        if url.startswith("https:") and not certificate:
            raise Invalid(f"{url} wants a certificate", hint=f"{TLS}=DIRECTORY with its {tls.CERTIFICATE}, {tls.KEY}")
        self.tls = tls.calling(Path(certificate)) if url.startswith("https:") else None
        self._place = urlsplit(self.url)
        self._lines = threading.local()

    @classmethod
    def of_environment(cls, url: str) -> HeadClient:
        return cls(url, os.environ.get(TOKEN, ""), certificate=os.environ.get(TLS, ""))

    def close(self) -> None:
        """This thread's connection."""
        line: http.client.HTTPConnection | None = getattr(self._lines, "line", None)
        if line is not None:
            line.close()

    def put(self, path: str, content: object, kind: type[T]) -> T:
        return msgspec.msgpack.decode(self._read("PUT", path, msgspec.msgpack.encode(content)), type=kind)

    def fetch(self, area: str, entry: LogEntry, target: Path) -> None:
        """Content, whole or not at all. Raises EngineFailed if it is not what the head named."""
        aside = target.with_name(f".{target.name}.new")
        with aside.open("wb") as file:
            self._exchange("GET", f"/{area}/{entry.name}", lambda response: shutil.copyfileobj(response, file, BLOCK))
        if digest_of(aside) != entry.digest:
            aside.unlink()
            raise EngineFailed(f"{entry.name} arrived damaged", hint="it is fetched again")
        aside.rename(target)

    def upload(self, path: Path) -> None:
        """A shard of the save under way."""
        with path.open("rb") as file:
            self._read("PUT", f"/save/{path.name}", file, size=path.stat().st_size)

    def part(self, name: str, offset: int, length: int) -> bytes:
        """Of a file of the save to continue from. Raises EngineFailed if it is not what the head read."""
        digest = ""

        def take(response: http.client.HTTPResponse) -> bytes:
            nonlocal digest
            digest = response.headers.get(DIGEST, "")
            return response.read()

        content = self._exchange("GET", f"/save/{name}/{offset}/{length}", take)
        if blake3(content).hexdigest() != digest:
            raise EngineFailed(f"a part of {name} arrived damaged", hint="the ranks are started again")
        return content

    def _read(self, method: str, path: str, body: bytes | BinaryIO, *, size: int | None = None) -> bytes:
        return self._exchange(method, path, lambda response: response.read(), body, size=size)

    def _exchange(
        self,
        method: str,
        path: str,
        take: Callable[[http.client.HTTPResponse], R],
        body: bytes | BinaryIO | None = None,
        *,
        size: int | None = None,
    ) -> R:
        headers = {"Authorization": f"Bearer {self.token}"}
        if size is not None:
            headers["Content-Length"] = str(size)
        line = self._line()
        try:
            line.request(method, self._place.path + path, body=body, headers=headers)
            response = line.getresponse()
            if response.status >= 400:
                said = response.read(500).decode("utf-8", "replace")
                raise OSError(f"{self.url}{path} answered {response.status}: {said}")
            result = take(response)
            response.read()  # its end, so that the connection can be used again
            return result
        except http.client.HTTPException as error:
            line.close()
            raise OSError(f"{self.url} broke off: {type(error).__name__}: {error}") from error
        except BaseException:
            line.close()
            raise

    def _line(self) -> http.client.HTTPConnection:
        line: http.client.HTTPConnection | None = getattr(self._lines, "line", None)
        if line is None:
            host, port = self._place.hostname or "", self._place.port
            if self.tls is None:
                line = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
            else:
                line = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=self.tls)
            self._lines.line = line
        elif line.sock is not None and select.select([line.sock], [], [], 0)[0]:
            line.close()  # the server has ended it; the next request opens it again
        return line
