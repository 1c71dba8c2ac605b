"""Checkpoints while commands run, where pidfds do not tell exit codes (before Linux 6.15)."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.checkpoint_support import Bench, shell


async def test_a_command_that_runs_is_saved_and_its_exit_code_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.container.container._pidfd_tells_exit", lambda: False)
    sb = await bench.maker.create()
    assert (await sb.exec(["sh", "-c", "exit 4"])).exit_code == 4  # the notes are in the checkpoint, too
    await shell(sb, "mkfifo /end")
    running = asyncio.ensure_future(sb.exec(["sh", "-c", "echo begun > /begun; read code < /end; exit $code"]))
    await shell(sb, "until test -s /begun; do :; done")
    saved = await bench.save(sb)
    await shell(sb, "echo 3 > /end")
    assert (await running).exit_code == 3
    await bench.kill_and_restore(sb, saved, saved.capture.dir)
    assert await shell(sb, "pgrep -c -f '[r]ead code'") == "1\n"  # saved while it ran
    await shell(sb, "echo 7 > /end; while pgrep -f '[r]ead code'; do :; done")
    assert (await sb.exec(["sh", "-c", "exit 5"])).exit_code == 5
