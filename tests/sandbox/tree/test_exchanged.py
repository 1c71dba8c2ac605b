"""Names that become links while what they named is given its owner, mode and attributes."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import Invalid
from sandbox.messages import CopyRequest
from sandbox.tree import archive, host_files, safe_path
from sandbox.tree.copy_into import TargetTree, copy_into

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
XATTR = "user.brought"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "victim"
    made.mkdir(mode=0o751)
    yield made
    assert stat.S_IMODE(made.stat().st_mode) == 0o751 and not os.listxattr(made)


@pytest.fixture
def tree(tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is made in it becomes a link to the victim as soon as it has its owner."""
    made, chown = tmp_path / "tree", os.chown
    made.mkdir()

    def exchanged(path: Any, *owner: int, **named: Any) -> None:
        chown(path, *owner, **named)
        (entry,) = made.iterdir()
        entry.rename(tmp_path / "moved")
        entry.symlink_to(victim)

    monkeypatch.setattr(os, "chown", exchanged)
    return made


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_an_archive_changes_nothing_else(tree: Path, kind: bytes) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("entry")
        member.type, member.mode = kind, 0o4777
        member.pax_headers = {f"SCHILY.xattr.{XATTR}": "x"}
        tar.addfile(member)
    packed.seek(0)
    with safe_path.directory(tree) as root, pytest.raises(Invalid):
        archive.unpack(packed, root, limit=1 << 20, rules=archive.ROOT)
    assert (tree / "entry").is_symlink()


def test_a_file_replaces_a_link_that_an_earlier_download_brought(tmp_path: Path) -> None:
    victim, into = tmp_path / "victim", tmp_path / "into"
    victim.write_text("precious")
    into.mkdir()
    (into / "reward.txt").symlink_to(victim)
    for content in (b"1", b"0"):
        host_files.write(into / "reward.txt", content)
        assert (into / "reward.txt").read_bytes() == content and not (into / "reward.txt").is_symlink()
    assert victim.read_text() == "precious" and [path.name for path in into.iterdir()] == ["reward.txt"]
    (tmp_path / "link").symlink_to(into)
    with pytest.raises(Invalid, match="symbolic link"):
        host_files.write(tmp_path / "link" / "x", b"")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_copy_changes_nothing_else(tree: Path, kind: str) -> None:
    source = tree.parent / "source"
    source.mkdir()
    if kind == "file":
        (source / "entry").touch()
    else:
        (source / "entry").mkdir()
    os.setxattr(source / "entry", XATTR, b"x")
    request = CopyRequest(sources=["entry"], target="/entry", mode="4777", owner="0:0")
    with safe_path.directory(source) as one, safe_path.directory(tree) as other, pytest.raises(Invalid):
        copy_into(one, TargetTree(other, 0), request, limit=1 << 20)
    assert (tree / "entry").is_symlink()


@pytest.mark.parametrize("where", ["exclude", "sources"])
def test_a_pattern_that_is_none_is_refused(tree: Path, where: str) -> None:
    request = CopyRequest(**{"sources": ["."], "target": "/", where: ["["]})  # type: ignore[arg-type]
    with safe_path.directory(tree) as one, pytest.raises(Invalid, match="a class of characters has no end"):
        copy_into(one, TargetTree(one, 0), request, limit=1 << 20)
