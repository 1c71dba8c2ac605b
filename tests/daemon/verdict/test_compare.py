"""What changed in an upper but what rules ignore, on real directories: what is equal, what differs, what is unknown."""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon.verdict.compare import Bounds, Case, FileComparison, trees
from daemon.verdict.ignore import NOTHING, checked
from sandbox.messages.ignore import IgnoreRules
from sandbox.tree import btrfs
from sandbox.tree.pool import BtrfsPool

PATIENT = Bounds(seconds=60)
NOBODY = 0xFFFFFFFF


@pytest.fixture
def place(pool: BtrfsPool, tmp_path: Path) -> Iterator[Path]:
    """Links to three trees: `lower`, `before`, and `now`, a snapshot of `before` as the daemon makes them."""
    name = f"netting-{secrets.token_hex(4)}"
    lower, before, now = tmp_path / "lower", pool.sandboxes / name, pool.sandboxes / f"{name}.now"
    (lower / "etc").mkdir(parents=True)
    (lower / "etc/motd").write_text("hello\n")
    (lower / "etc/issue").write_text("issue\n")
    pool.create_tree(before)
    upper = before / "upper"
    (upper / "work/sub").mkdir(parents=True)
    (upper / "work/file").write_text("same\n")
    (upper / "work/other").write_text("other\n")
    (upper / "work/link").symlink_to("file")
    os.link(upper / "work/other", upper / "work/twin")
    os.mkfifo(upper / "work/fifo")
    os.setxattr(upper / "work/file", "user.mine", b"1")
    for name in ("work/fifo", "work/sub", "work", "."):
        os.utime(upper / name, (5, 5))
    btrfs.snapshot(before, now, readonly=False)
    (tmp_path / "before").symlink_to(upper)
    (tmp_path / "now").symlink_to(now / "upper")
    yield tmp_path
    btrfs.delete_subvolume(before)
    btrfs.delete_subvolume(now)


def outcome(place: Path, case: Case | None = None, *, bounds: Bounds | None = None, ignore: list[str] | None = None):
    rules = checked(IgnoreRules(paths=ignore or []))
    case = case or Case()
    return trees(
        (place / "before").resolve(),
        (place / "now").resolve(),
        [place / "lower"],
        case,
        rules=rules,
        bounds=bounds or PATIENT,
    )


_ENTRIES = struct.pack("<I" + 5 * "HHI", 2, 1, 6, NOBODY, 2, 4, 1, 4, 4, NOBODY, 16, 4, NOBODY, 32, 4, NOBODY)
ACL = ("system.posix_acl_access", _ENTRIES)
ACL_OF_CHILDREN = ("system.posix_acl_default", _ENTRIES)

SAME: dict[str, Callable[[Path], object]] = {
    "nothing": lambda now: None,
    "made and removed": lambda now: ((now / "work/new").write_text("x"), (now / "work/new").unlink()),
    "made and removed below": lambda now: ((now / "work/sub/new").write_text("x"), (now / "work/sub/new").unlink()),
    "overlay's own notes": lambda now: os.setxattr(now / "work", "trusted.overlay.impure", b"y"),
    "a directory copied up, as it was": lambda now: (now / "etc").mkdir(),
}

