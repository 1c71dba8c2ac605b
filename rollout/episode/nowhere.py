"""What an environment without an image gets in place of a sandbox: nothing runs, and there is nothing to lose.

Guarantee: a caller that wants more than its end gets an error: there is no sandbox.
"""

from __future__ import annotations

from typing import Any

from sandbox.errors import Unsupported
from sandbox.messages import CheckpointInfo, SandboxInfo, SandboxState

NAME = "none"


class NoFiles:
    """The files of no sandbox."""

    async def read(self, path: str) -> bytes:
        raise _refusal()

    async def write(self, path: str, data: bytes | str, **_: Any) -> None:
        raise _refusal()


class Nowhere:
    """The sandbox of environments with ``image = ""``."""

    id = NAME
    info = SandboxInfo(id=NAME, image="", state=SandboxState.RUNNING, created_at=0.0)
    files = NoFiles()

    async def exec(self, command: object, **_: Any) -> Any:
        raise _refusal()

    async def checkpoint(self, label: str | None = None) -> CheckpointInfo:
        raise _refusal()

    async def tree(self) -> list[CheckpointInfo]:
        return []

    async def kill(self) -> None:
        """Nothing runs."""

    async def remove(self) -> None:
        """Nothing is there."""


def _refusal() -> Unsupported:
    return Unsupported("this environment has no sandbox", hint="give it an `image`")
