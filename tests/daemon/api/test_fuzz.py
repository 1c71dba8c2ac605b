"""A short, deterministic fuzzing of every route of a real daemon. The long one is ``pagurus bench fuzz``."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from sandbox import Client
from tests.hostile.fuzz import Target, admin, fuzz
from tests.support.daemon_host import IMAGE, Daemon, free_port, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
EXAMPLES = 2  # of each operation and kind


@pytest.mark.filterwarnings("ignore::Warning")  # of the fuzzer's own, about what it generates
def test_no_case_breaks_the_daemon(tmp_path: Path) -> None:
    daemon, port = Daemon(tmp_path / "host"), free_port()
    try:
        daemon.start("--listen", f"127.0.0.1:{port}", "--plain")
        process = daemon.process
        assert process is not None

        async def token() -> str:
            async with daemon.client() as client:
                return await admin(client)

        target = Target(f"http://127.0.0.1:{port}", asyncio.run(token()), IMAGE)
        result = fuzz(target, examples=EXAMPLES, seed=7, alive=lambda: process.poll() is None)
        assert (result.server_errors, result.misfits, result.crashes) == ([], [], 0)
        assert result.operations > 40 and result.statuses["2xx"] > result.operations // 2

        async def leave() -> dict[str, object]:
            async with Client(daemon.socket) as client:
                for info in await client.sandboxes():
                    await (await client.get(info.id)).remove()
                return await client.health()

        assert asyncio.run(leave())["status"] == "ok"
        assert daemon.stop() == 0
        assert not [
            line for line in daemon.log.read_text().splitlines() if "Traceback" in line or '"traceback"' in line
        ]
    finally:
        daemon.clean()
        gc.collect()  # what the fuzzer did not close is found here, and not in a test that comes later
