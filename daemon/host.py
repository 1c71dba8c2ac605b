"""Authority over all sandboxes of one host: create, find, restore, fork, compare, remove.

Owns: the set of sandboxes and checkpoints, their names and id ranges, and every act that makes or
ends a sandbox. Does not own: what happens inside one (:mod:`daemon.turns`), HTTP (`daemon.app`),
which checkpoints are kept (`daemon.keeper`), how a state comes back (`daemon.restoring`), what is left
after a crash (`daemon.recovery`).

Guarantee: an act either succeeds or leaves nothing behind but an error that names the sandbox and
the remedy. A sandbox is published only when it runs, so what a crash leaves half made has no row
and is collected. A failed restore leaves the sandbox dead, its checkpoints whole, and may be tried
again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from daemon import metrics, mounts, owners, states, wanted
from daemon.attachments import Attachment, attach_all, detach_all
from daemon.capture import Places
from daemon.catalogue import (
    CheckpointRow,
    SandboxRow,
    Template,
    drop_checkpoint,
    drop_sandbox,
    put_checkpoint,
    put_sandbox,
)
from daemon.engine import quantile
from daemon.flights import Flight, Services
from daemon.idranges import IdRanges
from daemon.keeper import Keeper
from daemon.network.networks import Networks
from daemon.owners import Making
from daemon.restoring import Restorer
from daemon.schedule import Stage
from daemon.store import Store
from daemon.storing import nearest, store
from daemon.turns import TurnLoop
from daemon.verify import Verifier
from daemon.why import explained
from sandbox import paths, treediff
from sandbox.container import Container
from sandbox.errors import Conflict, Invalid, NotFound, PagurusError
from sandbox.image import Image
from sandbox.messages import (
    Change,
    CheckpointInfo,
    CheckpointState,
    CreateRequest,
    ForkEntry,
    Network,
    NetworkStatus,
    RestoreRequest,
    RestoreResult,
    SandboxInfo,
    SandboxState,
    Statistics,
    Verdict,
)

log = logging.getLogger("pagurus.host")

FORKS_AT_ONCE = 4
FORKS_MOST = 1024


class Host:
    """The sandboxes of this host."""

    def __init__(self, services: Services, places: Places, images: Any, run_dir: Path) -> None:
        self.services = services
        self.places = places
        self.images = images
        self.run_dir = run_dir  # one directory for each sandbox below it
        self.loops: dict[str, TurnLoop] = {}
        self._ids = IdRanges()
        self._making = asyncio.Semaphore(FORKS_AT_ONCE)
        self.gateway: Any = None  # daemon.gateway.service.GatewayService, where the daemon has one
        self.making = Making(self.loops)
        self.keeper = Keeper(services, self.loops)
        self.verifier = Verifier(services, places, self.keeper)
        self.store = Store(self)
        services.settled = self._settled
        services.again = self._store_again
        services.lost = self.fall_back
        services.damaged = self._shun
        self.networks = Networks(run_dir.parent)
        self.attachments: list[Attachment] = [self.networks]
        self.restorer = Restorer(services, places, images, run_dir, self.attachments)

    def _settled(self, row: CheckpointRow, parent: CheckpointRow) -> None:
        self.keeper.changed(row.sandbox)
        self.verifier.later(row, parent)

    def fall_back(self, row: CheckpointRow) -> None:
        """A checkpoint is not whole: what stands on it stands on the nearest that is, and owes all that came since."""
        for loop in self.loops.values():
            if loop.row.head == row.id:
                loop.row.head = nearest(self.services.checkpoints, row.id)
                self.services.catalogue.later([put_sandbox(loop.row)])
                if loop.container is not None:
                    self.services.capturer.taint(loop.container, f"{row.id} is lost", files=True, processes=True)

    def _shun(self, row: CheckpointRow) -> None:
        """A checkpoint is damaged: whoever stands on content of it captures all anew with the next turn."""
        for loop in self.loops.values():
            head = self.services.checkpoints.get(loop.row.head)
            if head is None or loop.container is None:
                continue
            if head.id == row.id or {head.files, head.dump} & {row.files, row.dump} - {None}:
                self.services.capturer.taint(loop.container, f"{row.id} is damaged", files=True, processes=True)

    def store_later(self, row: CheckpointRow) -> None:
        """Make a captured checkpoint durable in the background, whether its sandbox is there or not."""
        flight = Flight(row, self.services.checkpoints.get(row.parent or "", row))
        flight.captured.set_result(None)
        self.services.flights[row.id] = flight
        self.services.spawn(self._store(flight), f"store {row.id}")

    async def _store(self, flight: Flight) -> None:
        if (loop := self.loops.get(flight.row.sandbox)) is not None:
            await loop.store(flight)
            return
        try:
            await store(self.services, flight)
        finally:
            flight.land()
            self.services.flights.pop(flight.row.id, None)

    def _store_again(self) -> None:
        """There may be room now for what could not be made durable."""
        for row in list(self.services.checkpoints.values()):
            if row.state is CheckpointState.CAPTURED and row.error and row.id not in self.services.flights:
                self.store_later(row)

    # ----------------------------------------------------------------- finding

    def loop(self, sandbox: str) -> TurnLoop:
        """The sandbox with this id or name."""
        found = owners.find(self.loops, sandbox)
        if found is None:
            raise NotFound(f"no such sandbox: {sandbox}", remedy="list those there are with `pagurus ls`")
        return found

    def sandboxes(self) -> list[SandboxInfo]:
        return [loop.row.info() for loop in self.loops.values() if owners.visible(loop.row.owner)]

    def checkpoint(self, checkpoint: str) -> CheckpointRow:
        row = self.services.checkpoints.get(checkpoint)
        if row is None or not owners.visible(row.owner):
            raise NotFound(f"no such checkpoint: {checkpoint}", remedy="list those there are with `pagurus tree`")
        return row

    def tree(self, sandbox: str) -> list[CheckpointInfo]:
        """All checkpoints of a sandbox and those that it descends from, oldest first."""
        rows = {row.id: row for row in self.services.checkpoints.values() if row.sandbox == self.loop(sandbox).row.id}
        pending = list(rows.values())
        while pending:
            parent = self.services.checkpoints.get(pending.pop().parent or "")
            if parent is not None and parent.id not in rows:
                rows[parent.id] = parent
                pending.append(parent)
        return [row.info() for row in sorted(rows.values(), key=lambda row: row.number)]

    async def wait_checkpoint(
        self, checkpoint: str, wait: Literal["captured", "durable"] | None, timeout: float
    ) -> CheckpointInfo:
        """The checkpoint, once it is captured or durable (or failed), or as it is after `timeout` seconds."""
        row = self.checkpoint(checkpoint)
        flight = self.services.flights.get(checkpoint)
        if wait is not None and flight is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await flight.settled(durable=wait == "durable")
        return row.info()

    def statistics(self) -> Statistics:
        tally, engine = self.services.tally, self.services.engine
        return Statistics(
            sandboxes=len(self.loops),
            turns=tally.turns,
            verdicts=dict(tally.verdicts),
            checkpoints=dict(tally.checkpoints),
            checkpoints_failed=tally.failed,
            in_flight=engine.running(Stage.DUMP, Stage.SNAPSHOT),
            queued=engine.queued(Stage.DUMP, Stage.SNAPSHOT),
            stored_bytes=tally.stored_bytes,
            full_bytes=tally.full_bytes,
            restores=tally.restores,
            inspector_tier=self.services.inspector.tier,
            stages=engine.statistics(),
            exposed_ms_p50=quantile(tally.exposed, 0.5),
            exposed_ms_p99=quantile(tally.exposed, 0.99),
            store={**self.keeper.statistics(), **self.verifier.statistics()},
        )

    # ----------------------------------------------------------------- making

    async def create(self, request: CreateRequest) -> SandboxInfo:
        """A new sandbox from an image, running. All or nothing."""
        image = await asyncio.to_thread(self.images.resolve, request.image)
        private = [self.run_dir.parent, self.places.stored.parent]
        template = wanted.template(request, image, await mounts.admitted(request.mounts, private))
        row = self._new_row(template, name=request.name)
        with self._made(row):
            root = self._root_checkpoint(row)
            row.head = row.origin = root.id
            await self._make(row, image.tree, root, root=True)
        self.services.checkpoints[root.id] = root
        return row.info()

    async def fork(self, checkpoint: str, count: int) -> list[ForkEntry]:
        """`count` new sandboxes that continue from a checkpoint. Each succeeds or fails alone."""
        if not 1 <= count <= FORKS_MOST:
            raise Invalid(f"count must lie between 1 and {FORKS_MOST}, not {count}")
        origin = await self.restorable(checkpoint)
        with self.keeper.pin(origin):
            return list(await asyncio.gather(*(self._fork_one(origin) for _ in range(count))))

    async def fork_sandbox(self, sandbox: str, count: int) -> list[ForkEntry]:
        """Fork the state as it is now."""
        flight = await self.loop(sandbox).checkpoint(None)
        return await self.fork(flight.row.id, count)

    async def _fork_one(self, origin: CheckpointRow) -> ForkEntry:
        try:
            row = self._forked(origin)
            with self._made(row):
                async with self._making:
                    await self._make(row, self.restorer.tree_below(row), origin)
        except Exception as error:  # whatever it is: the others succeed or fail alone
            if not isinstance(error, PagurusError | OSError):
                log.error("a fork of %s failed", origin.id, exc_info=error)
            return ForkEntry(error=str(error) or type(error).__name__)
        return ForkEntry(sandbox=row.info())

    def _forked(self, origin: CheckpointRow) -> SandboxRow:
        """The row of a sandbox that goes on from `origin`."""
        row = self._new_row(self.template(origin), owner=origin.owner)
        row.head, row.origin, row.ipc = origin.id, origin.id, origin.ipc
        row.programs = origin.programs
        return row

    async def _make(self, row: SandboxRow, image: Path, origin: CheckpointRow, *, root: bool = False) -> None:
        """Tree, container, inspector, processes, rows; undone in reverse when any of it fails.

        `root`: the origin is the sandbox's own and is written with it.
        """
        async with contextlib.AsyncExitStack() as undo:
            self.services.capturer.need()
            row.tree = f"{row.id}.0"
            undo.push_async_callback(self.restorer.drop_tree, row.tree)
            undo.push_async_callback(asyncio.to_thread, mounts.drop, row, self.places)
            await asyncio.to_thread(mounts.make, row, self.places)
            await asyncio.to_thread(self.services.capturer.writable, origin.files, row.tree)
            container = await Container.prepare(self.restorer.spec_over(row, image))
            undo.push_async_callback(container.destroy)
            self.services.inspector.watch(container.cgroup.id)  # before anything runs in it
            undo.callback(self.services.inspector.unwatch, container.cgroup.id)
            await attach_all(self.attachments, row, container)
            undo.push_async_callback(detach_all, self.attachments, row, container)
            await self.restorer.bring_back(container, origin, verify=False)
            await self.restorer.renew(row, container, origin)
            row.state = states.after(row.state, states.Event.START, sandbox=row.id)
            # Cancelled in the write, the rows may still be committed: they must not outlive what they tell of.
            rows, gone = [put_sandbox(row)], drop_sandbox(row.id)
            if root:
                rows, gone = [*rows, put_checkpoint(origin)], [*gone, drop_checkpoint(origin.id)]
            undo.callback(self.services.catalogue.later, gone)
            await self.services.catalogue.write(rows, durable=True)
            undo.pop_all()
        self._admit(row, container)
        log.info("created from %s", row.image, extra={"sandbox": row.id})

    def _new_row(self, template: SandboxRow | Template, *, name: str | None = None, owner: str = "") -> SandboxRow:
        number = secrets.token_hex(5)
        said = Template.of(template)
        return SandboxRow(
            id=f"s-{number}",
            state=SandboxState.CREATING,
            created_at=time.time(),
            name=name,
            owner=owner,
            uid_base=self._ids.take(),
            hostname=number,
            tree=None,
            head="",
            origin="",
            **{field: getattr(said, field) for field in said.__struct_fields__ if field != "layer"},
            layer=template.layer or paths.runtime_layer().name,
        )

    @contextlib.contextmanager
    def _made(self, row: SandboxRow) -> Iterator[None]:
        """`row` is made within: admitted first, its id range free again if it fails."""
        try:
            with self.making.admitted(row):
                yield
        except BaseException:  # also when cancelled: what failed keeps no range
            self._ids.release(row.uid_base)
            raise

    def _root_checkpoint(self, row: SandboxRow) -> CheckpointRow:
        """The state at creation: the empty upper and a new init. It has no content of its own."""
        root = self.services.new_checkpoint(row, Verdict.NONE)
        root.state, root.parent, root.label = CheckpointState.DURABLE, None, "created"
        root.started_at = root.captured_at = root.durable_at = root.created_at
        return root

    def image_below(self, checkpoint: CheckpointRow) -> Image:
        """The image that the files of a checkpoint lie upon. Reads the disk."""
        template = self.template(checkpoint)
        return (
            self.images.image(template.image_digest, template.image)
            if template.image_digest
            else self.images.resolve(template.image)
        )

    def images_used(self) -> dict[str, int]:
        """How many sandboxes and imported checkpoints stand on each image, by digest."""
        rows: list[SandboxRow | Template] = [loop.row for loop in self.loops.values()]
        rows += [row.template for row in self.services.checkpoints.values() if row.template is not None]
        return collections.Counter(row.image_digest for row in rows)

    def _admit(self, row: SandboxRow, container: Any) -> TurnLoop:
        loop = TurnLoop(row, container, self.services)
        self.loops[row.id] = loop
        self._ids.claim(row.uid_base)
        if container is not None:
            self._mourn(loop)
        return loop

    def admit(self, row: SandboxRow, container: Any) -> TurnLoop:
        """Take over a sandbox that exists already (recovery). `container` is None for a dead one."""
        return self._admit(row, container)

    def _mourn(self, loop: TurnLoop) -> None:
        self.services.spawn(self._await_death(loop, loop.container), f"death of {loop.row.id}")

    async def _await_death(self, loop: TurnLoop, container: Any) -> None:
        await container.wait_dead()
        if loop.container is container and loop.row.state is SandboxState.RUNNING and not container.alive:
            loop.step(states.Event.DIE)
            self.services.catalogue.later([put_sandbox(loop.row)])
            log.warning("died: pid 1 %s", container.fate(), extra={"sandbox": loop.row.id, "turn": loop.row.turn})

    # ----------------------------------------------------------------- going back

    async def restore(self, sandbox: str, request: RestoreRequest) -> RestoreResult:
        """Take a sandbox back to a checkpoint, in place. Whatever runs in it is killed first."""
        loop = self.loop(sandbox)
        began = time.monotonic()
        async with loop.exclusive:
            await loop.captured()
            target = await self.restorable(request.checkpoint or loop.row.head)
            loop.step(states.Event.RESTORE)
            try:
                with self.keeper.pin(target):
                    await self.services.catalogue.write([put_sandbox(loop.row)])
                    differences = await self.restorer.replace(loop, target, verify=request.verify)
            except BaseException as error:  # also when cancelled: whatever it was, nothing runs any more
                loop.step(states.Event.RESTORE_FAILED)
                self.services.catalogue.later([put_sandbox(loop.row)])
                if isinstance(error, PagurusError | OSError):
                    raise self.restorer.failure(error, loop.row, target) from error
                raise
            self._mourn(loop)
        self.services.tally.restores += 1
        total = 1000 * (time.monotonic() - began)
        metrics.restored(total / 1000)
        log.info("restored to %s in %.1f ms", target.id, total, extra={"sandbox": loop.row.id, "turn": target.turn})
        return RestoreResult(
            sandbox=loop.row.id,
            checkpoint=target.id,
            total_ms=total,
            verified=request.verify,
            differences=differences,
        )

    async def restorable(self, checkpoint: str) -> CheckpointRow:
        """The checkpoint, captured by now, or why it cannot be restored."""
        row = self.checkpoint(checkpoint)
        if (flight := self.services.flights.get(row.id)) is not None:
            await flight.settled(durable=False)
        if row.state in (CheckpointState.CAPTURED, CheckpointState.DURABLE) and not row.damaged:
            return row
        why = row.error or f"it is {row.state.value}"
        raise Conflict(f"checkpoint {row.id} cannot be restored: {why}", remedy="choose another with `pagurus tree`")

    def template(self, origin: CheckpointRow) -> SandboxRow | Template:
        """The sandbox whose settings a fork inherits: the checkpoint's own, or one that descends from it."""
        if origin.template is not None:
            return origin.template
        if (loop := self.loops.get(origin.sandbox)) is not None:
            return loop.row
        for loop in self.loops.values():
            if origin.id in (loop.row.head, loop.row.origin):
                return loop.row
        raise Conflict(f"the sandbox of checkpoint {origin.id} has been removed", remedy="fork a living one")

    # ----------------------------------------------------------------- network

    async def set_network(self, sandbox: str, network: Network) -> NetworkStatus:
        """Change what a sandbox may reach, whether it runs or not. A turn that is under way goes on."""
        loop = self.loop(sandbox)
        await self.networks.set(
            loop.row, loop.container, network, lambda: self.services.catalogue.write([put_sandbox(loop.row)])
        )
        log.info("network: %s", network.mode, extra={"sandbox": loop.row.id})
        return await self.networks.status(loop.row)

    # ----------------------------------------------------------------- comparing

    async def diff(self, sandbox: str, checkpoint: str, *, why: bool = False) -> list[Change]:
        """What differs in the file tree now from a checkpoint, and why: the last call known to have changed each."""
        changes = await self._changes(sandbox, checkpoint)
        if not why:
            return changes
        loop = self.loop(sandbox)
        turns = await self.services.catalogue.turns(loop.row.id)
        now = [] if loop.container is None else self.services.inspector.read(loop.container.cgroup.id).reasons
        return explained(changes, turns, now)

    async def _changes(self, sandbox: str, checkpoint: str) -> list[Change]:
        loop = self.loop(sandbox)
        target = await self.restorable(checkpoint)
        image = self.restorer.tree_below(loop.row)
        new = self.places.tree(loop.row.tree or "") / "upper"
        if target.files is not None:
            return await asyncio.to_thread(treediff.changes, self.places.snapshot(target.files) / "upper", new, image)
        empty = self.run_dir / "empty"
        empty.mkdir(parents=True, exist_ok=True)
        return await asyncio.to_thread(treediff.changes, empty, new, image)

    # ----------------------------------------------------------------- ending

    async def kill(self, sandbox: str) -> None:
        """Kill all processes of a sandbox. Its state so far is captured before."""
        loop = self.loop(sandbox)
        async with loop.using():
            await self.services.capturer.checkpointer.forget(loop.container)
            loop.step(states.Event.DIE)
            await loop.container.kill()
        self.services.catalogue.later([put_sandbox(loop.row)])

    async def remove(self, sandbox: str) -> None:
        """Remove a sandbox with its checkpoints, but for what forks of it still need."""
        loop = self.loop(sandbox)
        async with loop.exclusive:
            loop.step(states.Event.REMOVE)
            row = loop.row
            if loop.flight is not None:
                await loop.flight.settled(durable=False)
            await self.services.catalogue.write(drop_sandbox(row.id))
            self.loops.pop(row.id, None)
            if loop.container is not None:
                await self.services.capturer.checkpointer.forget(loop.container)
                self.services.inspector.unwatch(loop.container.cgroup.id)
                await detach_all(self.attachments, row, loop.container)
                await loop.container.destroy()
            if row.tree is not None:
                await self.restorer.drop_tree(row.tree)
            await asyncio.to_thread(mounts.drop, row, self.places)
            self._ids.release(row.uid_base)
            self.services.engine.forgive(row.id)
        log.info("removed", extra={"sandbox": row.id})
        self.services.spawn(self.keeper.collect(row.id), f"collection of {row.id}")

    async def settle(self, timeout: float) -> bool:
        """Wait until removals and checkpoints in the background have ended. False after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while busy := [
                    task
                    for task in self.services.tasks
                    if not task.get_name().startswith(("death", "keeper", "warden"))
                ]:
                    await asyncio.wait(busy)
        except TimeoutError:
            return False
        return True
