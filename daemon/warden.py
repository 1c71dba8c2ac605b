"""Ends sandboxes whose time is over.

Owns: looking at the clock. Does not own: the rule (:mod:`daemon.lifetime`), how a sandbox ends (`daemon.host`).
Guarantee: nothing is ended while a call on it is under way: the rule is asked again right before the act, with
nothing awaited in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from daemon.lifetime import Judgement, Life, judge
from sandbox.errors import PagurusError
from sandbox.messages import AtEnd, SandboxState

if TYPE_CHECKING:
    from daemon.host import Host
    from daemon.turns import TurnLoop

log = logging.getLogger("pagurus.warden")

LOOK = 0.5  # seconds between looks, at least


def life(loop: TurnLoop) -> Life:
    row = loop.row
    return Life(
        created=row.created_at,
        used=loop.used_at,
        busy=loop.active > 0 or loop.attached > 0 or loop.exclusive.locked(),
        lifetime=row.lifetime,
        idle_timeout=row.idle_timeout,
    )


async def watch(host: Host) -> None:
    """For as long as the daemon lives."""
    while True:
        await asyncio.sleep(LOOK)
        for loop in list(host.loops.values()):
            if loop.row.lifetime is None and loop.row.idle_timeout is None:
                continue
            stopped = loop.row.state is SandboxState.DEAD and loop.row.at_end is AtEnd.STOP
            judgement = judge(life(loop), time.time())
            if judgement.over is not None and not stopped and loop.row.state is not SandboxState.RESTORING:
                await _end(host, loop, judgement)


async def _end(host: Host, loop: TurnLoop, judgement: Judgement) -> None:
    log.info("%s: %s", loop.row.at_end.value, judgement.over, extra={"sandbox": loop.row.id, "turn": loop.row.turn})
    try:
        if loop.row.at_end is AtEnd.REMOVE:
            await host.remove(loop.row.id)
            return
        flight = await loop.checkpoint("the end of its time", used=False)
        await flight.settled(durable=False)
        if flight.error is None and judge(life(loop), time.time()).over is not None:
            await host.kill(loop.row.id)
    except PagurusError as error:  # somebody was faster, or it cannot be captured: look again
        log.warning("not ended: %s", error, extra={"sandbox": loop.row.id})
        loop.touch()
