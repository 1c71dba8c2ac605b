"""Processes whose state hangs on names, locks and stops: dump, kill, restore, compare, ask them from inside."""

from __future__ import annotations

import pytest

from tests.support.checkpoint_programs_held import ALL
from tests.support.checkpoint_support import Bench, shell


@pytest.mark.parametrize("name", list(ALL))
async def test_what_is_restored_equals_and_goes_on(bench: Bench, name: str) -> None:
    start, check = ALL[name]
    sb = await bench.maker.create()
    await shell(sb, start)
    saved = await bench.save(sb)
    assert await shell(sb, check) == "good\n"  # left running
    for source in (saved.capture.dir, saved.dump):
        await bench.kill_and_restore(sb, saved, source)
        assert await shell(sb, check) == "good\n"


@pytest.mark.parametrize("name", ["locks", "sqlite", "stopped"])
async def test_what_is_restored_without_comparison_goes_on(bench: Bench, name: str) -> None:
    start, check = ALL[name]
    sb = await bench.maker.create()
    await shell(sb, start)
    for _ in range(4):
        saved = await bench.save(sb)
        await sb.kill()
        await sb.remount(bench.snapshot(saved.tree, readonly=False))
        await bench.checkpointer.restore(sb, saved.capture.dir)
        assert await shell(sb, check) == "good\n"
