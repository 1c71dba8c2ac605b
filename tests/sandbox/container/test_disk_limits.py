"""Sandboxes where btrfs has no simple quotas, as before Linux 6.7: a limit is refused, all else works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.host.mounts import make_scratch
from sandbox.errors import Unsupported
from sandbox.messages import Limits
from sandbox.tree import btrfs, quota
from sandbox.tree.pool import BtrfsPool
from tests.support.container_support import Maker, shell


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BtrfsPool]:
    """A pool that was made without quotas, as a kernel that knows none leaves it."""

    def unknown(path: Path) -> None:
        raise Unsupported("btrfs cannot limit the disk space of a sandbox")

    monkeypatch.setattr(btrfs, "enable_quota", unknown)
    made = BtrfsPool(tmp_path / "state", size=1 << 28).ensure()
    yield made
    made.close()


async def test_a_sandbox_with_the_default_limit_runs(maker: Maker) -> None:
    sb = await maker.create()
    assert await shell(sb, "echo on > /file; cat /file") == "on\n"
    await sb.kill()
    await sb.remount(maker.tree(f"{sb.spec.id}-2"))
    await sb.start()
    assert await shell(sb, "test ! -e /file; echo on") == "on\n"


async def test_a_limit_that_is_asked_for_is_refused(maker: Maker) -> None:
    with pytest.raises(Unsupported, match="a disk limit of 20MiB cannot be kept") as refused:
        await maker.create(limits=Limits(disk="20MiB"))
    assert "leave the limit out" in refused.value.hint
    assert await shell(await maker.create(limits=Limits(disk=None)), "echo on") == "on\n"


def test_scratch_of_the_default_size_is_made_and_any_other_refused(pool: BtrfsPool) -> None:
    make_scratch(pool.sandboxes / "scratch", "1GiB")
    assert (pool.sandboxes / "scratch").is_dir()
    with pytest.raises(Unsupported, match="2GiB"):
        make_scratch(pool.sandboxes / "large", "2GiB")
    assert not (pool.sandboxes / "large").exists()


def test_trees_within_trees_are_removed(pool: BtrfsPool) -> None:
    btrfs.create_subvolume(pool.sandboxes / "outer")
    btrfs.create_subvolume(pool.sandboxes / "outer/inner")
    btrfs.delete_subvolume(pool.sandboxes / "outer")
    assert list(pool.sandboxes.iterdir()) == []
    assert quota.sweep(pool.sandboxes, []) == 0
