"""Nothing that a stranger packed, or changes while it is copied, reaches the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.errors import Invalid
from sandbox.image import oci
from sandbox.sdk.sources import context
from sandbox.tree import safe_path
from tests.hostile import treefuzz
from tests.support.daemon_host import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def check(cases: int) -> None:
    result = treefuzz.run(cases, seconds=7200, seed=cases)
    assert (result["escapes"], result["crashes"]) == ([], {})
    assert all(result[name] for name in ("taken", "refused", "packed", *treefuzz.KINDS))


def test_strangers_trees_reach_nothing_outside() -> None:
    check(400)


@pytest.mark.long
def test_many_strangers_trees_reach_nothing_outside() -> None:
    check(1_000_000)


def test_the_watcher_sees_what_leaves_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rule that follows links out of the tree, cases do reach the bait."""
    monkeypatch.setattr(treefuzz.mutate_trees, "RULES", (treefuzz.archive.Rules(resolve=0),))
    assert treefuzz.run(400, seconds=7200, seed=1)["escapes"]


def test_the_watcher_sees_what_is_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context whose links are followed is one that reads files of the host."""
    monkeypatch.setattr(context, "ON_HOST", 0)
    monkeypatch.setattr(treefuzz, "KINDS", {"contexts": treefuzz.KINDS["contexts"]})
    assert treefuzz.run(20_000, seconds=7200, seed=1)["escapes"]


def test_a_context_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    chosen = context.BuildContext.of(tmp_path)
    with pytest.raises(Invalid, match="cannot be read: File name too long"):
        chosen.select(["x" * 300], 1)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_text("x")
    result = chosen.select(["a"], 1)
    (tmp_path / "a/f").unlink()
    (tmp_path / "a").rmdir()
    (tmp_path / "a").symlink_to("/etc")
    with pytest.raises(Invalid, match="of the context cannot be read"):
        result.digest()


@pytest.mark.parametrize("text", [b'{"a": "\xe4"}', b"[" * 100_000, b"{"])
def test_a_document_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "index.json").write_bytes(text)
    with pytest.raises(Invalid, match="is no JSON"):
        oci.unpack(tmp_path, tmp_path / "tree")


def test_a_header_without_sense_is_a_damaged_archive(tmp_path: Path) -> None:
    header = treefuzz.mutate_trees.packed("f", b"", pax={"GNU.sparse.size": "x", "GNU.sparse.map": "1,x"})
    (tmp_path / "archive").write_bytes(header + bytes(1024))
    assert not oci.is_layout(tmp_path / "archive")
    (tmp_path / "tree").mkdir()
    with pytest.raises(Invalid, match="not a tar archive"):
        oci.unpack_root(tmp_path / "archive", tmp_path / "tree")


def test_an_entry_that_becomes_another_kind_ends_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first sight it is a file; when it is packed, a directory; when that is opened, a link."""
    (tmp_path / "a").write_text("x")
    entry = treefuzz.archive._Packer.entry

    def exchanged(*args: object) -> None:
        (tmp_path / "a").unlink()
        (tmp_path / "a").mkdir()
        entry(*args)  # type: ignore[arg-type]

    def replaced(*args: object, **named: object) -> int:
        (tmp_path / "a").rmdir()
        (tmp_path / "a").symlink_to("/etc")
        return safe_path.openat2(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(treefuzz.archive._Packer, "entry", exchanged)
    monkeypatch.setattr(treefuzz.archive, "openat2", replaced)
    with safe_path.directory(tmp_path) as root, pytest.raises(Invalid), open(os.devnull, "wb") as out:
        treefuzz.archive.pack(root, "/a", out)
