"""From captured to durable: what is done to a checkpoint while its sandbox runs, is dead, or is there no more.

::

    captured ─▶ line of checkpoints ─▶ hash ▸ pack ─▶ sync ─▶ row says durable, synced ─▶ raw images let go
                                       │ no raw images: what is packed is read again, all of it
                                       └─ neither: lost, and said so

Guarantee: a row says durable only when everything that it names survives a power cut, and from then on says nothing
else, no matter who else writes that row. A checkpoint does not stay captured for ever because its raw images are
gone: what is whole becomes durable, what is not fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from daemon import metrics
from daemon.catalogue import CheckpointRow, put_checkpoint
from daemon.checkpoints.capture import Capturer, failure
from daemon.checkpoints.inflight import InFlight, Services
from daemon.checkpoints.lifecycle import CheckpointEvent, after
from daemon.checkpoints.queue import QueuedCapture
from daemon.checkpoints.schedule import CheckpointStage
from sandbox.errors import CheckpointFailed, NoSpace, PagurusError, Protocol
from sandbox.messages import CheckpointState

log = logging.getLogger("pagurus.storing")

PACK_TIMEOUT = 5.0  # seconds after which a checkpoint should be durable though no caller waits
POLL_INTERVAL, MAX_POLLS = 0.02, 50  # seconds, for which storing waits for forks
USABLE = (CheckpointState.CAPTURED, CheckpointState.DURABLE)
LOST, UNSTORED = "lost though it was durable: ", "lost before it was durable: "


class CheckpointDamaged(CheckpointFailed):
    """What a captured checkpoint consists of is not there, or is damaged."""


async def store(
    services: Services,
    inflight: InFlight,
    *,
    durable_answers: bool = False,
    confirm: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """From captured to durable, in the order of the line of checkpoints. Never raises for the checkpoint's own sake.

    `confirm`: of one from elsewhere; raises Protocol when it is not what it should be.
    """
    row = inflight.row
    where = {"sandbox": row.sandbox, "turn": row.turn}
    try:
        if (before := services.inflights.get(inflight.parent.id)) is not None and before is not inflight:
            inflight.before = before
            if inflight.durable_waited or (inflight.waited and durable_answers):
                before.expedite()
            await asyncio.shield(before.durable)
        if confirm is not None:
            try:
                await confirm()
            except Protocol as error:
                raise CheckpointDamaged(error.message) from error
        if row.dump == row.id:
            await _store_images(services, inflight, durable_answers)
        await services.capturer.sync_files(row, inflight.parent)
        _need_durable_content(services, row)
        await _publish(services, row)
        metrics.durable(row)
        services.tally.stored_bytes += row.stored_bytes
        services.tally.full_bytes += row.full_bytes
        if row.dump == row.id:
            await services.capturer.release(row.id)
        services.outcomes.durable(row, inflight.parent)
    except CheckpointDamaged as error:
        row.state, row.error = after(row.state, CheckpointEvent.FAIL), UNSTORED + error.message
        inflight.unstored = CheckpointFailed(
            f"checkpoint {row.id}: {row.error}", hint="restore an older one", sandbox=row.sandbox, turn=row.turn
        )
        log.error("%s: %s", row.id, row.error, extra=where)
        services.outcomes.lost(row)
        services.catalogue.later([put_checkpoint(row)])
    except Exception as error:  # a full or broken disk, or a bug: tried again, and said
        bug = None if isinstance(error, PagurusError | OSError) else error
        if row.state is CheckpointState.DURABLE:  # and remains so: only its raw images could not be put aside
            log.warning("%s is stored, but: %s", row.id, error, extra=where, exc_info=bug)
            return
        row.state, row.durable_at = after(row.state, CheckpointEvent.RETRY), None
        existing = failure(error)
        row.error = f"captured, but not durable: {str(error) or existing}"
        inflight.unstored = type(existing)(
            f"checkpoint {row.id} is captured, but not durable: {existing.message}",
            hint=existing.hint if isinstance(existing, NoSpace) else "it can be restored, and is tried again",
            sandbox=row.sandbox,
            turn=row.turn,
        )
        log.warning("%s: %s", row.id, row.error, extra=where, exc_info=bug)
        services.catalogue.later([put_checkpoint(row)])


async def store_alone(
    services: Services, inflight: InFlight, confirm: Callable[[], Awaitable[None]] | None = None
) -> None:
    """As `store`, to the end: of a checkpoint whose sandbox is not here."""
    try:
        await inflight.unneeded()
        await store(services, inflight, confirm=confirm)
    finally:
        inflight.finish()
        services.inflights.pop(inflight.row.id, None)


async def _store_images(services: Services, inflight: InFlight, durable_answers: bool) -> None:
    """Pack the raw images. A daemon that was killed may have done that, and may have let go of them."""
    row, capturer = inflight.row, services.capturer

    def queued(stage: CheckpointStage) -> QueuedCapture:
        inflight.ticket = services.queue.submit(
            stage,
            sandbox=row.sandbox,
            owner=row.owner,
            deadline=services.queue.now() + PACK_TIMEOUT,
            waited=inflight.durable_waited or (inflight.waited and durable_answers),
            cost=max(1.0, row.dump_bytes),
        )
        return inflight.ticket

    if not capturer.places.dump(row.id).is_dir():
        async with queued(CheckpointStage.HASH):
            missing = await capturer.unpacked(row.id)
        if missing:
            raise CheckpointDamaged(missing)
        return
    await _unread(inflight, capturer)
    async with queued(CheckpointStage.HASH):
        hashed = await capturer.hash(row, inflight.parent.dump)
    async with queued(CheckpointStage.COMPRESS):
        await capturer.pack(row, hashed)  # `hashed` holds the raw images: not beyond here
    services.count_images(row)


async def _unread(inflight: InFlight, capturer: Capturer) -> None:
    """Let forks of a fresh checkpoint go first, for a while, unless a caller waits until it is durable."""
    for _ in range(MAX_POLLS):
        if inflight.durable_waited or not capturer.is_read(inflight.row.id):
            return
        await asyncio.sleep(POLL_INTERVAL)


def _need_durable_content(services: Services, row: CheckpointRow) -> None:
    for owner in {row.files, row.dump} - {None, row.id}:
        shared = services.checkpoints.get(owner or "")
        if shared is None or shared.state is CheckpointState.DURABLE:
            continue
        if shared.state is CheckpointState.FAILED:
            raise CheckpointDamaged(
                f"it shares content with {owner}, which failed: {shared.error}",
                hint="the daemon tries again by itself: wait until the other one is durable",
            )
        raise PagurusError(
            f"it shares content with {owner}, which is not durable",
            hint="the daemon tries again by itself: wait until the other one is durable",
        )


async def _publish(services: Services, row: CheckpointRow) -> None:
    """Let the row say durable, on the disk first. Others write this row as well, and do not know of that yet."""
    was, error = put_checkpoint(row), row.error
    stored = after(row.state, CheckpointEvent.STORE)
    durable = msgspec.structs.replace(row, state=stored, durable_at=time.time(), error=None)
    await services.catalogue.write([put_checkpoint(durable)], durable=True)
    overtaken = put_checkpoint(row) != was  # a heir's new parent, a note of damage: written as captured since
    row.state, row.durable_at = durable.state, durable.durable_at
    row.error = None if row.error == error else row.error
    if overtaken and row.id in services.checkpoints:
        await services.catalogue.write([put_checkpoint(row)], durable=True)


def nearest(checkpoints: Mapping[str, CheckpointRow], head: str) -> str:
    """The nearest ancestor of `head` whose content is whole. The root has none, so there always is one."""
    row = checkpoints.get(head)
    while row is not None and row.state not in USABLE and row.parent is not None:
        row = checkpoints.get(row.parent)
    return head if row is None else row.id
