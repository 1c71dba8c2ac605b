"""OpenHands' workspace: ``PagurusWorkspace(working_dir="/workspace")``, for its SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openhands.sdk.git.models import GitChange, GitChangeStatus, GitDiff
from openhands.sdk.workspace import BaseWorkspace
from openhands.sdk.workspace.models import CommandResult, FileOperationResult
from pydantic import Field, PrivateAttr

from pagurus.integrations import common
from sandbox import PagurusError

STATUSES = {
    "A": GitChangeStatus.ADDED,
    "?": GitChangeStatus.ADDED,
    "M": GitChangeStatus.UPDATED,
    "D": GitChangeStatus.DELETED,
    "R": GitChangeStatus.MOVED,
}


class PagurusWorkspace(BaseWorkspace):
    """One sandbox. ``with`` removes it at the end."""

    working_dir: str = Field(default="/workspace")
    image: str = "debian"
    checkpoint: str | None = None
    memory_mb: int = 2048
    internet: bool = False
    _host: Any = PrivateAttr(default=None)
    _box: Any = PrivateAttr(default=None)
    _paused: str | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._host = common.connect_blocking()
        self._box = common.start_blocking(
            self._host,
            tool="openhands",
            image=self.image,
            checkpoint=self.checkpoint,
            limits=common.limits(memory_mb=self.memory_mb),
            network=common.network(self.internet),
        )
        if not self._box.files.exists(self.working_dir):
            self._box.files.mkdir(self.working_dir)

    @property
    def box(self) -> Any:
        """The sandbox, as the blocking SDK has it."""
        return self._box

    def execute_command(self, command: str, cwd: str | Path | None = None, timeout: float = 30.0) -> CommandResult:
        try:
            result = self._box.exec(
                ["/bin/bash", "-c", command],
                cwd=str(cwd or self.working_dir),
                timeout=timeout,
                output_limit=common.MAX_OUTPUT,
            )
        except PagurusError as error:
            raise RuntimeError(common.reason(error)) from error
        return CommandResult(
            command=command,
            exit_code=-1 if result.timed_out else result.exit_code,
            stdout=common.text(result.stdout),
            stderr=common.text(result.stderr),
            timeout_occurred=result.timed_out,
        )

    def file_upload(self, source_path: str | Path, destination_path: str | Path) -> FileOperationResult:
        return self._moved(source_path, destination_path, upload=True)

    def file_download(self, source_path: str | Path, destination_path: str | Path) -> FileOperationResult:
        return self._moved(source_path, destination_path, upload=False)

    def _moved(self, source: str | Path, target: str | Path, *, upload: bool) -> FileOperationResult:
        named = {"source_path": str(source), "destination_path": str(target)}
        try:
            if upload:
                content = Path(source).read_bytes()
                self._box.files.write(self._absolute(target), content)
            else:
                content = self._box.files.read(self._absolute(source))
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                Path(target).write_bytes(content)
        except (OSError, PagurusError) as error:
            why = common.reason(error) if isinstance(error, PagurusError) else str(error)
            return FileOperationResult(success=False, error=why, **named)
        return FileOperationResult(success=True, file_size=len(content), **named)

    def _absolute(self, path: str | Path) -> str:
        return str(Path(self.working_dir) / path)

    def git_changes(self, path: str | Path) -> list[GitChange]:
        said = self._git("status --porcelain --untracked-files=all", path)
        lines = [(line[:2].strip()[:1], line[3:]) for line in said.splitlines() if len(line) > 3]
        return [
            GitChange(path=Path(name.rpartition(" -> ")[2]), status=STATUSES.get(kind, GitChangeStatus.UPDATED))
            for kind, name in lines
        ]

    def git_diff(self, path: str | Path) -> GitDiff:
        place = Path(self._absolute(path))
        shown = self.execute_command(f"git show HEAD:./{place.name}", cwd=place.parent)
        now = self.execute_command(f"cat ./{place.name}", cwd=place.parent)
        original = shown.stdout if shown.exit_code == 0 else None
        return GitDiff(original=original, modified=now.stdout if now.exit_code == 0 else None)

    def _git(self, command: str, path: str | Path) -> str:
        result = self.execute_command(f"git {command}", cwd=self._absolute(path))
        if result.exit_code != 0:
            raise RuntimeError(f"git {command} failed: {result.stderr}")
        return str(result.stdout)

    def pause(self) -> None:
        """Save the state and end its processes; `resume` brings both back."""
        self._paused = self._box.checkpoint("paused").id
        self._box.kill()

    def resume(self) -> None:
        if self._paused is not None:
            self._box.restore(self._paused)
            self._paused = None

    def __exit__(self, *arguments: Any) -> None:
        self._send_completion_callback(*arguments[:2])
        self._box.remove()
        self._host.close()
