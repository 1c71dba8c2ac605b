"""Acts on checkpoints that lie in the store: list, label, remove, verify, export, import, pull.

Guarantee: what an act reads stays while it reads; an import is visible when it is durable and complete, and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from daemon.catalogue import CheckpointRow, Template, programs_from, put_checkpoint
from daemon.checkpoints.capture import failure
from daemon.checkpoints.persist import store_alone
from daemon.store import exports
from daemon.store.holder import StoreHost
from daemon.store.imports import Importer
from sandbox import paths
from sandbox.content import dumpfile
from sandbox.content.dumpfile import PageLists
from sandbox.content.pages import PageStore
from sandbox.content.renewed import Former
from sandbox.content.transfer import Have, TransferHeader, read_have, write_have
from sandbox.errors import Conflict, Invalid, NotFound, PagurusError
from sandbox.image import composed, sources
from sandbox.messages import CheckpointInfo, CheckpointState, Composition, ImageConfig
from sandbox.messages.store import CheckpointReport, ImportResult, PullRequest

log = logging.getLogger("pagurus.store")

STREAMS = 2  # exports and imports at a time
MAX_ANCESTORS = 1000
T = TypeVar("T")
_THREADS = ThreadPoolExecutor(2 * STREAMS, "stream")
GATHER = 1 << 20  # bytes given to a worker thread at a time


class CheckpointLibrary:
    """The checkpoints of a host as content."""

    def __init__(self, host: StoreHost) -> None:
        self._host = host
        self._streams = asyncio.Semaphore(STREAMS)
        self._arriving: set[str] = set()
        self.coming: list[str] = []  # digests of the images of what is being imported
        self._remembered: tuple[str, exports.Base] | None = None  # what the next export builds upon

    # ----------------------------------------------------------------- small acts

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints of the host, oldest first."""
        return [row.info() for row in sorted(self._host.services.checkpoints.values(), key=lambda row: row.number)]

    async def label(self, checkpoint: str, label: str | None) -> CheckpointInfo:
        row = self._host.checkpoint(checkpoint)
        await self._host.collector.label(row, label)
        return row.info()

    async def remove(self, checkpoint: str) -> None:
        await self._host.collector.remove(self._host.checkpoint(checkpoint))

    async def collect(self) -> None:
        """Apply every policy and free what nothing refers to, now."""
        for name in self._host.live_sandboxes:
            self._host.collector.changed(name)
        await self._host.collector.thin()
        await self._host.collector.collect_pages()
        await asyncio.to_thread(self._host.images.collect, self._host.images_used)

    async def verify(self, checkpoints: list[str], *, restore: bool = False) -> list[CheckpointReport]:
        """Reports on these checkpoints; without any, on all and on the catalogue. `restore`: as one can only try."""
        rows = [self._host.checkpoint(name) for name in checkpoints]
        complete = CheckpointState.CAPTURED, CheckpointState.DURABLE
        every = [row for row in self._host.services.checkpoints.values() if row.state in complete]
        reports = await self._host.verifier.verify(rows or every, catalogue=not checkpoints)
        existing = self._host.services.checkpoints
        for report in reports if restore else []:
            row = existing.get(report.checkpoint)
            if row is None or row.state not in complete or report.damage:
                continue
            if refuted := await self._host.prover.prove(row):
                report.damage.append(f"cannot be restored: {refuted}")
            else:
                report.notes.append("restored and compared")
        return reports

    async def image(self, checkpoint: str, name: str, config: ImageConfig | None, *, replace: bool) -> None:
        """Make an image of the files of a checkpoint. Cancelled, nothing of it is left.

        Where an image was made of them before and is still there, only the name is new.
        """
        row, images = await self._host.restorable(checkpoint), self._host.images
        source = f"checkpoint {row.id}"
        below = await asyncio.to_thread(self._host.image_below, row)
        target = config or below.config
        if row.image:
            existing = functools.partial(images.give_name, name, row.image, source, target, replace=replace)
            if await asyncio.to_thread(existing):
                return
        upper = None if row.files is None else self._host.places.snapshot(row.files) / "upper"
        copying: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()

        async def copy(tree: Path) -> None:
            nonlocal copying
            work = self._host.services.aside.run(
                sources.checkpoint, upper, below.tree, tree, sandbox=row.sandbox, owner=row.owner
            )
            copying = asyncio.ensure_future(work)
            await copying

        def fill(tree: Path) -> ImageConfig:
            asyncio.run_coroutine_threadsafe(copy(tree), loop).result()
            return target

        with self._host.collector.pin(row):
            building = asyncio.ensure_future(_streamed(images.build, name, fill, source, replace))
            try:
                row.image = (await asyncio.shield(building)).parent.name
                self._host.services.catalogue.later([put_checkpoint(row)])
            except asyncio.CancelledError:
                if copying is not None:
                    copying.cancel()
                await asyncio.wait({building})
                raise

    # ----------------------------------------------------------------- out

    @contextlib.asynccontextmanager
    async def exporting(
        self,
        checkpoint: str,
        *,
        since: str | None = None,
        have: bytes = b"",
        manifest: bool = False,
        soon: bool = False,
        brief: bool = False,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The stream of a checkpoint, less what the other side has: a checkpoint (`since`) or a list (`have`).

        `soon`: it need not be durable yet. `brief`: for an import that knows `since` as well.
        """
        row = await (self._host.restorable(checkpoint) if soon else self._durable(checkpoint))
        existing = await _streamed(read_have, have) if have else None
        base = None
        if since is not None:
            base = await self._base(since)
            existing = base.have if existing is None else existing.joined(base.have)
        head = await asyncio.to_thread(self._head, row)
        with self._host.collector.pin(row):
            async with self._streams, self._processes(row) as source:
                self._remembered = None  # it holds much
                places, pages = self._host.places, self._pages
                made = exports.export(row, head, places, pages, source, existing, base, manifest=manifest, brief=brief)
                yield _threaded(made)

    async def remember(self, checkpoint: str) -> None:
        """The next export will be for a host that has this one."""
        self._remembered = checkpoint, await self._base(checkpoint)

    async def _base(self, checkpoint: str) -> exports.Base:
        if self._remembered is not None and self._remembered[0] == checkpoint:
            return self._remembered[1]
        row = await self._durable(checkpoint)
        with self._host.collector.pin(row):
            async with self._processes(row) as source:
                return await _streamed(exports.Base.of, row, self._host.places, self._pages, source)

    @contextlib.asynccontextmanager
    async def _processes(self, row: CheckpointRow) -> AsyncIterator[Path | None]:
        """Where its process images are, for as long as they are read."""
        if row.dump is None:
            yield None
            return
        async with self._host.services.capturer.reading(row.dump) as source:
            yield source

    async def _durable(self, checkpoint: str) -> CheckpointRow:
        row = self._host.checkpoint(checkpoint)
        if (inflight := self._host.services.inflights.get(row.id)) is not None:
            await inflight.finalized(durable=True)
        if row.state is not CheckpointState.DURABLE:
            raise Conflict(
                f"checkpoint {row.id} is {row.state.value}: {row.error or 'it is not durable'}",
                hint="choose a durable one with `pagurus tree`",
            )
        return row

    def _head(self, row: CheckpointRow) -> TransferHeader:
        template = Template.of(self._host.template(row))
        image = self._host.image_below(row)
        # How an agent reaches a model is this host's business, and may hold its secrets.
        settings = msgspec.structs.replace(template, image_digest=image.digest, gateway=None)
        return TransferHeader(
            id=row.id,
            sandbox=row.sandbox,
            verdict=row.verdict,
            image=template.image,
            image_digest=image.digest,
            template=msgspec.to_builtins(settings),
            label=row.label,
            ancestors=self._ancestors(row),
            turn=row.turn,
            created_at=row.created_at,
            ipc=row.ipc,
            files=row.files is not None,
            processes=row.dump is not None,
            raw_bytes=row.dump_bytes,
            full_bytes=row.full_bytes,
            programs=msgspec.to_builtins(row.programs),
        )

    def _ancestors(self, row: CheckpointRow) -> list[str]:
        result: list[str] = []
        while row.parent is not None and len(result) < MAX_ANCESTORS:
            result.append(row.parent)
            if row.parent not in self._host.services.checkpoints:
                break
            row = self._host.services.checkpoints[row.parent]
        return result

    async def have(self) -> bytes:
        """What need not be sent to this host: all content and pages of its durable checkpoints."""
        rows = [row for row in self._host.services.checkpoints.values() if row.state is CheckpointState.DURABLE]
        pages: set[bytes] = set()
        contents: set[bytes] = set()
        for row in rows:
            with contextlib.suppress(PagurusError, OSError):  # removed since, or damaged: it is not there
                here = (await self._base(row.id)).have.sets()
                pages |= here[0]
                contents |= here[1]
        return await _streamed(lambda: write_have(Have.of(pages, contents)))

    # ----------------------------------------------------------------- in

    async def receive(
        self,
        stream: AsyncIterator[bytes],
        *,
        host_mounts: bool = False,
        former: Former | None = None,
        since: str | None = None,
    ) -> ImportResult:
        """Import one stream. All or nothing. `host_mounts`: it may name directories of this host for its forks.

        `former`: see :class:`Importer`; the checkpoint becomes durable later, unless its files are not what they
        should be. `since`: a checkpoint that is here, which the stream builds upon.
        """
        async with self._streams, self._lists(since) as base:
            importer = Importer(self._host.places, self._pages, self._host.services.capturer.need, former, base)
            mine: str | None = None
            image: str | None = None
            try:
                async for part in _gathered(stream):
                    head = await _streamed(importer.feed, part)
                    if head is not None:
                        self.coming.append(image := head.image_digest)
                        importer.template = await self._admitted(head, host_mounts)
                        importer.programs = programs_from(head.programs)
                        importer.poll_first(self._of(head.sandbox))
                        mine = await self._welcome(head)
                        if mine is None:
                            return self._here(head.id)
                row = await _streamed(importer.finish)
                publishing = asyncio.ensure_future(self._publish(row, importer))
                try:
                    return await asyncio.shield(publishing)
                except asyncio.CancelledError:
                    await asyncio.wait({publishing})  # it is written or not: never half
                    mine = None if publishing.exception() is None else mine
                    raise
            except BaseException as error:  # the stream, the disk, a client that went: nothing half imported stays
                if mine is not None:
                    await asyncio.shield(_streamed(importer.abandon))
                if isinstance(error, OSError):
                    raise failure(error) from error
                raise
            finally:
                self._arriving.discard(mine or "")
                if image is not None:
                    self.coming.remove(image)
                closing = self._host.services.spawn(_streamed(importer.close), "end of an import")
                if former is None:  # else a host waits for the sandbox
                    await asyncio.shield(closing)

    @contextlib.asynccontextmanager
    async def _lists(self, checkpoint: str | None) -> AsyncIterator[PageLists | None]:
        """Of the pages of a checkpoint, which stays until then."""
        row = None if checkpoint is None else await self._durable(checkpoint)
        if row is None or row.dump is None:
            yield None
            return
        with self._host.collector.pin(row):
            packed = await _streamed(dumpfile.read, self._host.places.packed(row.dump))
            lists = await _streamed(dumpfile.page_lists, packed, row.dump, self._pages)
            if row.damaged or await _streamed(self._pages.has_lost, [numbers for numbers, _ in lists.values()]):
                raise Conflict(f"checkpoint {row.id} is damaged", hint="export the other one in full")
            yield lists

    async def _admitted(self, head: TransferHeader, host_mounts: bool) -> Template:
        """What forks of the checkpoint inherit, by the rules of new sandboxes. Raises when these refuse it."""
        host = self._host
        try:
            composition = msgspec.convert(head.template.get("composition"), Composition | None)
            image = await asyncio.to_thread(
                composed.imported, host.images, head.image_digest, composition, host.images_used
            )
        except msgspec.ValidationError as error:
            raise Invalid(f"the composition of the checkpoint: {error}", hint="export it again") from None
        except NotFound as error:
            raise NotFound(
                f"the image of the checkpoint is not here: {head.image} with the content {head.image_digest[:16]}…",
                hint=f"export the image {head.image} there and import it here; a name alone is not enough",
            ) from error
        made = await self._host.admitted(head.template, image, host_mounts=host_mounts)
        if head.processes and made.layer and not paths.runtime_layer(made.layer).is_dir():
            raise NotFound(
                f"the runtime layer of the checkpoint's processes is not here: {made.layer}",
                hint="run the same version of Pagurus, built by the same compiler, on both hosts",
            )
        return made

    async def _welcome(self, head: TransferHeader) -> str | None:
        """Whether a checkpoint may come: its id, or None when it is here already. Raises when it may not."""
        await self._host.collector.removed()  # or the removal of its former content would take the new one along
        if head.id in self._host.services.checkpoints:
            return None
        if head.id in self._arriving:
            raise Conflict(
                f"checkpoint {head.id} is being imported already", hint="wait until the other import has ended"
            )
        if any(head.id in (row.files, row.dump) for row in self._host.services.checkpoints.values()):
            raise Conflict(
                f"content of checkpoint {head.id} is still here, though it was removed",
                hint="remove the checkpoints that share it first",
            )
        self._arriving.add(head.id)
        return head.id

    def _here(self, checkpoint: str) -> ImportResult:
        """There is nothing to import. Raises Conflict where what is here is not whole."""
        row = self._host.checkpoint(checkpoint)
        if row.damaged or row.state is CheckpointState.FAILED:
            raise Conflict(
                f"checkpoint {row.id} is here, but not whole: {row.error or row.state.value}",
                hint=f"give it up with `pagurus checkpoint rm {row.id}`, then import it again",
            )
        return ImportResult(checkpoint=row.info(), already=True)

    async def _publish(self, row: CheckpointRow, importer: Importer) -> ImportResult:
        services = self._host.services
        assert importer.head is not None and row.template is not None
        row.number = next(services.numbers)
        row.template.image_digest = importer.head.image_digest
        if not importer.head.processes:
            row.template.layer = ""  # nothing was started from it
        row.parent = next((name for name in importer.head.ancestors if name in services.checkpoints), None)
        captured = row.state is CheckpointState.CAPTURED
        if captured and row.parent is None:
            raise Conflict("none of the checkpoints before it is here", hint="export it once it is durable")
        await services.catalogue.write([put_checkpoint(row)], durable=not captured)
        services.checkpoints[row.id] = row
        if captured:
            self._store(row, importer)
        log.info("imported %s (%d bytes)", row.id, importer.received)
        return ImportResult(
            checkpoint=row.info(),
            received_bytes=importer.received,
            pages=importer.pages,
            new_pages=importer.new_pages,
            contents=importer.contents,
            new_contents=importer.new_contents,
        )

    def _store(self, row: CheckpointRow, importer: Importer) -> None:
        """Let a captured checkpoint become durable, as one of this host does."""
        services = self._host.services
        inflight = services.captured(row, services.checkpoints[row.parent or ""])
        inflight.moving = True
        work = store_alone(services, inflight, lambda: _streamed(importer.confirm, row))
        services.spawn(work, f"store {row.id}")

    async def survey(self, manifest: AsyncIterator[bytes]) -> bytes:
        """What of a manifest is here already."""
        importer = Importer(self._host.places, self._pages, self._host.services.capturer.need)
        try:
            async for part in _gathered(manifest):
                if (head := await _streamed(importer.feed, part)) is not None:
                    importer.poll_first(self._of(head.sandbox))
            return await _streamed(lambda: write_have(importer.needed()))
        finally:
            await _streamed(importer.close)

    def _of(self, sandbox: str) -> list[str]:
        """The checkpoints of a sandbox that are here, the newest first."""
        rows = (row for row in self._host.services.checkpoints.values() if row.sandbox == sandbox)
        return [row.id for row in sorted(rows, key=lambda row: -row.number)]

    async def pull(self, request: PullRequest) -> ImportResult:
        """Fetch a checkpoint from another daemon, only what is missing here."""
        from sandbox.sdk.client import Client

        if request.checkpoint in self._host.services.checkpoints:
            return self._here(request.checkpoint)
        if not request.address.startswith(("http://", "https://", "/")):
            raise Invalid(f"{request.address!r} is no address", hint="give a URL or the path of a daemon's socket")
        async with Client(request.address, token=request.token, ca=request.ca) as there:
            have = await self.survey(there.store.stream(request.checkpoint, manifest=True))
            stream = there.store.stream(request.checkpoint, have=have)
            return await self.receive(stream, host_mounts=request.mounts)

    @property
    def _pages(self) -> PageStore:
        return self._host.services.capturer.checkpointer.pages


async def _streamed(function: Callable[..., T], *arguments: Any) -> T:
    """On a thread for streams: what short work waits for is done elsewhere."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *arguments)


async def _threaded(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A blocking iterator, each piece made on a worker thread."""
    while True:
        gathered = await _streamed(_take, parts)
        if not gathered:
            return
        yield gathered


def _take(parts: Iterator[bytes]) -> bytes:
    taken: list[bytes] = []
    size = 0
    for part in parts:
        taken.append(part)
        size += len(part)
        if size >= GATHER:
            break
    return b"".join(taken)


async def _gathered(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Small pieces joined, so that each visit to a worker thread is worth it."""
    pending: list[bytes] = []
    size = 0
    async for part in stream:
        pending.append(part)
        size += len(part)
        if size >= GATHER:
            yield b"".join(pending)
            pending, size = [], 0
    if pending:
        yield b"".join(pending)
