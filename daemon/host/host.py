"""Authority over all sandboxes of one host: create, find, restore, fork, compare, remove.

Guarantee: an act either succeeds or leaves nothing behind but an error that names the sandbox and
the hint. A sandbox is published only when it runs, so what a crash leaves half made has no row
and is collected. A failed restore leaves the sandbox dead, its checkpoints whole, and may be tried
again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from daemon import metrics, states
from daemon.auth import visibility
from daemon.auth.owner_slots import OwnerSlots
from daemon.auth.visibility import Making
from daemon.catalogue import (
    CheckpointRow,
    SandboxRow,
    Template,
    drop_checkpoint,
    drop_sandbox,
    put_checkpoint,
    put_sandbox,
)
from daemon.checkpoints.capture import Places
from daemon.checkpoints.inflight import Services
from daemon.checkpoints.lifecycle import CheckpointEvent, after
from daemon.checkpoints.queue import quantile
from daemon.checkpoints.schedule import CheckpointStage
from daemon.host import compositions, create, mounts
from daemon.host.attachments import Attachment, detach_all
from daemon.host.fence import HostFence
from daemon.host.outcomes import Outcomes
from daemon.host.prove import CheckpointProver
from daemon.host.restore import Restorer
from daemon.host.runs import Runs
from daemon.host.uid_ranges import IdRanges
from daemon.network.networks import Networks
from daemon.store.gc import GarbageCollector
from daemon.store.library import CheckpointLibrary
from daemon.store.verify import Verifier
from daemon.turns.turns import LiveSandbox
from sandbox import paths
from sandbox.container.container import Container
from sandbox.errors import Conflict, Invalid, NotEqual, NotFound, PagurusError
from sandbox.image import composed
from sandbox.image.store import StoredImage
from sandbox.messages import (
    CheckpointInfo,
    CheckpointState,
    Composition,
    CreateRequest,
    ForkEntry,
    ForkRequest,
    Network,
    NetworkStatus,
    RestoreRequest,
    RestoreResult,
    SandboxInfo,
    SandboxState,
    Statistics,
    Verdict,
)
from sandbox.messages.runs import RUN_LABEL

if TYPE_CHECKING:
    from daemon.credentials.service import Credentials
    from daemon.gateway.service import GatewayService
    from daemon.host.arrive import Arrivals
    from sandbox.image.store import ImageStore

log = logging.getLogger("pagurus.host")

FORKS_AT_ONCE = 4


class Host:
    """The sandboxes of this host."""

    def __init__(self, services: Services, places: Places, images: ImageStore, run_dir: Path) -> None:
        self.services = services
        self.places = places
        self.images = images
        self.run_dir = run_dir  # one directory for each sandbox below it
        self.live_sandboxes: dict[str, LiveSandbox] = {}
        self._ids = IdRanges()
        self._forking = OwnerSlots(FORKS_AT_ONCE + 1, reserved=1)
        self.gateway: GatewayService | None = None  # where the daemon has one
        self.arrivals: Arrivals  # set at the start
        self.credentials: Credentials  # likewise
        self.runs = Runs(places.stored.parent / "runs.json")
        self.making = Making(self.live_sandboxes, self.runs.need_open)
        self.collector = GarbageCollector(services, self.live_sandboxes)
        self.verifier = Verifier(services, places, self.collector)
        self.store = CheckpointLibrary(self)
        self.prover = CheckpointProver(self)
        services.outcomes = Outcomes(services, self.live_sandboxes, self.collector, self.verifier)
        self.networks = Networks(run_dir.parent)
        self.attachments: list[Attachment] = [self.networks, services.addresses]
        self.fence = HostFence(run_dir.parent)
        self.restorer = Restorer(services, places, images, run_dir, self.attachments)

    # ----------------------------------------------------------------- finding

    def live(self, sandbox: str) -> LiveSandbox:
        """The sandbox with this id or name."""
        result = visibility.find(self.live_sandboxes, sandbox)
        if result is None:
            raise NotFound(f"no such sandbox: {sandbox}", hint="list those there are with `pagurus ls`")
        return result

    def sandboxes(self) -> list[SandboxInfo]:
        return [live.row.info() for live in self.live_sandboxes.values() if visibility.visible(live.row.owner)]

    def checkpoint(self, checkpoint: str, *, sandbox: str | None = None) -> CheckpointRow:
        """The checkpoint of this id, whose id begins so, or that has this label: of `sandbox`'s first, then of all."""
        row = self.services.checkpoints.get(checkpoint)
        if row is not None and visibility.visible(row.owner):
            return row
        own = [] if sandbox is None else self._tree(sandbox)
        result = visibility.find_checkpoint(own, checkpoint, anyones=True)
        result = result or visibility.find_checkpoint(self.services.checkpoints.values(), checkpoint)
        if result is None:
            raise NotFound(f"no such checkpoint: {checkpoint}", hint="list those there are with `pagurus tree`")
        return result

    def tree(self, sandbox: str) -> list[CheckpointInfo]:
        """All checkpoints of a sandbox and those that it descends from, oldest first."""
        return [row.info() for row in self._tree(sandbox)]

    def _tree(self, sandbox: str) -> list[CheckpointRow]:
        rows = {row.id: row for row in self.services.checkpoints.values() if row.sandbox == self.live(sandbox).row.id}
        pending = list(rows.values())
        while pending:
            parent = self.services.checkpoints.get(pending.pop().parent or "")
            if parent is not None and parent.id not in rows:
                rows[parent.id] = parent
                pending.append(parent)
        return sorted(rows.values(), key=lambda row: row.number)

    async def wait_checkpoint(
        self, checkpoint: str, wait: Literal["captured", "durable"] | None, timeout: float
    ) -> CheckpointInfo:
        """The checkpoint, once it is captured or durable (or failed), or as it is after `timeout` seconds."""
        row = self.checkpoint(checkpoint)
        inflight = self.services.inflights.get(row.id)
        if wait is not None and inflight is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await inflight.finalized(durable=wait == "durable")
        return row.info()

    def statistics(self) -> Statistics:
        queue, exposed = self.services.queue, self.services.exposed
        return msgspec.structs.replace(
            self.services.tally,
            sandboxes=len(self.live_sandboxes),
            in_flight=queue.running(CheckpointStage.DUMP, CheckpointStage.SNAPSHOT),
            queued=queue.queued(CheckpointStage.DUMP, CheckpointStage.SNAPSHOT),
            stages=queue.statistics(),
            exposed_ms_p50=quantile(exposed, 0.5),
            exposed_ms_p99=quantile(exposed, 0.99),
            store={**self.collector.statistics(), **self.verifier.statistics()},
        )

    # ----------------------------------------------------------------- making

    @property
    def private(self) -> list[Path]:
        """Directories that no sandbox may see."""
        return [self.run_dir.parent, self.places.stored.parent]

    async def create(self, request: CreateRequest, *, login: bool = False) -> SandboxInfo:
        """A new sandbox from an image, running. All or nothing. `login`: with a user who has a home (see Template)."""
        if request.replicated_answers and not self.fence.leased:
            raise Invalid("this host is alone: no other one could hold a copy", hint="add it to a cluster")
        create.need_sense(request, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        if request.composition is not None:
            request = await asyncio.to_thread(self._composed, request, request.composition)
        image = await asyncio.to_thread(self.images.resolve, request.image)
        template = create.template(request, image, await mounts.admitted(request.mounts, self.private), login=login)
        self.credentials.need(template.network, visibility.caller_owner())
        row = self._new_row(template, name=request.name)
        with self.made(row):
            root = self._root_checkpoint(row)
            row.head = row.origin = root.id
            await self.make(row, image.tree, root, root=True)
        self.services.checkpoints[root.id] = root
        return row.info()

    def _composed(self, request: CreateRequest, composition: Composition) -> CreateRequest:
        """The request for a sandbox of services, with the image that holds theirs, which is made when it is missing."""
        compositions.need(composition)
        bases = composed.images(self.images, composition)
        made = compositions.filled(composition, bases)
        made = composed.resolved(made, bases)
        name = composed.image(self.images, made, bases, self.images_used)
        mounts = [*request.mounts, *compositions.mounts(made)]
        return msgspec.structs.replace(request, image=name, composition=made, mounts=mounts)

    async def fork(self, checkpoint: str, request: ForkRequest) -> list[ForkEntry]:
        """New sandboxes that continue from a checkpoint. Each succeeds or fails alone."""
        request.need_count()
        create.need_labels(request.labels or {})
        origin = await self.restorable(checkpoint)
        with self.collector.pin(origin):
            await self.restorer.unpacked.provide(origin)
            reading = self.services.capturer.reading(origin.dump) if origin.dump else contextlib.nullcontext()
            async with reading:
                return list(await asyncio.gather(*(self._fork_one(origin, request) for _ in range(request.count))))

    async def fork_sandbox(self, sandbox: str, request: ForkRequest) -> list[ForkEntry]:
        """Fork the state as it is now."""
        return await self.fork((await self.live(sandbox).checkpoint(None)).row.id, request)

    async def _fork_one(self, origin: CheckpointRow, request: ForkRequest) -> ForkEntry:
        try:
            row = self.branch(origin, request)
            with self.made(row):
                async with contextlib.AsyncExitStack() as place:
                    await place.enter_async_context(self._forking.slot(row.owner))
                    await self.make(row, self.restorer.tree_below(row), origin, verify=request.verify, place=place)
        except Exception as error:  # whatever it is: the others succeed or fail alone
            if not isinstance(error, PagurusError | OSError):
                log.error("a fork of %s failed", origin.id, exc_info=error)
            reported = error if isinstance(error, PagurusError) else PagurusError(str(error) or type(error).__name__)
            return ForkEntry(error=reported.body())
        return ForkEntry(sandbox=row.info())

    def branch(self, origin: CheckpointRow, request: ForkRequest) -> SandboxRow:
        """The row of a fork. Its labels are those of the request, else its origin's."""
        row = self.forked(origin)
        if request.labels is not None:
            row.labels = dict(request.labels)
        elif origin.sandbox not in self.live_sandboxes:  # a checkpoint outlives the run that made it
            row.labels = {name: value for name, value in row.labels.items() if name != RUN_LABEL}
        return row

    def forked(self, origin: CheckpointRow) -> SandboxRow:
        """The row of a sandbox that continues from `origin`."""
        row = self._new_row(self.template(origin), owner=origin.owner)
        row.head, row.origin, row.ipc = origin.id, origin.id, origin.ipc
        row.inherited = origin.files_bytes
        row.programs = origin.programs
        return row

    async def make(
        self,
        row: SandboxRow,
        image: Path,
        origin: CheckpointRow,
        *,
        root: bool = False,
        verify: bool = False,
        place: contextlib.AsyncExitStack | None = None,
    ) -> None:
        """Tree, container, inspector, processes, rows; undone in reverse when any of it fails.

        `root`: the origin is the sandbox's own and is written with it. `place`: among those that are made at a time,
        left before the sandbox's own programs run: these take as long as they like.
        """
        async with contextlib.AsyncExitStack() as undo:
            container = await self.restorer.capacity(row, image, origin.files, undo)
            await self.restorer.bring_back(container, origin, verify=verify)
            if place is not None:
                await place.aclose()
            await self.restorer.renew(row, container, origin)
            row.state = states.after(row.state, states.Event.START, sandbox=row.id)
            # Cancelled in the write, the rows may still be committed: they must not outlive what they describe.
            rows, gone = [put_sandbox(row)], drop_sandbox(row.id)
            if root:
                rows, gone = [*rows, put_checkpoint(origin)], [*gone, drop_checkpoint(origin.id)]
            undo.callback(self.services.catalogue.later, gone)
            await self.services.catalogue.write(rows, durable=True)
            undo.pop_all()
        self.admit(row, container)
        log.info("created from %s", row.image, extra={"sandbox": row.id})

    def _new_row(self, template: Template, *, name: str | None = None, owner: str = "") -> SandboxRow:
        number = secrets.token_hex(5)
        row = SandboxRow(
            **template.inherited_by_forks(),
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
        )
        row.layer = row.layer or paths.runtime_layer().name
        return row

    @contextlib.contextmanager
    def made(self, row: SandboxRow) -> Iterator[None]:
        """`row` is made within: admitted first, its id range free again if it fails."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.give_up, row)
            with self.making.admitted(row):
                yield
            undo.pop_all()

    def _root_checkpoint(self, row: SandboxRow) -> CheckpointRow:
        """The state at creation: the empty upper and a new init. It has no content of its own."""
        root = self.services.new_checkpoint(row, Verdict.NONE)
        root.state = after(after(root.state, CheckpointEvent.CAPTURE), CheckpointEvent.STORE)
        root.parent, root.label = None, "created"
        root.started_at = root.captured_at = root.durable_at = root.created_at
        return root

    async def admitted(self, settings: Mapping[str, Any], image: StoredImage, *, host_mounts: bool) -> Template:
        """The settings of a checkpoint from elsewhere, by the rules of new sandboxes. Raises when these refuse it."""
        made = create.imported(settings, image, host_mounts=host_mounts)
        made.mounts = await mounts.admitted(made.mounts, self.private)
        return made

    def image_below(self, checkpoint: CheckpointRow) -> StoredImage:
        """The image that the files of a checkpoint lie upon. Reads the disk."""
        template = self.template(checkpoint)
        if template.image_digest:
            return self.images.image(template.image_digest, template.image)
        return self.images.resolve(template.image)

    def images_used(self) -> dict[str, int]:
        """How many sandboxes and imported checkpoints use each image, by digest; those that are being made too.
        From any thread."""
        rows: list[Template] = [*self.making.rows(), *(live.row for live in list(self.live_sandboxes.values()))]
        rows += [row.template for row in list(self.services.checkpoints.values()) if row.template is not None]
        return collections.Counter([*self.store.coming, *(row.image_digest for row in rows)])

    def admit(self, row: SandboxRow, container: Container | None) -> LiveSandbox:
        """Take over a sandbox that exists. `container` is None for a dead one."""
        return self.publish(LiveSandbox(row, container, self.services))

    def publish(self, live: LiveSandbox) -> LiveSandbox:
        """It is one of this host's from now on."""
        self.live_sandboxes[live.row.id] = live
        self._ids.claim(live.row.uid_base)
        if live.container_or_none is not None:
            self._note_death(live)
        return live

    def give_up(self, row: SandboxRow) -> None:
        """A sandbox is not made after all: its ids are free again."""
        self._ids.release(row.uid_base)

    def _note_death(self, live: LiveSandbox) -> None:
        live.composed.watch()
        self.services.spawn(self._await_death(live, live.container), f"death of {live.row.id}", lasting=True)

    async def _await_death(self, live: LiveSandbox, container: Container) -> None:
        await container.wait_lost()
        if live.container_or_none is not container or container.alive:
            return
        if live.row.state is SandboxState.RUNNING:
            live.step(states.Event.DIE)
            self.services.catalogue.later([put_sandbox(live.row)])
            log.warning("died: %s", container.fate(), extra={"sandbox": live.row.id, "turn": live.row.turn})
        if live.row.state is SandboxState.DEAD:
            container.inject()  # where the shim alone has ended, the rest continues

    # ----------------------------------------------------------------- going back

    async def restore(self, sandbox: str, request: RestoreRequest) -> RestoreResult:
        """Take a sandbox back to a checkpoint, in place. Whatever runs in it is killed first."""
        live = self.live(sandbox)
        began = time.monotonic()
        async with live.exclusive:
            await live.captures.finalized()
            target = await self.restorable(request.checkpoint or live.row.head, sandbox=live.row.id)
            live.step(states.Event.RESTORE)
            try:
                with self.collector.pin(target):
                    await self.services.catalogue.write([put_sandbox(live.row)])
                    differences = await self.restorer.replace(live, target, verify=request.verify)
            except BaseException as error:  # also when cancelled: whatever it was, nothing runs any more
                live.step(states.Event.RESTORE_FAILED)
                self.services.catalogue.later([put_sandbox(live.row)])
                if isinstance(error, NotEqual):
                    with self.collector.pin(target):
                        error = await self.restorer.replace_unequal(live, target, error)
                    if live.container_or_none is not None:
                        self._note_death(live)
                    raise error
                if isinstance(error, PagurusError | OSError):
                    raise self.restorer.failure(error, live.row, target) from error
                raise
            self._note_death(live)
        self.services.tally.restores += 1
        total = 1000 * (time.monotonic() - began)
        metrics.restores.observe(total / 1000)
        log.info("restored to %s in %.1f ms", target.id, total, extra={"sandbox": live.row.id, "turn": target.turn})
        return RestoreResult(
            sandbox=live.row.id,
            checkpoint=target.id,
            total_ms=total,
            verified=request.verify,
            differences=differences,
        )

    async def restorable(self, checkpoint: str, *, sandbox: str | None = None) -> CheckpointRow:
        """The checkpoint, captured by now, or why it cannot be restored."""
        row = self.checkpoint(checkpoint, sandbox=sandbox)
        if (inflight := self.services.inflights.get(row.id)) is not None:
            await inflight.finalized(durable=False)
        if row.state in (CheckpointState.CAPTURED, CheckpointState.DURABLE) and not row.damaged:
            return row
        why = row.error or f"it is {row.state.value}"
        raise Conflict(f"checkpoint {row.id} cannot be restored: {why}", hint="choose another with `pagurus tree`")

    def template(self, origin: CheckpointRow) -> Template:
        """The settings that a fork inherits: of the checkpoint's sandbox, or of one that descends from it."""
        template = self._template(origin)
        return msgspec.structs.replace(template, composition=origin.composed(template.composition))

    def _template(self, origin: CheckpointRow) -> Template:
        if origin.template is not None:
            return origin.template
        if (live := self.live_sandboxes.get(origin.sandbox)) is not None:
            return live.row
        for live in self.live_sandboxes.values():
            if origin.id in (live.row.head, live.row.origin):
                return live.row
        raise Conflict(f"the sandbox of checkpoint {origin.id} has been removed", hint="fork a living one")

    # ----------------------------------------------------------------- network

    async def set_network(self, sandbox: str, network: Network) -> NetworkStatus:
        """Change what a sandbox may reach, whether it runs or not. A turn under way continues."""
        live = self.live(sandbox)
        self.credentials.need(network, live.row.owner)
        await self.networks.set(
            live.row, live.container_or_none, network, lambda: self.services.catalogue.write([put_sandbox(live.row)])
        )
        await self.credentials.changed(live)
        log.info("network: %s", network.mode, extra={"sandbox": live.row.id})
        return await self.networks.status(live.row)

    # ----------------------------------------------------------------- ending

    async def kill(self, sandbox: str) -> None:
        """Kill all processes of a sandbox. Its state so far is captured before."""
        live = self.live(sandbox)
        async with live.using():
            await self.services.capturer.checkpointer.forget(live.container)
            live.step(states.Event.DIE)
            await live.container.kill()
        self.services.addresses.forget(live.row.id)
        self.services.catalogue.later([put_sandbox(live.row)])

    async def remove(self, sandbox: str) -> None:
        """Remove a sandbox with its checkpoints, but for what forks of it still need."""
        live = self.live(sandbox)
        async with live.exclusive:
            live.step(states.Event.REMOVE)
            row = live.row
            live.captures.leave()
            if (inflight := live.captures.inflight) is not None:
                await inflight.finalized(durable=False)
            await self.services.catalogue.write(drop_sandbox(row.id))
            self.live_sandboxes.pop(row.id, None)
            if live.container_or_none is not None:
                await self.services.capturer.checkpointer.forget(live.container)
                self.services.inspector.unwatch(live.container.cgroup.id)
                await detach_all(self.attachments, row, live.container)
                await live.container.destroy()
            if row.tree is not None:
                await self.restorer.drop_tree(row.tree)
            await asyncio.to_thread(mounts.drop, row, self.places)
            self._ids.release(row.uid_base)
            self.services.queue.forget(row.id)
        log.info("removed", extra={"sandbox": row.id})
        self.services.spawn(self.collector.collect(row.id), f"collection of {row.id}")

    async def finalize(self, timeout: float) -> bool:
        """Wait until removals and checkpoints in the background have ended. False after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while busy := set(self.services.tasks):
                    await asyncio.wait(busy)
        except TimeoutError:
            return False
        return True