DIFFERENT: dict[str, Callable[[Path], object]] = {
    "rewritten with the same bytes": lambda now: (now / "work/file").write_text("same\n"),
    "replaced by the same": lambda now: _replace(now / "work/file", "same\n"),
    "a file copied up": lambda now: _copy_up(now),
    "other bytes": lambda now: (now / "work/file").write_text("else\n"),
    "longer": lambda now: (now / "work/file").write_text("same\nmore\n"),
    "a name more": lambda now: (now / "work/new").write_text(""),
    "a name less": lambda now: (now / "work/file").unlink(),
    "a directory more": lambda now: (now / "work/d").mkdir(),
    "a mode": lambda now: (now / "work/file").chmod(0o600),
    "a mode of a directory": lambda now: (now / "work").chmod(0o700),
    "a mode of the root": lambda now: now.chmod(0o700),
    "an owner": lambda now: os.chown(now / "work/file", 1, 1),
    "an owner of a link": lambda now: os.lchown(now / "work/link", 1, 1),
    "another target": lambda now: ((now / "work/link").unlink(), (now / "work/link").symlink_to("else")),
    "an attribute more": lambda now: os.setxattr(now / "work/file", "user.more", b"1"),
    "an attribute less": lambda now: os.removexattr(now / "work/file", "user.mine"),
    "an attribute of a directory": lambda now: os.setxattr(now / "work/sub", "user.more", b"1"),
    "an attribute of a directory's children": lambda now: os.setxattr(now / "work/sub", *ACL_OF_CHILDREN),
    "an attribute of a FIFO": lambda now: os.setxattr(now / "work/fifo", *ACL),
    "an attribute of a link": lambda now: os.setxattr(now / "work/link", "trusted.mine", b"1", follow_symlinks=False),
    "a hard link less": lambda now: (now / "work/twin").unlink(),
    "a hard link parted": lambda now: _replace(now / "work/twin", "other\n"),
    "another type": lambda now: ((now / "work/file").unlink(), (now / "work/file").mkdir()),
    "a hole": lambda now: _punched(now / "work/file"),
    "removed from the lower": lambda now: ((now / "etc").mkdir(), os.mknod(now / "etc/motd", 0o20000, 0)),
    "changed in the lower": lambda now: (_copy_up(now), (now / "etc/motd").write_text("HELLO\n")),
    "opaque": lambda now: (_copy_up(now), os.setxattr(now / "etc", "trusted.overlay.opaque", b"y")),
    "over the lower": lambda now: (_copy_up(now), (now / "etc/new").write_text("")),
}


def _replace(path: Path, text: str) -> None:
    other = path.with_name("temporary")
    other.write_text(text)
    shutil.copystat(path, other)
    other.rename(path)


def _copy_up(now: Path) -> None:
    (now / "etc").mkdir()
    (now / "etc/motd").write_text("hello\n")
    os.setxattr(now / "etc/motd", "trusted.overlay.origin", b"whence")


def _punched(path: Path) -> None:
    """Of the same bytes, but allocated otherwise."""
    path.write_bytes(b"")
    os.truncate(path, 5)


@pytest.mark.parametrize("name", SAME)
def test_the_same(place: Path, name: str) -> None:
    SAME[name](place / "now")
    result = outcome(place)
    assert result.equal, result


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(place: Path, name: str) -> None:
    DIFFERENT[name](place / "now")
    result = outcome(place)
    assert not result.equal and result.difference


DIRECTORIES = ["work/sub", "work", "."]


@pytest.mark.parametrize("name", DIRECTORIES)
def test_times_of_a_directory_matter_when_they_were_set_on_purpose(place: Path, name: str) -> None:
    os.utime((place / "now").resolve() / name, (1, 1))
    assert outcome(place).equal
    assert "time" in outcome(place, Case(times_set=True)).difference


@pytest.mark.parametrize("name", ["work/file", "work/link", "work/fifo"])
def test_a_time_of_a_file_counts(place: Path, name: str) -> None:
    os.utime((place / "now").resolve() / name, (1, 1), follow_symlinks=False)
    assert outcome(place).difference == f"/{name}: changed"


@pytest.mark.parametrize("name", DIRECTORIES)
def test_the_time_of_a_directory_may_have_been_set_to_the_present(place: Path, name: str) -> None:
    os.utime(place / "now" / name)
    assert outcome(place, Case(times_set=True)).equal  # names were made and removed in it
    assert "time" in outcome(place, Case(times_set=True, set_to_now=True)).difference


def test_times_of_a_directory_follow_from_names_made_and_removed(place: Path) -> None:
    for directory in ("now", "now/work", "now/work/sub"):
        (place / directory / "new").mkdir()
        (place / directory / "new").rmdir()
    assert outcome(place, Case(times_set=True)).equal


