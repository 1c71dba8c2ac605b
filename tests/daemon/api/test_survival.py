"""A daemon starts over whatever it finds: also over a sandbox whose image is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox import RestoreFailed
from tests.support.daemon_host import IMAGE, Daemon, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


async def test_a_sandbox_without_its_image_goes_on_and_says_why_it_cannot_come_back(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "host")
    link = daemon.state / "images" / IMAGE
    store = link.readlink()
    try:
        await asyncio.to_thread(daemon.start)
        async with daemon.client() as host:
            sandbox = await host.create(IMAGE)
            await sandbox.durable(await sandbox.exec("echo x > /x"))
            daemon.kill()
            link.unlink()
            await asyncio.to_thread(daemon.start)
            assert (await sandbox.exec("cat /x")).text == "x\n"
            with pytest.raises(RestoreFailed, match="image"):
                await sandbox.restore()
            link.symlink_to(store)
            await sandbox.restore()
            assert (await sandbox.exec("cat /x")).text == "x\n"
    finally:
        if not link.is_symlink():
            link.symlink_to(store)
        daemon.clean()
