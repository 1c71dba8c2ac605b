"""What the store needs of the host whose checkpoints it keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from daemon.catalogue import CheckpointRow, Template
from daemon.checkpoints.capture import Places
from daemon.checkpoints.inflight import Services
from daemon.store.gc import GarbageCollector
from daemon.store.verify import Verifier
from sandbox.image.store import ImageStore, StoredImage


class RestoreTrial(Protocol):
    """Restores checkpoints next to their sandboxes."""

    async def prove(self, row: CheckpointRow) -> str:
        """Why it cannot be restored as it was; "" when it can. Raises where that could not be tried."""


class StoreHost(Protocol):
    """A host, as the store sees it."""

    services: Services
    places: Places
    images: ImageStore
    collector: GarbageCollector
    verifier: Verifier

    @property
    def prover(self) -> RestoreTrial: ...

    @property
    def live_sandboxes(self) -> Collection[str]: ...

    def checkpoint(self, checkpoint: str) -> CheckpointRow:
        """By its id or label. Raises NotFound."""

    async def restorable(self, checkpoint: str) -> CheckpointRow:
        """Likewise, captured by now and whole."""

    def template(self, origin: CheckpointRow) -> Template:
        """What its forks inherit."""

    def images_used(self) -> Mapping[str, int]:
        """How many sandboxes and imported checkpoints use each image, by digest."""

    def image_below(self, checkpoint: CheckpointRow) -> StoredImage:
        """The image that its files lie upon."""

    async def admitted(self, settings: Mapping[str, Any], image: StoredImage, *, host_mounts: bool) -> Template:
        """The settings of a checkpoint from elsewhere, by the rules of new sandboxes. Raises when these refuse it."""