def test_a_time_set_of_a_directory_that_was_copied_up_counts(place: Path) -> None:
    (place / "now/etc").mkdir()
    status = os.stat(place / "lower/etc")
    os.utime(place / "now/etc", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert outcome(place, Case(times_set=True)).equal
    os.utime(place / "now/etc", (1, 1))
    assert "time" in outcome(place, Case(times_set=True)).difference


def test_a_mark_of_what_was_removed_is_always_the_same(place: Path) -> None:
    """Overlayfs makes all of them names of one inode, whose number of names and change time move with each."""
    for tree in ("before", "now"):
        (place / tree / "etc").mkdir()
        os.mknod(place / tree / "etc/motd", 0o20000, 0)
    os.link(place / "now/etc/motd", place / "now/etc/issue")
    assert outcome(place, ignore=["/etc/issue"]).equal
    assert "/etc/issue" in outcome(place).difference


@pytest.mark.parametrize("since", [1.0, -1.0])
def test_an_old_change_time_proves_that_nothing_followed(place: Path, since: float) -> None:
    """What was settled before the snapshot is not read; what was not is compared."""
    changed = os.stat(place / "now/work/file").st_ctime
    result = outcome(place, Case(taken_at=changed + since), bounds=Bounds(content=0, seconds=60))
    assert result.equal if since > 0 else "more than 0 bytes" in result.unknown


def test_without_a_snapshot_everything_new_counts(place: Path) -> None:
    empty, lower = place / "empty", [place / "lower"]
    empty.mkdir(mode=0o755)

    def result() -> FileComparison:
        return trees(None, empty, lower, Case(), rules=NOTHING, bounds=PATIENT)

    assert result().equal
    (empty / "etc").mkdir()
    assert result().equal  # a directory that was copied up
    (empty / "etc/new").write_text("")
    assert "/etc/new" in result().difference
    empty.chmod(0o700)
    assert result().difference.startswith("/:")


@pytest.mark.parametrize("bounds", [Bounds(entries=3), Bounds(content=3), Bounds(seconds=0)])
def test_beyond_the_bounds_nothing_is_known(place: Path, bounds: Bounds) -> None:
    result = outcome(place, bounds=bounds)
    assert not result.equal and result.unknown


def test_a_tree_that_is_gone_is_unknown(place: Path) -> None:
    assert trees(None, place / "gone", [place / "lower"], Case(), rules=NOTHING, bounds=PATIENT).unknown


def test_what_is_ignored_is_not_even_looked_at(place: Path) -> None:
    (place / "now/work/sub/cache").mkdir()
    (place / "now/work/sub/cache/x").write_text("x")
    assert not outcome(place).equal
    assert outcome(place, ignore=["/work/sub/cache/**"]).equal
    assert outcome(place, ignore=["**/cache/**"]).equal
    (place / "now/work/file").write_text("else\n")
    assert "/work/file" in outcome(place, ignore=["**/cache/**"]).difference


def test_a_link_leads_into_no_ignored_directory(place: Path) -> None:
    """What a program calls /cache/file lies elsewhere: it is matched where it lies."""
    (place / "now/cache").symlink_to("work")
    (place / "now/work/file").write_text("else\n")
    assert "/work/file" in outcome(place, ignore=["/cache/**"]).difference


def test_a_hard_link_out_of_an_ignored_directory_counts(place: Path) -> None:
    (place / "now/cache").mkdir()
    os.link(place / "now/work/file", place / "now/cache/file")
    (place / "now/cache/file").write_text("else\n")
    assert "/work/file" in outcome(place, ignore=["/cache/**"]).difference


def test_a_hint_ends_the_comparison_early_and_never_hides_anything(place: Path) -> None:
    new = place / "now/work/new"
    new.write_text("")
    before, now, lower = (place / "before").resolve(), (place / "now").resolve(), [place / "lower"]
    none, case = Bounds(entries=0, seconds=60), Case(taken_at=new.stat().st_ctime - 0.001)
    rules = checked(IgnoreRules(paths=["/work/new"]))
    assert trees(before, now, lower, case, rules=NOTHING, bounds=none).unknown
    hints = ["/work", "/nowhere", "/work/\0", "../x", "/work/new"]
    assert trees(before, now, lower, case, rules=NOTHING, bounds=none, hints=hints).difference == "/work/new: changed"
    assert trees(before, now, lower, Case(), rules=rules, bounds=PATIENT, hints=hints).equal
