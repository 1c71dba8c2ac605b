"""Whether what is mounted into a sandbox is still where it was mounted.

A sandbox cannot move a mount point, but may move a directory above it, and a restore would bind it where it was.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from sandbox.errors import CheckpointFailed

if TYPE_CHECKING:
    from sandbox.container.container import Container

_ESCAPED = re.compile(rb"\\([0-7]{3})")


def need_in_place(container: Container) -> None:
    """Raise CheckpointFailed where a mount of the sandbox lies elsewhere. Blocks, some 0.1 ms.

    Nothing of the sandbox may run during it.
    """
    targets = [target for target, _ in container.binds]
    if not targets or container.init_pid is None:
        return
    with contextlib.suppress(OSError):  # pid 1 is gone: others say so
        with open(f"/proc/{container.init_pid}/mountinfo", "rb") as mounts:
            points = {_ESCAPED.sub(lambda result: bytes([int(result[1], 8)]), line.split()[4]) for line in mounts}
        for target in targets:
            if os.fsencode(str(PurePosixPath(target))) not in points:
                raise CheckpointFailed(
                    f"a directory above the mount at {target} was moved or removed",
                    hint="move it back",
                    sandbox=container.spec.id,
                )
