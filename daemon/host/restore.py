"""Taking a sandbox to the state of a checkpoint: its files, its container, its processes.

::

    kill ▸ writable snapshot of the files ▸ mount ▸ attach ▸ processes (compared if requested) ▸ mark ▸ run ▸ hooks
         ▸ publish

Guarantee: after a failed `replace` nothing of the container is trusted or left, and the former tree is the sandbox's
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daemon import states
from daemon.auth.budget import bounded
from daemon.catalogue import CheckpointRow, SandboxRow, put_sandbox
from daemon.checkpoints.capture import Places
from daemon.checkpoints.inflight import Services
from daemon.checkpoints.unpacked import UnpackedImages
from daemon.host import mounts
from daemon.host.attachments import Attachment, attach_all, detach_all
from daemon.turns.turns import LiveSandbox
from sandbox.container import services, users
from sandbox.container.container import Container, ContainerSpec
from sandbox.container.identity import name_host, name_services, run_fork_hooks
from sandbox.container.shim import ShimGone
from sandbox.container.trust import trust
from sandbox.errors import ImageNotFound, NotEqual, PagurusError, RestoreFailed
from sandbox.tree import btrfs, facts, files
from sandbox.tree.safe_path import SandboxRoot

if TYPE_CHECKING:
    from sandbox.image.store import ImageStore

log = logging.getLogger("pagurus.host")


class Restorer:
    """See the module. `attachments` is the host's own list: what is fastened to every sandbox."""

    def __init__(
        self,
        services: Services,
        places: Places,
        images: ImageStore,
        run_dir: Path,
        attachments: list[Attachment],
    ) -> None:
        self.services = services
        self.unpacked = UnpackedImages(services.capturer)
        self.places = places
        self.images = images
        self.run_dir = run_dir
        self.attachments = attachments

    # ----------------------------------------------------------------- what a container is made of

    def spec_over(self, row: SandboxRow, image: Path) -> ContainerSpec:
        return ContainerSpec(
            id=row.id,
            image=image,
            tree=self.places.tree(row.tree or ""),
            uid_base=row.uid_base,
            hostname=row.hostname,
            limits=bounded(row.limits),
            run_dir=self.run_dir / row.id,
            binds=mounts.binds(row, self.places),
            layer=row.layer,
            no_new_privs=row.no_new_privs,
            workdir=row.workdir,
            login=row.login,
            composition=row.composition,
        )

    def tree_below(self, row: SandboxRow) -> Path:
        """The image tree that a sandbox uses, whatever its name means by now."""
        return self.images.tree(row.image_digest) if row.image_digest else self.images.path(row.image)

    def spec(self, row: SandboxRow) -> ContainerSpec:
        """What the container of an existing sandbox is made of."""
        try:
            return self.spec_over(row, self.tree_below(row))
        except ImageNotFound as error:  # one that runs continues; a dead one says so when it is restored
            log.error("its image is gone: %s", error, extra={"sandbox": row.id})
            return self.spec_over(row, self.images.trees / (row.image_digest or "gone") / "tree")

    async def capacity(
        self, row: SandboxRow, image: Path, files: str | None, undo: contextlib.AsyncExitStack
    ) -> Container:
        """All of a new sandbox but its processes: tree, container, inspector, attachments. `undo` takes it away."""
        self.services.capturer.need()
        row.tree = f"{row.id}.{secrets.token_hex(3)}"
        undo.push_async_callback(self.drop_tree, row.tree)
        undo.push_async_callback(asyncio.to_thread, mounts.drop, row, self.places)
        container = await Container.begin(self.spec_over(row, image))
        undo.push_async_callback(container.destroy)
        self.services.inspector.watch(container.cgroup.id)  # before anything runs in it
        undo.callback(self.services.inspector.unwatch, container.cgroup.id)
        undo.push_async_callback(detach_all, self.attachments, row, container)
        await _together(self._furnish(row, container, files), attach_all(self.attachments, row, container))
        return container

    async def _furnish(self, row: SandboxRow, container: Container, files: str | None) -> None:
        await asyncio.to_thread(mounts.make, row, self.places)
        await asyncio.to_thread(self.services.capturer.writable, files, container.tree.name)
        await container.furnish()

    # ----------------------------------------------------------------- one state for another

    async def replace(self, live: LiveSandbox, target: CheckpointRow, *, verify: bool) -> list[str]:
        """Kill, change the tree, bring the processes back, publish."""
        row, old_tree, old_container = live.row, live.row.tree, live.container_or_none
        new_tree = f"{row.id}.{secrets.token_hex(3)}"
        if old_container is not None:
            await self.services.capturer.checkpointer.forget(old_container, restoring=True)
            await old_container.kill()
        self.services.addresses.forget(row.id)
        try:
            await asyncio.to_thread(self.services.capturer.writable, target.files, new_tree)
            row.tree = new_tree
            row.composition = target.composed(row.composition)
            await self._mount(live)
            await attach_all(self.attachments, row, live.container)
            differences = await self.bring_back(live.container, target, verify=verify)
            await self.renew(row, live.container, target)
            row.head, row.ipc = target.id, target.ipc
            row.programs = target.programs
            live.programs.forget()
            live.step(states.Event.RESTORED)
            await self.services.catalogue.write([put_sandbox(row)])
        except BaseException:  # failed or cancelled half-way
            row.tree = old_tree
            await asyncio.shield(self._abandon(live))
            await asyncio.shield(self.drop_tree(new_tree))
            raise
        if old_tree is not None:
            await self.drop_tree(old_tree)
        return differences

    async def _mount(self, live: LiveSandbox) -> None:
        """Mount the tree in the killed container, or make another one: there is none, or it has lost its shim."""
        row = live.row
        if live.container_or_none is not None:
            try:
                if live.container.spec.composition != row.composition:
                    await live.container.change_services(row.composition)
                await live.container.remount(self.places.tree(row.tree or ""))
                return
            except ShimGone:  # the mounts and namespaces went with it
                await self._abandon(live)
        await asyncio.to_thread(mounts.make, row, self.places)
        live.container_or_none = await Container.prepare(self.spec_over(row, self.tree_below(row)))
        self.services.inspector.watch(live.container.cgroup.id)

    async def _abandon(self, live: LiveSandbox) -> None:
        """Nothing of the container is trusted any more: a restore failed half-way, or its shim is gone."""
        container, live.container_or_none = live.container_or_none, None
        if container is not None:
            await self.services.capturer.checkpointer.forget(container)
            self.services.inspector.unwatch(container.cgroup.id)
            await detach_all(self.attachments, live.row, container)
            await container.destroy()

    async def bring_back(
        self,
        container: Container,
        target: CheckpointRow,
        *,
        verify: bool,
        hold: Callable[[], None] | None = None,
    ) -> list[str]:
        """The processes of a checkpoint in a container that is mounted over its files, marked. Raises NotEqual.

        The mark comes before their first instruction: what they do from then on belongs to the next turn. With `hold`
        they stay frozen before it, and the caller thaws them: that is called right before they are frozen.
        """
        reference = None if target.files is None else self.places.snapshot(target.files)
        if target.dump is None:
            if verify and reference is not None:
                await asyncio.to_thread(_need_equal_trees, reference, container.tree)
            await container.start()
            if hold is not None:
                hold()
                container.cgroup.freeze()
            await asyncio.to_thread(self._mark, container, fresh=target.files is None)
            return []
        async with self.services.capturer.reading(target.dump) as images:
            restored = self.services.capturer.checkpointer.restored
            async with restored(container, images, verify=verify, reference=reference, hold=hold) as report:
                await asyncio.to_thread(self._mark, container, fresh=target.files is None)
        return list(report.differences)

    def _mark(self, container: Container, *, fresh: bool) -> None:
        """Names, trust and directories of what has not run yet. What it does from then on belongs to its next turn."""
        spec = container.spec
        self.services.addresses.announce(container)
        if fresh and spec.login:
            users.add_login(container.roots[0], spec.uid_base)
        try:
            name_host(container, fresh=fresh)
            if spec.composition is not None:
                name_services(container, spec.composition, fresh=fresh)
        except (PagurusError, OSError) as error:  # no regular file, or no room: the sandbox has made it so
            log.info("its host name does not resolve: %s", error, extra={"sandbox": spec.id})
        try:
            if container.authority:
                trust(container, container.authority)
        except (PagurusError, OSError) as error:  # likewise
            log.info("it does not trust the host: %s", error, extra={"sandbox": spec.id})
        for root, workdir in _workdirs(container) if fresh else ():
            with contextlib.suppress(PagurusError):  # a file lies there: each command is told so
                files.make_directory(root, spec.uid_base, workdir)
        self.services.inspector.mark(container.cgroup.id, files=True, processes=True)

    async def renew(self, row: SandboxRow, container: Container, origin: CheckpointRow) -> None:
        """State that another sandbox lives on with: let the hooks of a fork run. What they do counts as a change."""
        if origin.sandbox != row.id:
            await run_fork_hooks(container, checkpoint=origin.id)

    def files_of(self, target: CheckpointRow) -> Path:
        """The files of a checkpoint, but for those of the image."""
        if target.files is not None:
            return self.places.snapshot(target.files) / "upper"
        (empty := self.run_dir / "empty").mkdir(parents=True, exist_ok=True)
        return empty

    @contextlib.asynccontextmanager
    async def uppers(self, row: SandboxRow, target: CheckpointRow) -> AsyncIterator[tuple[Path, Path]]:
        """The files of a checkpoint, and a snapshot of those of a sandbox: its live tree is never walked."""
        old = self.files_of(target)
        now = self.places.tree(f"diff-{secrets.token_hex(6)}")  # a crash leaves it to the next start
        await asyncio.to_thread(btrfs.snapshot, self.places.tree(row.tree or ""), now, readonly=True)
        try:
            yield old, now / "upper"
        finally:
            await asyncio.shield(asyncio.to_thread(btrfs.delete_subvolume, now))

    async def drop_tree(self, tree: str) -> None:
        path = self.places.tree(tree)
        if path.exists():
            await asyncio.to_thread(self.services.capturer.remove_tree, path)

    def failure(self, error: PagurusError | OSError, row: SandboxRow, target: CheckpointRow) -> PagurusError:
        """Why the sandbox is dead now, and what to do."""
        kind = type(error) if isinstance(error, RestoreFailed | NotEqual) else RestoreFailed
        return kind(
            f"restore to {target.id} failed: {getattr(error, 'message', error)}",
            hint="the checkpoint is whole: try again; if it fails alike, restore an earlier one",
            sandbox=row.id,
            turn=row.turn,
        )

    async def replace_unequal(self, live: LiveSandbox, target: CheckpointRow, error: NotEqual) -> PagurusError:
        """Restore without a comparison what has just failed it, so that the sandbox lives; returns what to raise."""
        live.step(states.Event.RESTORE)
        try:
            await self.replace(live, target, verify=False)
        except BaseException as second:
            live.step(states.Event.RESTORE_FAILED)
            self.services.catalogue.later([put_sandbox(live.row)])
            if not isinstance(second, PagurusError | OSError):
                raise
            return self.failure(second, live.row, target)
        return NotEqual(
            f"restored to {target.id}, but {error.message}",
            hint="the sandbox runs in this state; if what differs matters, restore another checkpoint",
            sandbox=live.row.id,
            turn=live.row.turn,
        )


def _workdirs(container: Container) -> Iterator[tuple[SandboxRoot, str]]:
    """Where commands begin that say nothing else, in each root; none where that is the root itself."""
    composition = container.spec.composition
    if (composition is None or not composition.main) and container.spec.workdir != "/":
        yield container.inside, container.spec.workdir
    if composition is None:
        return
    for name, service in composition.services.items():
        if service.workdir not in (None, "/"):
            yield container.inside.below(services.root(name)), service.workdir


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    """Do these at a time. When one fails, the others are cancelled and have ended before its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _need_equal_trees(reference: Path, tree: Path) -> None:
    result = facts.tree_differences(reference / "upper", tree / "upper")
    if result:
        raise NotEqual(
            f"the restored files differ in {len(result)} points: {'; '.join(result[:10])}",
            hint="restore again, or an older checkpoint",
        )
