"""Start and stop of a host: what the last daemon left is adopted, finished, or collected.

Guarantee (I5): a daemon killed at any instant loses no sandbox and no durable checkpoint; what the catalogue names is
kept, what it does not name is removed.

::

    catalogue ▸ pool ▸ inspector ▸ checkpointer          the parts
    checkpoints: content there?   no ▸ failed, says why   the truth of the disk over that of the row
    sandboxes:   shim lives?      yes ▸ adopt, its gap is unknown, so the next turn captures everything
                                  no ▸ dead, restorable from its latest whole checkpoint
    checkpoints begun:            taken now, under the id that the client knows
    checkpoints captured:         made durable
    everything without a row:     shims, trees, snapshots, process images ▸ removed
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
from collections.abc import Set
from pathlib import Path

from daemon import ahead, config
from daemon.aside import AT_ONCE, Aside
from daemon.catalogue import Catalogue, CheckpointRow, SandboxRow, Statement, put_checkpoint, put_sandbox
from daemon.checkpoints.capture import GONE, Capturer, Places
from daemon.checkpoints.inflight import Services
from daemon.checkpoints.lifecycle import CheckpointEvent, after
from daemon.checkpoints.persist import LOST, UNSTORED, USABLE, nearest
from daemon.checkpoints.queue import CheckpointQueue
from daemon.checkpoints.schedule import CheckpointStage
from daemon.credentials.service import Credentials
from daemon.docker.service import DockerService
from daemon.gateway.service import GatewayService
from daemon.gateway.upstream import GatewayConfig
from daemon.host import leave, mounts, runs
from daemon.host.arrive import Arrivals
from daemon.host.attachments import attach_all, detach_all
from daemon.host.expiry_watch import watch
from daemon.host.host import Host
from daemon.turns import excluded
from sandbox import private
from sandbox.container import layer
from sandbox.container.cgroup import STANDSTILL, parse_bytes
from sandbox.container.container import Container, ContainerSpec
from sandbox.content import dumpfile
from sandbox.criu.carried import frozen
from sandbox.criu.checkpointer import Checkpointer
from sandbox.errors import PagurusError, SandboxDead
from sandbox.image.store import ImageStore
from sandbox.messages import CheckpointState, Retention, SandboxState, Verdict
from sandbox.tree import btrfs, hashing
from sandbox.tree.pool import OURS, BtrfsPool

log = logging.getLogger("pagurus.recovery")

LIMITS = {
    CheckpointStage.DUMP: 3,
    CheckpointStage.SNAPSHOT: 4,
    CheckpointStage.HASH: 1,
    CheckpointStage.COMPRESS: 1,
    CheckpointStage.READ: AT_ONCE,
}
RATES = {
    CheckpointStage.COMPRESS: 256e6
}  # bytes of process images a second: the rest of the disk belongs to the sandboxes
DRAIN = 10.0  # seconds that a stop waits for checkpoints under way


async def open_host(options: config.DaemonConfig, address: str) -> Host:
    """The host of these directories, with everything that a former daemon left."""
    state, run = options.state, options.run
    places = Places(
        trees=state / "pool" / "sandboxes",
        snapshots=state / "pool" / "checkpoints",
        dumps=run / "captures",
        stored=state / "checkpoints",
    )
    private.directory(state, ours=OURS)
    await asyncio.to_thread(layer.ensure)
    places.stored.mkdir(mode=0o700, exist_ok=True)
    _make_passable(run, run / "sandboxes")
    async with contextlib.AsyncExitStack() as undo:
        size = None if options.pool_size is None else parse_bytes(options.pool_size)
        pool = await asyncio.to_thread(BtrfsPool(state, size=size).ensure)
        log.info("the pool is mounted")
        catalogue = Catalogue(state / "catalogue.sqlite")
        undo.push_async_callback(catalogue.close)
        inspector = await ahead.inspector()
        log.info("the inspector is loaded")
        undo.callback(inspector.close)
        checkpointer = Checkpointer(
            state=state,
            run=run,
            notes=inspector.notes,
            share_pages=options.share_pages,
            track=options.track_memory,
            mappings=inspector.mappings,
        )
        undo.push_async_callback(checkpointer.close)
        await checkpointer.prepare()
        queue = CheckpointQueue(LIMITS, RATES)
        capturer = Capturer(pool, places, checkpointer, inspector)
        services = Services(catalogue, queue, capturer, inspector, Aside(queue))
        host = Host(services, places, ImageStore(pool.images), run / "sandboxes")
        await asyncio.to_thread(host.runs.load)
        host.arrivals = Arrivals(host)
        STANDSTILL.holds = host.fence.over  # a capture that ends after the lease thaws nothing
        host.fence.watch()
        host.collector.default = Retention() if options.keep_last is None else Retention(last=options.keep_last)
        gateway = GatewayService(host, state / "gateway.sqlite", GatewayConfig.load(options.gateway_config))
        undo.push_async_callback(gateway.close)
        host.gateway = gateway
        host.credentials = Credentials(state, host.networks)
        host.attachments += [host.credentials, gateway, DockerService(host, address)]
        await recover(host)
        gateway.ready.set()
        if options.prove_every:
            services.spawn(host.prover.keep_proving(options.prove_every), "proofs of checkpoints", lasting=True)
        undo.pop_all()
    return host


def _make_passable(*directories: Path) -> None:
    """CRIU finds the sources of mounts with a sandbox's rights: it may pass through, and see nothing on the way."""
    for directory in directories:
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        directory.chmod(0o711)


