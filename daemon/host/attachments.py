"""What is fastened to a sandbox's network namespace from outside: a gateway, a resolver, a link.

Guarantee: ``attach`` has returned before a process of the sandbox runs (create, fork, restore) and
before the API answers (adoption by a new daemon); ``detach`` is called before the namespace goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from daemon.catalogue import SandboxRow
from sandbox.errors import PagurusError

if TYPE_CHECKING:
    from sandbox.container.container import Container

log = logging.getLogger("pagurus.attachments")


class Attachment(Protocol):
    """Something of the host's that a sandbox can reach, and only that sandbox."""

    async def open(self, rows: Sequence[SandboxRow]) -> None:
        """Start, before any sandbox is adopted; collect what a former daemon left for sandboxes not in `rows`."""

    async def close(self) -> None:
        """The daemon ends; sandboxes and what they need stay."""

    async def attach(self, row: SandboxRow, container: Container) -> None:
        """Fasten it. The namespaces of `container` exist (``container.netns``). Idempotent: an adopted or
        restored sandbox may still have it. Raises PagurusError: the sandbox is then not made."""

    async def detach(self, row: SandboxRow, container: Container) -> None:
        """Take it away. Idempotent; raises nothing but PagurusError, which is logged."""


async def attach_all(attachments: Sequence[Attachment], row: SandboxRow, container: Container) -> None:
    """Fasten all, in order; if one refuses, those before it are taken away again."""
    done: list[Attachment] = []
    try:
        for attachment in attachments:
            done.append(attachment)
            await attachment.attach(row, container)
    except BaseException:  # also when cancelled, and though it may be cancelled again: nothing stays half fastened
        await asyncio.shield(detach_all(done, row, container))
        raise


async def detach_all(attachments: Sequence[Attachment], row: SandboxRow, container: Container) -> None:
    """Take all away, the last one first."""
    for attachment in reversed(attachments):
        try:
            await attachment.detach(row, container)
        except PagurusError as error:
            log.warning("%s was not taken away: %s", type(attachment).__name__, error, extra={"sandbox": row.id})
