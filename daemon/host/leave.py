"""A sandbox leaves this host: it stands still here, while its state goes on elsewhere.

Owns: the hold, which outlives the daemon: a mark in the sandbox's run directory and its frozen control group. Does not
own: how the state travels (:mod:`daemon.store.exports`), how it goes on there (:mod:`daemon.host.arrive`), when it has
left, which the coordinator answers for: it removes the sandbox here, or lets it go on.

::

    prepare ▸ hold: capture ▸ stays frozen ─┬▶ removed: it has left
                                            └▶ release: it goes on, as if nothing had been

Guarantee: from the last checkpoint until it is released nothing of the sandbox runs and no call acts on it.
"""

from __future__ import annotations

from pathlib import Path

from daemon.checkpoints.inflight import InFlight
from daemon.host.fence import HELD
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox


def mark(host: Host, live: LiveSandbox) -> Path:
    return host.run_dir / live.row.id / HELD


async def prepare(host: Host, live: LiveSandbox, since: str) -> None:
    """Do beforehand what takes long: start the process that will dump it, list what the other host has."""
    live.need_alive()
    await host.services.capturer.checkpointer.warm_hold(live.container)
    await host.store.remember(since)


async def hold(host: Host, live: LiveSandbox) -> InFlight:
    """Capture its state; it is captured when this returns, and nothing of it runs. Raises why it goes on instead."""
    held = False

    def begin() -> None:
        nonlocal held
        mark(host, live).touch(mode=0o600)
        held = True

    try:
        inflight = await live.hold(begin)
        await inflight.settled(durable=False)
        if (trouble := inflight.trouble(durable=False)) is not None:
            raise trouble
    except BaseException:
        if held:  # and not by somebody else before
            await release(host, live)
        raise
    return inflight


async def release(host: Host, live: LiveSandbox) -> None:
    """It goes on. Idempotent."""
    mark(host, live).unlink(missing_ok=True)
    live.held = False
    if live.container_or_none is not None:
        live.container.cgroup.thaw()
