"""A create is all or nothing, also when it is cancelled in its last step, the write of its rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from daemon.config import DaemonConfig
from daemon.startup import close_host, open_host
from sandbox.messages import CreateRequest
from tests.support.daemon_host import IMAGE, Daemon, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


async def test_a_create_cancelled_while_its_rows_are_written_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    place = Daemon(tmp_path / "host")  # its directories; the host runs in this process
    place.run.mkdir(parents=True)
    options = DaemonConfig(state=place.state, run=place.run)
    try:
        host = await open_host(options, "unused")
        try:
            real, writing = host.services.catalogue.write, asyncio.Event()

            async def write(statements: Iterable[Any], *, durable: bool = False) -> None:
                retained = list(statements)
                await real(retained, durable=durable)
                if any("INTO sandboxes" in text for text, _ in retained):  # committed; the caller does not know yet
                    writing.set()
                    await asyncio.Event().wait()

            monkeypatch.setattr(host.services.catalogue, "write", write)
            creating = asyncio.create_task(host.create(CreateRequest(image=IMAGE)))
            await writing.wait()
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
            monkeypatch.undo()
            assert not host.live_sandboxes and not host.services.checkpoints
            assert not list(host.places.trees.iterdir())
        finally:
            await close_host(host)
        host = await open_host(options, "unused")  # what the catalogue says
        try:
            assert not host.live_sandboxes and not host.services.checkpoints
        finally:
            await close_host(host)
    finally:
        place.clean()
