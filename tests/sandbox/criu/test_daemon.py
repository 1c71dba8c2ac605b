"""Through the daemon: what forks renew, and raw images that outlive their storing for a while."""

from __future__ import annotations

from typing import Any

from tests.support.checkpoint_programs_held import STRANGE_NAMES
from tests.support.daemon_host import ASLEEP, Daemon

HOOK = (
    "mkdir -p /etc/pagurus/fork.d && printf '#!/bin/sh\\necho $PAGURUS_CHECKPOINT $PAGURUS_SEED > /seed\\n'"
    " > /etc/pagurus/fork.d/10-seed && chmod +x /etc/pagurus/fork.d/10-seed"
)
SERVICE = f"setsid sleep 1000000 > /dev/null 2>&1 & {ASLEEP}"


async def test_forks_renew_themselves_and_their_origin_does_not(sb: Any) -> None:
    await sb.exec(f"{HOOK}; {SERVICE}")
    before = await sb.checkpoint("before")
    children = [fork.sandbox for fork in await sb.fork(2)]
    try:
        seeds = [(await child.exec("cat /seed /etc/machine-id")).text.split() for child in children]
        assert len({seed[1] for seed in seeds}) == len({seed[2] for seed in seeds}) == 2
        assert {len(seed[1]) for seed in seeds} == {64}
        assert (await sb.exec("ls /seed 2>/dev/null || echo none")).text == "none\n"
        # Back at the state of another sandbox it renews itself again; the origin at its own does not.
        await children[0].restore(before)
        assert (await children[0].exec("cat /seed")).text.split()[1] not in {seed[1] for seed in seeds}
        await sb.restore(before)
        assert (await sb.exec("ls /seed 2>/dev/null || echo none")).text == "none\n"
    finally:
        for child in children:
            await child.remove()


async def test_a_restore_soon_after_a_checkpoint_reads_the_raw_images(daemon: Daemon, sb: Any) -> None:
    await sb.exec(SERVICE)
    last = await sb.checkpoint("kept", wait="durable")  # shares its dump with the turn's, unless the service ran since
    mine = {info.id for info in await sb.tree()}
    retained = [path.name for path in (daemon.run / "captures" / ".recent").iterdir() if path.name in mine]
    assert retained
    hidden = []
    for name in retained:  # they are not read
        packed = next(iter((daemon.state / "checkpoints").rglob(f"{name}*.dump")))
        hidden.append((packed, packed.rename(packed.with_suffix(".hidden"))))
    try:
        await sb.restore(last, verify=True)
    finally:
        for packed, aside in hidden:
            aside.rename(packed)
    assert (await sb.exec("pgrep -c sleep")).text == "1\n"


async def test_names_that_are_not_text_are_held_over_a_restore_and_in_a_fork(sb: Any) -> None:
    """What processes hold is noted in the catalogue, and a turn of files alone is compared with it."""
    start, check = STRANGE_NAMES
    await sb.exec(start)
    before = await sb.checkpoint()
    await sb.exec("echo changed > /etc/motd")
    assert (await sb.exec(check)).text == "good\n"
    (child,) = await sb.fork()
    try:
        assert (await child.sandbox.exec(check)).text == "good\n"
    finally:
        await child.sandbox.remove()
    await sb.restore(before, verify=True)
    assert (await sb.exec(check)).text == "good\n"
