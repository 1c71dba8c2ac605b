"""Steps of image builds that are kept: a checkpoint under the key of everything that it was made of.

Guarantee: what is found is durable and whole; it outlives the sandbox that it was made in, as an imported checkpoint
does; what a living sandbox is based on is never given up.

There is no state but the rows of the catalogue: a step that is kept is a field of its checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from daemon.auth import visibility
from daemon.catalogue import CheckpointRow, RetainedStep, Template, put_checkpoint
from sandbox.errors import Conflict
from sandbox.messages import CheckpointState, StepInfo, StepsRemoved

if TYPE_CHECKING:
    from daemon.store.holder import StoreHost

MAX_STEPS = 512
MAX_BYTES = 8 << 30  # of the files that the steps added
MAX_UNUSED = 30 * 86_400.0  # seconds


def surplus(
    steps: Sequence[RetainedStep],
    now: float,
    *,
    limit: int = MAX_STEPS,
    size: int = MAX_BYTES,
    unused: float = MAX_UNUSED,
) -> set[str]:
    """Keys of the steps that are given up: those used longest ago, beyond any of the limits. Pure.

    >>> old, new = KeptStep(key="a", size=3, used_at=1.0), KeptStep(key="b", size=3, used_at=2.0)
    >>> surplus([old, new], 3.0, size=5)
    {'a'}
    """
    gone: set[str] = set()
    count = total = 0
    for step in sorted(steps, key=lambda step: step.used_at, reverse=True):
        count, total = count + 1, total + step.size
        if count > limit or total > size or now - step.used_at > unused:
            gone.add(step.key)
    return gone


class BuildCache:
    """The kept steps of a host, as the call under way sees them."""

    def __init__(self, host: StoreHost) -> None:
        self._host = host

    def all(self) -> list[StepInfo]:
        """All of them, the one used last first."""
        result = [_info(row, row.step) for row in self._rows() if row.step is not None]
        return sorted(result, key=lambda step: step.used_at, reverse=True)

    def find(self, keys: Iterable[str]) -> list[StepInfo]:
        """Those with one of these keys; they count as used now."""
        target, now, result = set(keys), time.time(), []
        for row in self._rows():
            if row.step is not None and row.step.key in target and row.state is CheckpointState.DURABLE:
                row.step = msgspec.structs.replace(row.step, used_at=now)
                self._host.services.catalogue.later([put_checkpoint(row)])
                result.append(_info(row, row.step))
        return result

    async def keep(self, key: str, checkpoint: str, title: str) -> StepInfo:
        """Keep a checkpoint as the outcome of a step, instead of any before it, once it is durable."""
        host = self._host
        row = host.checkpoint(checkpoint)
        with host.collector.pin(row):
            if (inflight := host.services.inflights.get(row.id)) is not None:
                await inflight.finalized(durable=True)
            if row.state is not CheckpointState.DURABLE:
                raise Conflict(
                    f"checkpoint {row.id} is not durable: {row.error or row.state.value}",
                    hint="build it again; `pagurus checkpoint verify` names damage",
                )
            # How an agent reaches a model has no place in an image.
            row.template = msgspec.structs.replace(Template.of(host.template(row)), gateway=None)
            below = host.services.checkpoints.get(row.parent or "")
            size = max(0, row.files_bytes - (below.files_bytes if below is not None else 0))
            row.step = RetainedStep(key=key, title=title, size=size + row.stored_bytes, used_at=time.time())
            row.label = row.label or f"build: {title}"
            await host.services.catalogue.write([put_checkpoint(row)])
            made = _info(row, row.step)
        before = [other for other in self._rows() if other is not row and _key(other) == key]
        await self._drop([*before, *self._surplus()])
        return made

    async def prune(self) -> StepsRemoved:
        """Give all of them up, but for those that living sandboxes are based on."""
        return await self._drop(self._rows())

    def _rows(self) -> list[CheckpointRow]:
        rows = self._host.services.checkpoints.values()
        return [row for row in rows if row.step is not None and visibility.visible(row.owner)]

    def _surplus(self) -> list[CheckpointRow]:
        rows = self._rows()
        gone = surplus([row.step for row in rows if row.step is not None], time.time())
        return [row for row in rows if _key(row) in gone]

    async def _drop(self, rows: Iterable[CheckpointRow]) -> StepsRemoved:
        removed = StepsRemoved()
        for row in rows:
            with contextlib.suppress(Conflict):  # a sandbox is based on it, or it is being read
                await self._host.collector.remove(row)
                removed.steps += 1
                removed.bytes += row.step.size if row.step is not None else 0
        return removed


def _key(row: CheckpointRow) -> str:
    return row.step.key if row.step is not None else ""


def _info(row: CheckpointRow, step: RetainedStep) -> StepInfo:
    return StepInfo(
        key=step.key,
        checkpoint=row.id,
        title=step.title,
        size=step.size,
        created_at=row.created_at,
        used_at=step.used_at,
    )
