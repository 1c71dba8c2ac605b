"""btrfs by ioctl, the pool, images: against a real file system."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandbox import btrfs
from sandbox.errors import Conflict, ImageNotFound, Invalid, NoSpace, NotFound, Unsupported
from sandbox.image import ImageStore
from sandbox.pool import Pool
from tests.container_support import pool

__all__ = ["pool"]


def test_ensure_twice_and_close_leave_what_they_should(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = Pool(tmp_path / "state", size=256 << 20)
    made.ensure()
    made.create_tree(made.sandboxes / "a")
    Pool(tmp_path / "state").ensure()
    assert (made.sandboxes / "a/upper").is_dir()
    assert made.file.stat().st_blocks * 512 < 64 << 20  # sparse
    options = next(
        line for line in Path("/proc/self/mounts").read_text().splitlines() if line.split()[1] == str(made.path)
    )
    assert "noatime" in options
    loop = options.split()[0]
    made.close()
    made.close()
    assert not made.mounted()
    backing = subprocess.run(["losetup", "-j", str(made.file)], capture_output=True, text=True, check=True).stdout
    assert loop not in backing
    made.ensure()
    assert (made.sandboxes / "a/work").is_dir()
    made.close()


def test_no_space_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with pytest.raises(NoSpace, match="the pool needs 640 MiB"):
        Pool(tmp_path, size=1 << 20).ensure()
    assert not (tmp_path / "pool.btrfs").exists()


def test_subvolumes_and_snapshots(pool: Pool) -> None:
    source, copy = pool.sandboxes / "source", pool.checkpoints / "copy"
    btrfs.create_subvolume(source)
    try:
        (source / "a").write_text("one")
        assert btrfs.is_subvolume(source)
        assert not btrfs.is_subvolume(pool.sandboxes)
        btrfs.snapshot(source, copy, readonly=True)
        (source / "a").write_text("two")
        assert (copy / "a").read_text() == "one"
        with pytest.raises(OSError, match="Read-only"):
            (copy / "a").write_text("three")
        btrfs.set_readonly(copy, False)
        (copy / "a").write_text("three")
        with pytest.raises(Conflict):
            btrfs.create_subvolume(source)
        with pytest.raises(Conflict):
            btrfs.snapshot(source, copy, readonly=False)
        with pytest.raises(FileNotFoundError):
            btrfs.snapshot(pool.sandboxes / "none", pool.checkpoints / "x", readonly=True)
    finally:
        btrfs.delete_subvolume(source)
        btrfs.delete_subvolume(copy)
        btrfs.delete_subvolume(copy)
    assert not source.exists()


def test_not_btrfs_is_said(tmp_path: Path) -> None:
    if btrfs.is_btrfs(tmp_path):
        pytest.skip("the temporary directory is btrfs")
    with pytest.raises(Unsupported, match="not on btrfs"):
        btrfs.create_subvolume(tmp_path / "x")
    with pytest.raises(NotFound):
        raise btrfs._translate(FileNotFoundError(2, "no"), "snapshot", tmp_path)


def test_generation_tells_changed(pool: Pool) -> None:
    tree = pool.sandboxes / "generation"
    btrfs.create_subvolume(tree)
    try:
        btrfs.sync(tree)
        before = btrfs.generation(tree)
        (pool.sandboxes / "elsewhere").write_text("x")
        btrfs.sync(tree)
        assert btrfs.generation(tree) == before
        (tree / "a").write_text("x")
        btrfs.sync(tree)
        assert btrfs.generation(tree) > before
    finally:
        btrfs.delete_subvolume(tree)
        (pool.sandboxes / "elsewhere").unlink()


def test_added_bytes_count_what_is_new(pool: Pool) -> None:
    tree, first, second = pool.sandboxes / "grow", pool.checkpoints / "grow-1", pool.checkpoints / "grow-2"
    btrfs.create_subvolume(tree)
    try:
        (tree / "old").write_bytes(os.urandom(3 << 20))
        btrfs.flush(tree)
        btrfs.snapshot(tree, first, readonly=True)
        for number in range(300):
            (tree / f"small-{number}").write_bytes(b"x" * 100)  # inline
        (tree / "new").write_bytes(os.urandom(5 << 20))
        os.truncate(tree / "new", 50 << 20)  # a hole
        btrfs.flush(tree)
        btrfs.snapshot(tree, second, readonly=True)
        assert btrfs.added_bytes(first, None) == 3 << 20
        assert btrfs.added_bytes(second, first) == (5 << 20) + 300 * 100
        assert btrfs.added_bytes(second, None) == (8 << 20) + 300 * 100
        assert btrfs.added_bytes(second, second) == 0
    finally:
        for path in (tree, first, second):
            btrfs.delete_subvolume(path)


def test_image_from_a_directory(pool: Pool, tmp_path: Path) -> None:
    source = tmp_path / "root"
    (source / "bin").mkdir(parents=True)
    (source / "bin/tool").write_text("x")
    os.chown(source / "bin/tool", 7, 8)
    (source / "bin/tool").chmod(0o4755)
    (source / "dev").mkdir()
    (source / "dev/console").write_text("")
    os.mknod(source / "disk", 0o60660, os.makedev(7, 0))
    store = ImageStore(pool)
    tree = store.import_directory("dir-1", source)
    try:
        tool = (tree / "bin/tool").stat()
        assert (tool.st_mode & 0o7777, tool.st_uid, tool.st_gid) == (0o4755, 7, 8)
        assert not (tree / "disk").exists()
        assert list((tree / "dev").iterdir()) == []
        assert (tree / "tmp").stat().st_mode & 0o7777 == 0o1777
        assert "localhost" in (tree / "etc/hosts").read_text()
        assert store.list() == ["dir-1"]
        assert store.path("dir-1") == tree
        with pytest.raises(Conflict):
            store.import_directory("dir-1", source)
    finally:
        store.remove("dir-1")
    with pytest.raises(ImageNotFound, match="no image 'dir-1'; there are: none"):
        store.path("dir-1")
    assert list(pool.images.iterdir()) == []


def test_image_from_a_tar_cannot_leave_its_tree(pool: Pool, tmp_path: Path) -> None:
    archive, outside = tmp_path / "a.tar", tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(archive, "w") as tar:
        link = tarfile.TarInfo("escape")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("escape/file"))
    store = ImageStore(pool)
    try:
        store.import_tar("evil", archive)
    except Invalid as error:
        assert "tar failed" in str(error)
    else:
        store.remove("evil")
    assert list(outside.iterdir()) == []
    assert list(pool.images.iterdir()) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "UPPER", "-x", "x" * 65])
def test_image_names(pool: Pool, tmp_path: Path, name: str) -> None:
    store = ImageStore(pool)
    with pytest.raises(Invalid):
        store.import_directory(name, tmp_path)
    with pytest.raises(ImageNotFound):
        store.path(name)


def test_broken_archive_leaves_no_image(pool: Pool, tmp_path: Path) -> None:
    archive = tmp_path / "broken.tar"
    archive.write_bytes(b"not a tar" * 100)
    with pytest.raises(Invalid, match="tar failed"):
        ImageStore(pool).import_tar("broken", archive)
    assert list(pool.images.iterdir()) == []


def test_docker_without_engine(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(Unsupported, match="no Docker Engine answers"):
        ImageStore(pool).import_docker("busybox", "busybox:latest")
    assert list(pool.images.iterdir()) == []
