"""What follows for the sandboxes when a checkpoint is durable, could not be stored, is lost or damaged."""

from __future__ import annotations

from collections.abc import Mapping

from daemon.catalogue import CheckpointRow, put_sandbox
from daemon.checkpoints.inflight import Services
from daemon.checkpoints.persist import nearest, store_alone
from daemon.store.gc import GarbageCollector
from daemon.store.verify import Verifier
from daemon.turns.turns import LiveSandbox
from sandbox.messages import CheckpointState


class Outcomes:
    """Of all checkpoints of a host."""

    def __init__(
        self,
        services: Services,
        live_sandboxes: Mapping[str, LiveSandbox],
        collector: GarbageCollector,
        verifier: Verifier,
    ) -> None:
        self._services = services
        self._live_sandboxes = live_sandboxes
        self._collector = collector
        self._verifier = verifier

    def durable(self, row: CheckpointRow, parent: CheckpointRow) -> None:
        self._collector.changed(row.sandbox)
        self._verifier.later(row, parent)

    def lost(self, row: CheckpointRow) -> None:
        """A checkpoint is not whole: what is based on it moves to the nearest that is, and has all that came since
        pending."""
        for live in self._live_sandboxes.values():
            if live.row.head == row.id:
                live.row.head = nearest(self._services.checkpoints, row.id)
                self._services.catalogue.later([put_sandbox(live.row)])
                if live.container_or_none is not None:
                    self._services.capturer.taint(live.container, f"{row.id} is lost", files=True, processes=True)

    def damaged(self, row: CheckpointRow) -> None:
        """A checkpoint is damaged: each sandbox based on content of it captures everything again with the next turn."""
        for live in self._live_sandboxes.values():
            head = self._services.checkpoints.get(live.row.head)
            if head is None or live.container_or_none is None:
                continue
            if head.id == row.id or {head.files, head.dump} & {row.files, row.dump} - {None}:
                self._services.capturer.taint(live.container, f"{row.id} is damaged", files=True, processes=True)

    def store_later(self, row: CheckpointRow) -> None:
        """Make a captured checkpoint durable in the background, whether its sandbox is there or not."""
        inflight = self._services.captured(row, self._services.checkpoints.get(row.parent or "", row))
        live = self._live_sandboxes.get(row.sandbox)
        work = store_alone(self._services, inflight) if live is None else live.captures.store(inflight)
        self._services.spawn(work, f"store {row.id}")

    def store_again(self) -> None:
        """There may be room now for what could not be made durable."""
        for row in list(self._services.checkpoints.values()):
            if row.state is CheckpointState.CAPTURED and row.error and row.id not in self._services.inflights:
                self.store_later(row)
