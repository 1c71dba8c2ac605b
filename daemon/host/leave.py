"""A sandbox leaves this host: it is frozen here, while its state continues elsewhere.

::

    prepare ▸ hold: capture ▸ stays frozen ─┬▶ removed: it has left
                                            └▶ release: it continues, as if nothing had been

    left    = its newest durable checkpoint is kept, as an imported one ▸ all else of it is removed

Guarantee: from the last checkpoint until it is released nothing of the sandbox runs and no call acts on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec

from daemon.catalogue import CheckpointRow, Template, put_checkpoint
from daemon.checkpoints.inflight import InFlight
from daemon.host.fence import HELD
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.criu.carried import frozen
from sandbox.messages import CheckpointState
from sandbox.messages.cluster import ConversationExport, HeldSandbox

MAX_TURNS = 256 << 10  # bytes of the record of turns that goes with a sandbox


def mark(host: Host, live: LiveSandbox) -> Path:
    return host.run_dir / live.row.id / HELD


async def prepare(host: Host, live: LiveSandbox, since: str) -> None:
    """Do beforehand what takes long: start the process that will dump it, list what the other host has."""
    live.need_alive()
    await host.services.capturer.checkpointer.warm_dump(live.container, hold=True)
    await host.store.remember(since)


async def hold(host: Host, live: LiveSandbox) -> InFlight:
    """Capture its state; it is captured when this returns, and nothing of it runs. Raises why it continues instead."""
    held = False

    def begin() -> None:
        nonlocal held
        mark(host, live).touch(mode=0o600)
        held = True

    try:
        inflight = await live.hold(begin)
        await inflight.finalized(durable=False)
        if (trouble := inflight.trouble(durable=False)) is not None:
            raise trouble
    except BaseException:
        if held:  # and not held before
            await release(host, live)
        raise
    return inflight


async def held(host: Host, live: LiveSandbox, row: CheckpointRow) -> HeldSandbox:
    """What continues elsewhere in addition to the content of its last checkpoint: of its turns, the newest."""
    turns, size = await host.services.catalogue.turns(live.row.id), 0
    retained = len(turns)
    while retained and (size := size + len(msgspec.msgpack.encode(turns[retained - 1]))) <= MAX_TURNS:
        retained -= 1
    return HeldSandbox(
        checkpoint=row.id,
        programs=dict(row.programs),
        conversation=ConversationExport() if host.gateway is None else await host.gateway.conversation(row),
        turns=turns[retained:],
    )


async def release(host: Host, live: LiveSandbox) -> None:
    """Release it. Idempotent."""
    mark(host, live).unlink(missing_ok=True)
    live.held = False
    if live.container_or_none is not None:
        await asyncio.to_thread(frozen.thaw, live.container, host.services.inspector.notes)


async def left(host: Host, live: LiveSandbox) -> str:
    """It went on elsewhere, and is removed here. Its newest durable checkpoint stays, and is what this names."""
    services, sandbox = host.services, live.row.id
    for inflight in [item for item in services.inflights.values() if item.row.sandbox == sandbox]:
        await inflight.finalized(durable=True)
    newest = _newest(row for row in services.checkpoints.values() if row.sandbox == sandbox)
    if newest is not None and newest.template is None:
        newest.template = msgspec.structs.replace(Template.of(live.row), gateway=None)
        await services.catalogue.write([put_checkpoint(newest)], durable=True)
    await host.remove(sandbox)
    return "" if newest is None else newest.id


def _newest(rows: Iterable[CheckpointRow]) -> CheckpointRow | None:
    durable = [row for row in rows if row.state is CheckpointState.DURABLE and not row.damaged]
    return max(durable, key=lambda row: row.number, default=None)
