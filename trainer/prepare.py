"""The run directory that a command means, before any process of the run is started.

Without torch: the supervisor of a run has no use for it.
"""

from __future__ import annotations

import errno
from pathlib import Path

from rich.console import Console

from sandbox.errors import NoSpace, PagurusError
from trainer.config import TrainConfig, open_run, unfinished

FULL = (errno.ENOSPC, errno.EDQUOT)


def prepare(config: TrainConfig, *, fresh: bool = False) -> Path | None:
    """The run directory to work in, made if need be; None when there can be none, which has been said.

    A run of the same plan that has not ended is gone on with, unless `fresh`.
    """
    console = Console()
    try:
        left = None if fresh or config.resume is not None else unfinished(config)
        if left is not None:
            console.print(f"continue with {left} (--fresh starts a new one)", highlight=False, soft_wrap=True)
            return left
        renewed = {} if config.resume is None else {"steps": config.steps, "ranks": config.ranks}
        return open_run(config, **renewed)[0]
    except (PagurusError, OSError) as error:
        console.print(f"[red]stopped[/red]: {explain(error, config.out)}", highlight=False, soft_wrap=True)
        return None


def explain(error: Exception, out: Path) -> Exception:
    """The error as a person should read it: a full disk has many names, and one hint."""
    if isinstance(error, OSError) and error.errno not in FULL:
        return error
    if isinstance(error, OSError) or any(sign in str(error) for sign in ("os error 28", "disk is full", "No space")):
        return NoSpace(f"the disk of {out} is full", hint="free some space, then continue")
    return error