async def close_host(host: Host, *, stop_sandboxes: bool = False) -> None:
    """Stop in order. Sandboxes stay alive unless `stop_sandboxes`."""
    if stop_sandboxes:
        await asyncio.gather(*(host.remove(sandbox) for sandbox in list(host.live_sandboxes)), return_exceptions=True)
    services = host.services
    if host.gateway is not None:  # before the engine that its requests would need
        await host.gateway.close()
    if not await host.finalize(DRAIN):
        names = ", ".join(sorted(task.get_name() for task in services.tasks))
        log.warning("still under way after %.0f s: %s; the next daemon finishes it", DRAIN, names)
    await services.queue.close()
    await services.aside.close()
    for task in list(services.tasks):
        task.cancel()
    await asyncio.gather(*services.tasks, return_exceptions=True)
    await services.capturer.checkpointer.close()
    await services.catalogue.close()
    services.inspector.close()
    for attachment in reversed(host.attachments):
        await attachment.close()
    for live in host.live_sandboxes.values():
        if live.container_or_none is not None:
            live.container.detach()


async def recover(host: Host) -> None:
    """Bring the host to the state that its catalogue and its disk describe."""
    services = host.services
    sandboxes, checkpoints = services.catalogue.load()
    services.numbers = itertools.count(max((row.number for row in checkpoints), default=0) + 1)
    changes = await _examine(host, checkpoints)
    pending = [row for row in checkpoints if row.state is CheckpointState.PENDING]
    for attachment in host.attachments:
        await attachment.open(sandboxes)
    for sandbox in sandboxes:
        changes += await _adopt(host, sandbox)
    if changes:
        await services.catalogue.write(changes, durable=True)
    await _collect(host)
    for row in pending:
        await _resume(host, row)
    for row in checkpoints:
        if row.state is CheckpointState.CAPTURED and row.id in services.checkpoints:
            host.services.outcomes.store_later(row)
        elif row.state is CheckpointState.DURABLE and host.places.dump(row.id).exists():
            await services.capturer.release(row.id)  # the former daemon was killed before it let go of them
    services.spawn(host.collector.run(), "garbage collection", lasting=True)
    services.spawn(watch(host), "expiry watch", lasting=True)
    services.spawn(runs.watch(host), "watch over runs", lasting=True)
    for live in host.live_sandboxes.values():
        if live.row.programs and live.row.state is SandboxState.RUNNING:
            services.spawn(live.programs.adopt(), f"programs of {live.row.id}")
    host.verifier.catch_up(list(services.checkpoints.values()))
    if sandboxes:
        alive = sum(live.row.state is SandboxState.RUNNING for live in host.live_sandboxes.values())
        log.info("adopted %d sandboxes, %d dead", alive, len(sandboxes) - alive)


