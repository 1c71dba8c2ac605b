"""A restored state that differs from its checkpoint is named, and the sandbox lives on in it."""

from __future__ import annotations

import pytest

from sandbox import Sandbox
from sandbox.criu.carried import settings
from sandbox.errors import NotEqual
from tests.support.daemon_host import Daemon

REAL_TIME = 1 << 13  # a class of input and output that a program in a sandbox cannot have: it is not restored


async def test_a_failed_comparison_leaves_a_living_sandbox(sb: Sandbox, daemon: Daemon) -> None:
    await sb.exec("echo kept > /kept; sleep 1000 >/dev/null 2>&1 &")
    saved = await sb.checkpoint(wait="durable")  # its images stay where they are now
    changed = settings.KernelSettings(tasks=[settings.TaskSettings(thread=1, io_priority=REAL_TIME)])
    images = [path.parent for path in daemon.run.rglob("pstree.img")]
    assert images
    for directory in images:
        (directory / settings.FILE).unlink(missing_ok=True)
        settings.write(directory, changed)
    with pytest.raises(NotEqual, match="io_priority") as raised:
        await sb.restore(saved, verify=True)
    assert "runs in this state" in raised.value.hint
    assert (await sb.exec("cat /kept")).text == "kept\n"
    again = await sb.checkpoint()
    await sb.restore(again)
