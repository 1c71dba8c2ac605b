"""deepagents' backend: ``create_deep_agent(..., backend=PagurusBackend())``.

A backend may be made of a sandbox that exists, of a checkpoint, or of an image.
"""

from __future__ import annotations

from typing import Any

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from pagurus.integrations import common
from sandbox import Invalid, NotFound, PagurusError

MAX_SAID = 1 << 20  # bytes of what a command says that a model may be shown
TIMEOUT = 300  # seconds of a command


class PagurusBackend(BaseSandbox):
    """One sandbox. ``with`` removes it at the end, unless it was there before or `keep` says that it stays."""

    def __init__(
        self,
        *,
        sandbox_id: str | None = None,
        checkpoint: str | None = None,
        image: str = "debian",
        workdir: str | None = None,
        cpus: float | None = None,
        memory_mb: int | None = 2048,
        internet: bool = False,
        keep: bool = False,
    ) -> None:
        self._host: Any = common.connect_blocking()
        self._mine = sandbox_id is None and not keep
        if sandbox_id is not None:
            self.box = self._host.get(sandbox_id)
            return
        self.box = common.start_blocking(
            self._host,
            tool="deepagents",
            image=image,
            checkpoint=checkpoint,
            limits=common.limits(cpus=cpus, memory_mb=memory_mb),
            network=common.network(internet),
            workdir=workdir,
            keep=keep,
        )

    @property
    def id(self) -> str:
        return str(self.box.id)

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        merged = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", "/bin/bash", "-c", command]
        try:
            result = self.box.exec(merged, timeout=timeout or TIMEOUT, output_limit=MAX_SAID)
        except PagurusError as error:
            raise RuntimeError(common.reason(error)) from error
        said = common.text(result.stdout)
        if result.timed_out:
            said += f"\nthe command took more than {timeout or TIMEOUT} seconds and was killed"
        return ExecuteResponse(output=said, exit_code=result.exit_code, truncated=result.stdout_dropped > 0)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path=path, error=self._written(path, content)) for path, content in files]

    def _written(self, path: str, content: bytes) -> str | None:
        try:
            self.box.files.write(path, content)
        except Invalid:
            return "is_directory" if self._kind(path) == "directory" else "invalid_path"
        return None

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [self._read(path) for path in paths]

    def _read(self, path: str) -> FileDownloadResponse:
        try:
            return FileDownloadResponse(path=path, content=self.box.files.read(path))
        except NotFound:
            return FileDownloadResponse(path=path, error="file_not_found")
        except Invalid:
            wrong = "is_directory" if self._kind(path) == "directory" else "invalid_path"
            return FileDownloadResponse(path=path, error=wrong)

    def _kind(self, path: str) -> str:
        try:
            return str(self.box.files.stat(path).kind)
        except PagurusError:
            return ""

    def close(self) -> None:
        """Remove the sandbox, unless it was there before."""
        if self._mine:
            self.box.remove()
        self._host.close()

    def __enter__(self) -> PagurusBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
