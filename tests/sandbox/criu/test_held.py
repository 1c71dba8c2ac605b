"""Processes whose state hangs on names, locks and stops: dump, kill, restore, compare, ask them from inside."""

from __future__ import annotations

import re

import pytest

from sandbox.errors import CheckpointFailed
from tests.support.checkpoint_programs import CHECK, UNIX
from tests.support.checkpoint_programs_held import ALL, UNIX_LISTENERS
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


@pytest.mark.parametrize(
    ("spoil", "mend", "said"),
    [
        ("ln /t/socket /t/other", "rm /t/other", r"several names.*/t/socket.*remove the others"),
        ("rm /t/d/socket; rmdir /t/d", "mkdir /t/d", r"gone with its directory.*/t/d/socket.*make the directory again"),
        ("rm /t/d/socket; rmdir /t/d; ln -s away /t/d", "mkdir /t/away", r"gone with its directory.*/t/d/socket"),
    ],
)
async def test_a_socket_whose_file_would_not_come_back_as_it_is_is_refused(
    bench: Bench, spoil: str, mend: str, said: str
) -> None:
    sb = await bench.maker.create()
    await shell(sb, UNIX_LISTENERS[0])
    await shell(sb, spoil)
    with pytest.raises(CheckpointFailed, match=said):
        await bench.save(sb)
    await shell(sb, mend)
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, CHECK) == "good\n"


async def test_a_socket_whose_file_was_moved_is_refused(bench: Bench) -> None:
    """CRIU would bind it by its old name: a file that is not in the checkpoint, and nobody behind the one that is."""
    sb = await bench.maker.create()
    await shell(sb, UNIX[0] + "; mv /t/socket /t/moved")
    with pytest.raises(CheckpointFailed, match=re.escape("/t/moved (bound as /t/socket)")) as caught:
        await bench.save(sb)
    assert "move it back" in caught.value.remedy
    await shell(sb, "mv /t/moved /t/socket")
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, CHECK) == "good\n"
