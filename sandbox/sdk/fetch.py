"""Files from the web for ``ADD https://... /target``: fetched by who builds, into a directory that is gone at the end.

Owns: the transfer, its limits, the checksum. Does not own: what is done with the file (:mod:`sandbox.sdk.build`).
Guarantee: what does not match its checksum, is too large or breaks off is refused and not used.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import aiohttp

from sandbox.errors import Invalid
from sandbox.tree import host_files

MAX_SIZE = 16 << 30  # bytes
MAX_SILENCE = 60.0  # seconds without a byte
_CHUNK = 1 << 20


async def fetch(address: str, folder: Path, *, checksum: str | None = None) -> tuple[Path, str]:
    """The file that an address names, below `folder`, and the SHA-256 of its content. Raises Invalid."""
    name = PurePosixPath(unquote(urlsplit(address).path)).name or "index.html"
    seen, size = hashlib.sha256(), 0
    kind, _, wanted = (checksum or "").partition(":")
    checked = hashlib.new(kind) if kind else None
    limits = aiohttp.ClientTimeout(total=None, sock_connect=MAX_SILENCE, sock_read=MAX_SILENCE)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, trust_env=True, auto_decompress=False) as session,
            session.get(address) as answer,
        ):
            if answer.status != 200:
                raise Invalid(f"{address} answers {answer.status} {answer.reason or ''}".rstrip())
            with host_files.new_file(folder, name) as file:
                async for part in answer.content.iter_chunked(_CHUNK):
                    size += len(part)
                    if size > MAX_SIZE:
                        raise Invalid(f"{address} is larger than {MAX_SIZE >> 30} GiB")
                    seen.update(part)
                    if checked is not None:
                        checked.update(part)
                    await asyncio.to_thread(file.write, part)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Invalid(
            f"{address} cannot be fetched: {error or type(error).__name__}", remedy="is it reachable from here?"
        ) from error
    if checked is not None and checked.hexdigest() != wanted:
        raise Invalid(f"{address} has the checksum {kind}:{checked.hexdigest()}, not {checksum}")
    return folder / name, seen.hexdigest()
