"""The file tree of a sandbox, as the SDK offers it."""

from __future__ import annotations

from sandbox.messages import FileInfo
from sandbox.sdk.transport import Transport, encoded


class Files:
    """The file tree of a sandbox. Paths are absolute or relative to its root."""

    def __init__(self, client: Transport, path: str) -> None:
        self._client = client
        self._path = path

    async def read(self, path: str) -> bytes:
        """The content of a regular file."""
        return await self._client.raw("GET", f"{self._path}/files?{encoded(path=path)}", None, "")

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644, append: bool = False) -> None:
        """Write a regular file; missing parents are made. Text is UTF-8. The next turn captures it."""
        query = encoded(path=path, mode=f"{mode:o}", append="1" if append else "0")
        content = data.encode() if isinstance(data, str) else bytes(data)
        await self._client.raw("PUT", f"{self._path}/files?{query}", content, "application/octet-stream")

    async def list(self, path: str = "/") -> list[FileInfo]:
        """The entries of a directory, by name."""
        return await self._client.call("GET", f"{self._path}/entries?{encoded(path=path)}", list[FileInfo])
