"""Sandboxes as clients of E2B take them for granted: with a user called ``user`` who has a home."""

from __future__ import annotations

from typing import Any

import msgspec

from daemon.catalogue import CheckpointRow, Template, put_checkpoint
from daemon.e2b.steps import CPUS, MEMORY
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.container.users import HOME, LOGIN
from sandbox.image.store import StoredImage
from sandbox.messages import CreateRequest, Limits


async def made(host: Host, name: str, image: StoredImage, **options: Any) -> LiveSandbox:
    """A sandbox of an image, as E2B's clients expect one."""
    config = image.config
    limits = Limits()
    if cpus := config.labels.get(CPUS):
        limits = msgspec.structs.replace(limits, cpus=float(cpus))
    if memory := config.labels.get(MEMORY):
        limits = msgspec.structs.replace(limits, memory=f"{memory}MiB")
    info = await host.create(
        CreateRequest(
            image=name,
            limits=limits,
            user=config.user or LOGIN,
            workdir=None if config.user or config.workdir != "/" else HOME,
            **options,
        ),
        login=config.user in ("", LOGIN),
    )
    return host.live(info.id)


async def retain(host: Host, live: LiveSandbox, row: CheckpointRow) -> None:
    """Let a checkpoint outlive its sandbox."""
    row.template = msgspec.structs.replace(Template.of(live.row), gateway=None)
    await host.services.catalogue.write([put_checkpoint(row)], durable=True)