async def _examine(host: Host, checkpoints: list[CheckpointRow]) -> list[Statement]:
    """Compare the rows with what is on the disk. Returns the changes to publish."""
    changes: list[Statement] = []
    unpacked: dict[str, str] = {}  # process images of which the raw ones are gone -> what is wrong with the packed ones
    for row in checkpoints:
        host.services.checkpoints[row.id] = row
        if row.state in USABLE and (missing := await _missing(host, row, unpacked)):
            said = LOST if row.state is CheckpointState.DURABLE else UNSTORED
            row.state, row.error = after(row.state, CheckpointEvent.FAIL), f"{said}{missing}"
            log.error("%s: %s", row.id, row.error, extra={"sandbox": row.sandbox, "turn": row.turn})
            changes.append(put_checkpoint(row))
        elif row.state is CheckpointState.DURABLE and row.dump == row.id and not host.places.packed(row.id).exists():
            row.state, row.durable_at = after(row.state, CheckpointEvent.REPACK), None  # its raw images are there
            log.error("%s: its packed images are gone", row.id, extra={"sandbox": row.sandbox, "turn": row.turn})
            changes.append(put_checkpoint(row))
    for row in checkpoints:
        if row.state is CheckpointState.PENDING and row.parent is not None:
            row.parent = nearest(host.services.checkpoints, row.parent)
    return changes


async def _missing(host: Host, row: CheckpointRow, unpacked: dict[str, str]) -> str:
    """What of a checkpoint's content is not there; "" when all is. What says durable is not read for that."""
    if row.files is not None and not await asyncio.to_thread(host.places.snapshot(row.files).is_dir):
        return f"its file snapshot {row.files}"
    if row.dump is None:
        return ""
    raw, packed = host.places.dump(row.dump), host.places.packed(row.dump)
    if await asyncio.to_thread(raw.is_dir):
        return ""
    if row.state is CheckpointState.DURABLE:
        return "" if await asyncio.to_thread(packed.exists) else f"its process images {row.dump}"
    if row.dump not in unpacked:
        unpacked[row.dump] = await host.services.capturer.unpacked(row.dump)
    return unpacked[row.dump]


async def _adopt(host: Host, row: SandboxRow) -> list[Statement]:
    """Connect to a sandbox that lives, or mark it dead. Returns the changes to publish."""
    before = row.state, row.head
    container: Container | None = None
    spec, why = host.restorer.spec(row), ""
    try:
        container = await Container.adopt(spec)
        if row.state is not SandboxState.RUNNING:
            why = f"the daemon ended while it was {row.state.value}"
        elif not container.alive:
            why = container.fate()
    except SandboxDead as error:  # whatever else goes wrong with a shim that is there must not cost a sandbox
        why = error.message
    if why and row.state is not SandboxState.DEAD:
        log.warning("it is dead: %s", why, extra={"sandbox": row.id, "turn": row.turn})
    if container is not None and why:
        await container.destroy()
        container = None
    elif container is None:
        await _sweep(spec)
    if container is None:
        row.state = SandboxState.DEAD
    row.head = nearest(host.services.checkpoints, row.head)
    live = host.admit(row, container)
    live.held = leave.mark(host, live).exists()
    if container is None:
        await detach_all(host.attachments, row, Container(spec))
    else:
        if not live.held:
            # A checkpoint may have been cut short while it held the sandbox still.
            await asyncio.to_thread(frozen.thaw, container, host.services.inspector.notes)
        host.services.inspector.watch(container.cgroup.id)
        await asyncio.to_thread(excluded.again, container, host.services.inspector, list(row.programs.values()))
        host.services.capturer.taint(container, "the daemon was restarted", files=True, processes=True)
        try:
            await attach_all(host.attachments, row, container)
        except PagurusError as error:  # it lives, and a restore attaches again
            log.error("adopted without its attachments: %s", error, extra={"sandbox": row.id})
    return [] if (row.state, row.head) == before else [put_sandbox(row)]


