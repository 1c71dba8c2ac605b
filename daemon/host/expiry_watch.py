"""Ends sandboxes whose time is over.

Guarantee: nothing is ended while a call on it is under way: the rule is applied again right before the act, with
nothing awaited in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from daemon.catalogue import put_sandbox
from daemon.host.expiry import ExpiryCheck, Life, judge
from sandbox.errors import PagurusError
from sandbox.messages import AtEnd, SandboxState

if TYPE_CHECKING:
    from daemon.host.host import Host
    from daemon.turns.turns import LiveSandbox

log = logging.getLogger("pagurus.expiry")

SHORTEST, LONGEST = 1e-3, 1e9  # seconds of a lifetime, as in sandbox.messages
POLL_INTERVAL = 0.5  # seconds between looks, at least


def life(live: LiveSandbox) -> Life:
    row = live.row
    return Life(
        created=row.created_at,
        used=live.used_at,
        busy=live.active > 0 or live.attached > 0 or live.exclusive.locked(),
        lifetime=row.lifetime,
        idle_timeout=row.idle_timeout,
    )


async def move_end(host: Host, live: LiveSandbox, seconds: float | None) -> None:
    """Its lifetime is over in so many seconds from now, whatever it was before; None: never."""
    passed = max(0.0, time.time() - live.row.created_at)
    live.row.lifetime = None if seconds is None else min(passed + max(seconds, SHORTEST), LONGEST)
    await host.services.catalogue.write([put_sandbox(live.row)])


async def watch(host: Host) -> None:
    """For as long as the daemon lives."""
    while True:
        await asyncio.sleep(POLL_INTERVAL)
        for live in list(host.live_sandboxes.values()):
            if live.row.lifetime is None and live.row.idle_timeout is None:
                continue
            stopped = live.row.state is SandboxState.DEAD and live.row.at_end is AtEnd.STOP
            judgement = judge(life(live), time.time())
            if judgement.over is not None and not stopped and live.row.state is not SandboxState.RESTORING:
                await _end(host, live, judgement)


async def _end(host: Host, live: LiveSandbox, judgement: ExpiryCheck) -> None:
    log.info("%s: %s", live.row.at_end.value, judgement.over, extra={"sandbox": live.row.id, "turn": live.row.turn})
    try:
        if live.row.at_end is AtEnd.REMOVE:
            await host.remove(live.row.id)
            return
        inflight = await live.checkpoint("the end of its time", used=False)
        await inflight.finalized(durable=False)
        if inflight.error is None and judge(life(live), time.time()).over is not None:
            await host.kill(live.row.id)
    except PagurusError as error:  # another call was faster, or it cannot be captured: look again
        log.warning("not ended: %s", error, extra={"sandbox": live.row.id})
        live.touch()
