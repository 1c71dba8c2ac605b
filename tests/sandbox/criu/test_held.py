"""Processes whose state hangs on names, locks and stops; test_processes.py dumps and restores them as all others."""

from __future__ import annotations

import re
import shutil

import msgspec
import pytest

from sandbox.criu.carried import other_names
from sandbox.errors import CheckpointFailed, RestoreFailed
from tests.support.checkpoint_programs import CHECK, UNIX
from tests.support.checkpoint_programs_held import ALL, UNIX_LISTENERS
from tests.support.checkpoint_support import Bench, shell


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
    assert "move it back" in caught.value.hint
    await shell(sb, "mv /t/moved /t/socket")
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, CHECK) == "good\n"


async def test_no_snapshot_has_the_links_that_criu_makes(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, ALL["half named"][0])
    names = "find /t | sort"
    before = await shell(sb, names)
    saved = await bench.save(sb)
    upper = saved.tree / "upper"
    assert "/t/second" in before
    result = {f"/{path.relative_to(upper)}" for path in (upper / "t").rglob("*")} | {"/t"}
    assert result == set(before.split())
    assert not list(upper.rglob("*link_remap*"))
    await sb.kill()
    await sb.remount(bench.snapshot(saved.tree, readonly=False))
    await bench.checkpointer.restore(sb, saved.dump)
    assert await shell(sb, names) == before


async def test_a_link_is_made_neither_over_a_file_nor_through_a_link(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, ALL["half named"][0])
    saved = await bench.save(sb)
    await sb.kill()
    for number, name in enumerate((b"/t/none", b"/t/../etc/passwd", b"t/second", b"/proc/1/exe", b"/through/second")):
        tree = bench.snapshot(saved.tree, readonly=False)
        (tree / "upper" / "through").symlink_to("/t")
        images = saved.capture.dir.with_name(f"renamed-{number}")
        shutil.copytree(saved.capture.dir, images)
        existing = other_names.decode((images / other_names.FILE).read_bytes())
        assert len(existing) >= 3
        (images / other_names.FILE).write_bytes(msgspec.msgpack.encode(dict.fromkeys(existing, name)))
        await sb.remount(tree)
        with pytest.raises(RestoreFailed):
            await bench.checkpointer.restore(sb, images)
        assert not [path for path in (tree / "upper").rglob("*link_remap*")]


async def test_what_was_linked_for_a_restore_that_failed_goes(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, ALL["half named"][0])
    saved = await bench.save(sb)
    await sb.kill()
    tree = bench.snapshot(saved.tree, readonly=False)
    (tree / "upper" / "t" / "two").write_text("of another size")
    await sb.remount(tree)
    with pytest.raises(RestoreFailed, match="bad size"):
        await bench.checkpointer.restore(sb, saved.capture.dir)
    assert not [path for path in (tree / "upper").rglob("*link_remap*")]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x90", b"\x81\x01\xc4\x01\0"])
def test_names_that_no_dump_wrote(content: bytes) -> None:
    with pytest.raises(ValueError):
        other_names.decode(content)
