"""One owner per run directory.

Guarantee: the kernel holds the lock for a living process and releases it when that process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from sandbox.errors import Conflict, PagurusError

NAME = "owner.lock"
OWNED = 75  # exit status: another process has this role; try again later


def own(directory: Path, name: str = NAME) -> IO[str]:
    """Become the owner for as long as the returned file is open. Raises Conflict, naming the process that is."""
    file = (directory / name).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        pid = file.read().strip() or "unknown"
        file.close()
        raise Conflict(f"process {pid} works in {directory}", hint="wait for it, or end it, then call again") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def status_of(work: Callable[[], object]) -> int:
    """Exit status of a role's process that does `work`: 0; 1 when it could not, after its reason; OWNED."""
    try:
        work()
    except Conflict as error:
        print(error, file=sys.stderr)
        return OWNED
    except (PagurusError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