async def _sweep(spec: ContainerSpec) -> None:
    """End whatever a sandbox without a shim left: processes, groups, its run directory."""
    container = Container(spec)
    if container.cgroup.exists() or await asyncio.to_thread(spec.run_dir.exists):
        await container.destroy()


async def _resume(host: Host, row: CheckpointRow) -> None:
    """A checkpoint that the former daemon had promised: nothing was done to the sandbox since."""
    live = host.live_sandboxes.get(row.sandbox)
    if (
        live is not None
        and live.row.state is SandboxState.RUNNING
        and live.row.head == row.parent
        and not live.captures.inflight
    ):
        row.verdict = Verdict.BOTH
        await asyncio.to_thread(host.services.capturer.discard, row.id)  # what the former daemon had half made
        live.captures.resume(row)
        return
    row.state = after(row.state, CheckpointEvent.FAIL)
    row.error = "the daemon ended before it was captured, and so did the sandbox"
    await host.services.catalogue.write([put_checkpoint(row)])


async def _collect(host: Host) -> None:
    """Remove everything on the disk that no row names."""
    places, rows = host.places, host.services.checkpoints
    unneeded = host.collector.unneeded()
    gone = {row.id for row in unneeded}
    retained = [row for row in rows.values() if row.id not in gone]
    begun = {row.id for row in retained if row.state is CheckpointState.PENDING}
    files, images = begun | {row.files for row in retained}, begun | {row.dump for row in retained}
    trees = {live.row.tree for live in host.live_sandboxes.values()}
    trees |= {name for live in host.live_sandboxes.values() for name in mounts.scratch(live.row)}
    for directory in _entries(host.run_dir):
        if not directory.is_dir() or directory.is_symlink():
            directory.unlink()  # nothing of ours is a file there
        elif directory.name not in host.live_sandboxes and directory.name != "empty":
            await _destroy_stray(host, directory)
    await asyncio.to_thread(_remove_strays, places, files, images, trees)
    await host.collector.forget(unneeded)


async def _destroy_stray(host: Host, directory: Path) -> None:
    """A sandbox that was being made or removed: whatever of it lives is ended."""
    spec = ContainerSpec(
        id=directory.name, image=directory, tree=directory, uid_base=1 << 20, hostname=directory.name, run_dir=directory
    )
    try:
        await (await Container.adopt(spec)).destroy()
    except PagurusError:
        await _sweep(spec)
    log.info("collected a half-made sandbox", extra={"sandbox": directory.name})


def _remove_stray(subvolume: Path) -> None:
    """One that cannot be removed takes up space until the next start; it keeps no daemon from starting."""
    try:
        btrfs.delete_subvolume(subvolume)
    except OSError as error:
        log.error("cannot remove %s, which nothing needs: %s (look into it, and remove it)", subvolume, error)


def _remove_strays(places: Places, files: Set[str | None], images: Set[str | None], trees: Set[str | None]) -> None:
    """Remove what no row names: as a sandbox's file tree, as the files or as the process images of a checkpoint."""
    for tree in _entries(places.trees):
        if tree.name not in trees:
            _remove_stray(tree)
    for snapshot in _entries(places.snapshots):
        if snapshot.name not in files:
            _remove_stray(snapshot)
    for dump in _entries(places.dumps):
        # Names with a dot are the checkpointer's own, but for images on their way out.
        if dump.name not in images and (not dump.name.startswith(".") or dump.name.startswith(GONE)):
            shutil.rmtree(dump, ignore_errors=True)
    for stored in _entries(places.stored):
        needed = {dumpfile.SUFFIX: images, hashing.SUFFIX: files}.get(stored.suffix, set())  # else half written
        if stored.stem not in needed:
            stored.unlink(missing_ok=True)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
