"""Directories of the host that a sandbox sees: read-only or to be written, through dumps, restores and forks."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.container.container import Bind
from sandbox.errors import Unsupported
from tests.support.checkpoint_support import Bench, shell


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """CRIU reaches the sources by path with the rights of the sandbox, so every directory above lets it pass."""
    path = Path(f"/tmp/pagurus-test-{secrets.token_hex(4)}")
    path.mkdir(mode=0o711)
    yield path
    shutil.rmtree(path)


async def test_binds_are_seen_and_survive_a_restore(bench: Bench, tmp_path: Path, run_dir: Path) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    data.mkdir()
    scratch.mkdir()
    (data / "big").write_text("shared\n")
    binds = (Bind(data, "/srv/data/deep"), Bind(scratch, "/scratch", read_only=False))
    container = await bench.maker.create(binds=binds, run_dir=run_dir / "s")
    assert await shell(container, "cat /srv/data/deep/big; stat -c %u /srv/data/deep/big") == "shared\n0\n"
    assert "Read-only" in await shell(container, "touch /srv/data/deep/x 2>&1; true")
    assert "denied" in await shell(container, "umount /scratch 2>&1 || echo denied; true")
    await shell(
        container,
        "echo mine > /scratch/f; mknod /scratch/n c 1 3 2>/dev/null; (sleep 1000 </dev/null >/dev/null 2>&1 &)",
    )
    assert (scratch / "f").read_text() == "mine\n" and (scratch / "f").stat().st_uid == 0
    await shell(container, "(cd /scratch; exec 7</srv/data/deep/big; sleep 1001 <&7 >/dev/null 2>&1 &)")
    await shell(container, "until test $(cat /proc/[0-9]*/stat | grep -c '(sleep) S') = 2; do :; done")
    saved = await bench.save(container)
    await shell(container, "echo later > /scratch/g; pkill sleep")
    await bench.kill_and_restore(container, saved, saved.dump)
    assert (
        await shell(container, "cat /scratch/f /scratch/g /srv/data/deep/big; pgrep -c sleep")
        == "mine\nlater\nshared\n2\n"
    )
    assert "Read-only" in await shell(container, "touch /srv/data/deep/x 2>&1; true")


async def test_a_bind_never_lands_outside_the_tree(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    binds = (Bind(tmp_path / "data", "/srv/data"),)
    container = await bench.maker.create(binds=binds)
    await container.kill()
    upper = container.tree / "upper"
    os.rmdir(upper / "srv/data")
    os.symlink("/etc", upper / "srv/data")
    with pytest.raises(Unsupported):
        await container.remount(container.tree)
        await container.start()


async def test_a_source_that_is_missing_is_an_error(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="mount source"):
        await bench.maker.create(binds=(Bind(tmp_path / "none", "/x"),))
