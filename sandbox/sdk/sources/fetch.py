"""Files from the web for ``ADD https://... /target``: fetched by who builds, into a directory that is gone at the end.

Guarantee: what does not match its checksum, is too large or breaks off is refused and not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from pathlib import Path, PurePosixPath
from typing import Self
from urllib.parse import unquote, urlsplit

from sandbox.errors import Invalid
from sandbox.image.stages import CopyInstruction
from sandbox.sdk.sources import repository
from sandbox.tree import host_files

UNNAMED = "__unnamed__"  # BuildKit's name for what has none
MAX_SIZE = 16 << 30  # bytes
MAX_SILENCE = 60.0  # seconds without a byte
_CHUNK = 1 << 20


async def fetch(address: str, directory: Path, *, checksum: str | None = None) -> tuple[Path, str]:
    """The file that an address names, below `directory`, and the SHA-256 of its content. Raises Invalid.

    Its time is the one at which the server says it was changed.
    """
    import aiohttp  # few builds fetch, and loading it takes longer than an unchanged one

    name = PurePosixPath(unquote(urlsplit(address).path)).name or UNNAMED
    observed, size = hashlib.sha256(), 0
    kind, _, target = (checksum or "").partition(":")
    checked = hashlib.new(kind) if kind else None
    limits = aiohttp.ClientTimeout(total=None, sock_connect=MAX_SILENCE, sock_read=MAX_SILENCE)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, trust_env=True, auto_decompress=False) as session,
            session.get(address) as answer,
        ):
            if answer.status != 200:
                raise Invalid(
                    f"{address} answers {answer.status} {answer.reason or ''}".rstrip(), hint="check the address"
                )
            with host_files.new_file(directory, name) as file:
                async for part in answer.content.iter_chunked(_CHUNK):
                    size += len(part)
                    if size > MAX_SIZE:
                        raise Invalid(f"{address} is larger than {MAX_SIZE >> 30} GiB", hint="fetch it by RUN")
                    observed.update(part)
                    if checked is not None:
                        checked.update(part)
                    await asyncio.to_thread(file.write, part)
            changed = _changed(answer.headers.get("Last-Modified", ""))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Invalid(
            f"{address} cannot be fetched: {error or type(error).__name__}", hint="is it reachable from here?"
        ) from error
    if checked is not None and checked.hexdigest() != target:
        raise Invalid(
            f"{address} has the checksum {kind}:{checked.hexdigest()}, not {checksum}",
            hint="check what lies there, then the checksum",
        )
    os.utime(directory / name, (changed, changed), follow_symlinks=False)
    return directory / name, observed.hexdigest()


def _changed(header: str) -> float:
    """Seconds; as with BuildKit, the epoch where a server says nothing that can be read."""
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(header).timestamp())
    except (ValueError, OverflowError):
        return 0.0


class RemoteSources:
    """What the ADD instructions of one build fetch: files of the web, and git repositories. Fetched once."""

    def __init__(self, cache: bool, offline: bool = False) -> None:
        """`offline`: whatever would have to be fetched is refused."""
        self._cache, self._offline = cache, offline
        self._undo = contextlib.ExitStack()
        self._fetched: dict[tuple[str, str], tuple[str, Path, str]] = {}  # address, checksum -> name, directory, digest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    async def digests(self, copy: CopyInstruction, line: int) -> list[str]:
        """Of what is fetched; with a checksum in the Dockerfile nothing is fetched to know it."""
        if copy.checksum and self._cache:
            return [copy.checksum]
        return [(await self._of(copy, address, line))[2] for address in (*copy.addresses, *copy.repositories)]

    async def files(self, copy: CopyInstruction, line: int) -> list[tuple[str, Path]]:
        """The name and the directory of each; a repository is all of its directory."""
        return [(await self._of(copy, address, line))[:2] for address in (*copy.addresses, *copy.repositories)]

    async def repository(self, address: str) -> Path:
        """The directory of a repository that is a context."""
        key = address, ""
        if key not in self._fetched:
            self._need_online(address)
            directory = self._undo.enter_context(host_files.fresh_directory())
            commit, top = await asyncio.to_thread(repository.clone, address, directory, "", False)
            self._fetched[key] = ".", top, commit
        return self._fetched[key][1]

    def _need_online(self, address: str) -> None:
        if self._offline:
            raise Invalid(f"{address[:200]}: this build fetches nothing itself", hint="fetch it by RUN")

    async def _of(self, copy: CopyInstruction, address: str, line: int) -> tuple[str, Path, str]:
        key = address, copy.checksum
        if key not in self._fetched:
            directory = self._undo.enter_context(host_files.fresh_directory())
            try:
                self._need_online(address)
                if address in copy.repositories:
                    cloned = asyncio.to_thread(repository.clone, address, directory, copy.checksum, copy.keep_git)
                    commit, top = await cloned
                    self._fetched[key] = ".", top, commit
                else:
                    file, observed = await fetch(address, directory, checksum=copy.checksum or None)
                    await asyncio.to_thread(file.chmod, 0o600)
                    self._fetched[key] = file.name, directory, f"sha256:{observed}"
            except Invalid as error:
                raise Invalid(f"line {line}: {error.message}", hint=error.hint) from error
        return self._fetched[key]
