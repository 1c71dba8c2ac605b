"""Which checkpoints are kept, and the removal of those that nothing needs, while the host runs.

::

    checkpoint durable ─▶ changed(sandbox) ─┐
    sandbox removed, pin let go ────────────┼─▶ removable? ─▶ rows (durable) ─▶ content ─▶ unreferenced pages
    `pagurus checkpoint rm` ────────────────┘

Guarantee: content is removed only after the removal of the rows that named it survives a power cut, and only when no
row that is left names it; so at any instant each row that says durable has its content, and what a crash leaves over
has no row. What is pinned (read by a restore, a fork, an export or a verification) stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set

from daemon.catalogue import CheckpointRow, drop_checkpoint, put_checkpoint
from daemon.checkpoints.inflight import Services
from daemon.store import retention
from daemon.turns.turns import LiveSandbox
from sandbox.errors import Conflict, NotFound, PagurusError
from sandbox.messages import CheckpointState, Retention
from sandbox.tree import quota

log = logging.getLogger("pagurus.gc")

PAUSE = 2.0  # seconds that changes gather before the policy is applied to them
PAGES_AFTER = 64 << 20  # bytes of removed process images after which pages are collected
PAGES_TIMEOUT = 60.0  # seconds after which they are collected though it is less


class GarbageCollector:
    """The checkpoints of a host, as far as keeping goes. `loops` are its living sandboxes."""

    def __init__(self, services: Services, live_sandboxes: Mapping[str, LiveSandbox]) -> None:
        self._services = services
        self._live_sandboxes = live_sandboxes
        self.default = Retention()
        self._pins: Counter[str] = Counter()
        self._removing = asyncio.Lock()
        self._changed: set[str] = set()  # sandboxes whose checkpoints the policy has not seen yet
        self._wake = asyncio.Event()
        self._garbage = 0  # bytes of process images removed since pages were collected
        self._counts = {"removed": 0, "collections": 0, "collected_bytes": 0}

    # ----------------------------------------------------------------- what is needed

    def unneeded(self) -> list[CheckpointRow]:
        """Checkpoints of sandboxes that are no more, on which nothing stands."""
        rows = self._services.checkpoints
        gone = retention.removable(
            list(rows.values()), {name: Retention() for name in self._live_sandboxes}, self.held()
        )
        return [rows[name] for name in gone]

    def held(self) -> set[str]:
        """Checkpoints that living sandboxes, restores, forks and captures are based on, of every owner."""
        rows = self._services.checkpoints
        living = {
            checkpoint for live in self._live_sandboxes.values() for checkpoint in (live.row.head, live.row.origin)
        }
        unfinished = {
            row.id for inflight in self._services.inflights.values() for row in (inflight.row, inflight.parent)
        }
        # Only its own row makes content durable: it stays until then where others share that.
        shared = {owner for row in rows.values() for owner in (row.files, row.dump) if owner not in (None, row.id)}
        carried_over = {item for item in shared if item in rows and rows[item].state is CheckpointState.CAPTURED}
        return living | unfinished | carried_over | set(self._pins)

    @contextlib.contextmanager
    def pin(self, row: CheckpointRow) -> Iterator[None]:
        """Keep a checkpoint while it is read, even if its sandbox is removed."""
        if row.id not in self._services.checkpoints:
            raise NotFound(f"checkpoint {row.id} has just been removed", hint="choose another with `pagurus tree`")
        self._pins[row.id] += 1
        try:
            yield
        finally:
            self._pins[row.id] -= 1
            if not self._pins[row.id]:
                del self._pins[row.id]
                self.changed(row.sandbox)
                if row.sandbox not in self._live_sandboxes:
                    self._services.spawn(self.collect(row.sandbox), f"collection of {row.sandbox}")

    # ----------------------------------------------------------------- the policy

    def changed(self, sandbox: str) -> None:
        """The checkpoints of a sandbox are not what they were: the policy looks at them soon."""
        self._changed.add(sandbox)
        self._wake.set()

    async def run(self) -> None:
        """Apply the policy and collect pages, for as long as the host runs."""
        self._changed.update(self._live_sandboxes)
        await self.collect_pages()  # what the last daemon left
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAGES_TIMEOUT):
                    await self._wake.wait()
            await asyncio.sleep(PAUSE)
            self._wake.clear()
            patient = not self._changed
            try:
                await self.thin()
                if self._garbage >= PAGES_AFTER or (self._garbage and patient):
                    await self.collect_pages()
                await asyncio.to_thread(self._services.capturer.pool.give_back)
                await asyncio.to_thread(quota.sweep, self._services.capturer.places.trees, list(self._live_sandboxes))
                self._services.outcomes.store_again()
            except (PagurusError, OSError) as error:  # a full or broken disk: tried again, and said
                log.warning("checkpoints could not be removed: %s", error)

    async def thin(self) -> int:
        """Remove what the policies of living sandboxes give up. Returns how many."""
        changed, self._changed = self._changed, set()
        policies = {
            name: live.row.retention or self.default for name, live in self._live_sandboxes.items() if name in changed
        }
        if not any(policy.last is not None for policy in policies.values()):
            return 0
        async with self._removing:
            rows = list(self._services.checkpoints.values())
            gone = retention.removable(rows, policies, self.held())
            return await self._forget([row for row in rows if row.id in gone and row.sandbox in policies])

    async def collect(self, sandbox: str) -> None:
        """Remove the checkpoints of a removed sandbox that nothing needs, then their content."""
        for inflight in [item for item in self._services.inflights.values() if item.row.sandbox == sandbox]:
            await inflight.finalized(durable=True)
        async with self._removing:
            mine = [row for row in self._services.checkpoints.values() if row.sandbox == sandbox]
            gone = retention.removable(mine, {}, self.held()) if sandbox not in self._live_sandboxes else set()
            await self._forget([row for row in mine if row.id in gone])

    async def remove(self, row: CheckpointRow) -> None:
        """Remove one checkpoint on request. Raises Conflict when it is needed."""
        async with self._removing:
            if row.id in self.held() or row.state is CheckpointState.PENDING:
                users = [
                    name for name, live in self._live_sandboxes.items() if row.id in (live.row.head, live.row.origin)
                ]
                why = f"{', '.join(users)} stands on it" if users else "it is being taken, stored or read"
                raise Conflict(
                    f"checkpoint {row.id} cannot be removed: {why}",
                    hint="remove or restore the sandbox first" if users else "try again in a moment",
                )
            await self._forget([row])

    async def label(self, row: CheckpointRow, label: str | None) -> None:
        """Label a checkpoint, or take its label away."""
        if (inflight := self._services.inflights.get(row.id)) is not None:
            await inflight.finalized(durable=True)  # two writers of one row would overtake each other
        row.label = label
        await self._services.catalogue.write([put_checkpoint(row)], durable=True)
        self.changed(row.sandbox)

    # ----------------------------------------------------------------- removal

    async def forget(self, gone: list[CheckpointRow]) -> int:
        """Remove checkpoints: first the rows, then the content that no other row needs."""
        async with self._removing:
            return await self._forget(gone)

    async def removed(self) -> None:
        """Returns when the content of everything that has no row any more is gone too: its id is free again."""
        async with self._removing:
            return

    async def _forget(self, gone: list[CheckpointRow]) -> int:
        checkpoints = self._services.checkpoints
        gone = [row for row in gone if row.id in checkpoints]
        if not gone:
            return 0
        orphans = retention.new_parents(list(checkpoints.values()), {row.id for row in gone})
        for row in gone:
            del checkpoints[row.id]
        for child, parent in orphans.items():
            checkpoints[child].parent = parent
        files, images = {row.files for row in checkpoints.values()}, {row.dump for row in checkpoints.values()}
        heirs = [put_checkpoint(checkpoints[child]) for child in orphans]
        await self._services.catalogue.write([*heirs, *(drop_checkpoint(row.id) for row in gone)], durable=True)
        await asyncio.to_thread(self._discard, {row.id for row in gone} | self.content(gone), files, images)
        self._garbage += sum(max(row.stored_bytes, 1) for row in gone if row.dump and row.dump not in images)
        self._counts["removed"] += len(gone)
        return len(gone)

    def _discard(self, owners: Iterable[str], files: Set[str | None], images: Set[str | None]) -> None:
        """Remove the content of `owners` but for those `files` and process `images` that others share."""
        for owner in owners:
            self._services.capturer.discard(owner, files=owner not in files, images=owner not in images)

    async def collect_pages(self) -> None:
        """Free the pages that no packed dump refers to. Concurrently with everything else."""
        self._garbage = 0
        try:
            freed = await self._services.capturer.collect_pages()
        except PagurusError as error:  # a dump file that cannot be read: nothing was deleted, and it is said
            log.warning("pages could not be collected: %s", error)
            return
        self._counts["collections"] += 1
        self._counts["collected_bytes"] += freed.bytes

    @staticmethod
    def content(rows: Iterable[CheckpointRow]) -> set[str]:
        """The owners of all content that these checkpoints need."""
        return {owner for row in rows for owner in (row.files, row.dump) if owner is not None}

    def statistics(self) -> dict[str, int]:
        return {**self._counts, "pinned": len(self._pins), "garbage_bytes": self._garbage}
