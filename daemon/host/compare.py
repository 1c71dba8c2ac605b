"""The file tree of a sandbox beside that of a checkpoint: what differs, and how one file was in both.

Guarantee: no live tree is walked: what a sandbox has now is a snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from daemon.catalogue import CheckpointRow, SandboxRow
from daemon.host.host import Host
from daemon.verdict.explain import last_reasons, reason
from sandbox.tree import diff


async def changes(
    host: Host, sandbox: str, checkpoint: str, *, to: str | None, why: bool, form: diff.Form = "msgpack"
) -> bytes:
    """What differs in the file tree from a checkpoint, and why: the last call known to have changed each.

    It is the whole answer, made in another process. `to`: another checkpoint; None: the files of when its turn comes:
    what waits for its turn holds no snapshot.
    """
    live = host.live(sandbox)
    explain: Callable[[str], str] | None = None
    if why:
        turns = await host.services.catalogue.turns(live.row.id)
        dead = live.container_or_none is None
        now = [] if dead else host.services.inspector.read(live.container.cgroup.id).reasons
        explain = partial(reason, last_reasons(turns, now))
    return await _compared(host, sandbox, checkpoint, to, diff.packed, explain, form)


async def versions(
    host: Host, sandbox: str, checkpoint: str, path: str, *, to: str | None, form: diff.Form = "msgpack"
) -> bytes:
    """One path as it was and as it is; an answer as above."""
    return await _compared(host, sandbox, checkpoint, to, diff.packed_versions, path, form)


async def _compared(
    host: Host, sandbox: str, checkpoint: str, to: str | None, function: Callable[..., bytes], *arguments: Any
) -> bytes:
    row = host.live(sandbox).row
    old = await host.restorable(checkpoint, sandbox=row.id)
    new = None if to is None else await host.restorable(to, sandbox=row.id)
    async with host.services.aside.slot(sandbox=row.id, owner=row.owner):
        below = host.restorer.tree_below(host.live(row.id).row)
        async with _both(host, row, old, new) as (before, after):
            return await host.services.aside.do(function, before, after, below, *arguments)


@contextlib.asynccontextmanager
async def _both(
    host: Host, row: SandboxRow, old: CheckpointRow, new: CheckpointRow | None
) -> AsyncIterator[tuple[Path, Path]]:
    with host.collector.pin(old):
        if new is None:
            async with host.restorer.uppers(row, old) as states:
                yield states
        else:
            with host.collector.pin(new):
                yield host.restorer.files_of(old), host.restorer.files_of(new)
