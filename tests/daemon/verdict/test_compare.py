"""The comparison of two uppers over one lower, on real directories: what is equal, what differs, what is unknown."""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.verdict.compare import Bounds, Case, Facts, compare, trees
from daemon.verdict.ignore import checked
from sandbox.messages.ignore import IgnoreRules
from sandbox.tree import btrfs
from sandbox.tree.pool import Pool

PATIENT = Bounds(seconds=60)
NOBODY = 0xFFFFFFFF
MOVING = ["work/fifo", "work/sub", "work", "."]


@pytest.fixture
def place(pool: Pool, tmp_path: Path) -> Iterator[Path]:
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
    for name in MOVING:
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
        place / "lower",
        case,
        rules=rules,
        bounds=bounds or PATIENT,
    )


_ENTRIES = struct.pack("<I" + 5 * "HHI", 2, 1, 6, NOBODY, 2, 4, 1, 4, 4, NOBODY, 16, 4, NOBODY, 32, 4, NOBODY)
ACL = ("system.posix_acl_access", _ENTRIES)
ACL_OF_CHILDREN = ("system.posix_acl_default", _ENTRIES)

SAME: dict[str, Callable[[Path], object]] = {
    "nothing": lambda now: None,
    "rewritten with the same bytes": lambda now: (now / "work/file").write_text("same\n"),
    "replaced by the same": lambda now: _replace(now / "work/file", "same\n"),
    "made and removed": lambda now: ((now / "work/new").write_text("x"), (now / "work/new").unlink()),
    "made and removed below": lambda now: ((now / "work/sub/new").write_text("x"), (now / "work/sub/new").unlink()),
    "overlay's own notes": lambda now: os.setxattr(now / "work", "trusted.overlay.impure", b"y"),
    "copied up, as it was": lambda now: _copy_up(now),
}

DIFFERENT: dict[str, Callable[[Path], object]] = {
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
    found = outcome(place)
    assert found.equal, found


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(place: Path, name: str) -> None:
    DIFFERENT[name](place / "now")
    found = outcome(place)
    assert not found.equal and found.difference


@pytest.mark.parametrize("name", ["work/file", "work/link", *MOVING])
def test_times_matter_when_they_were_set_on_purpose(place: Path, name: str) -> None:
    os.utime((place / "now").resolve() / name, (1, 1), follow_symlinks=False)
    assert outcome(place).equal
    assert "time" in outcome(place, Case(strict=True)).difference


@pytest.mark.parametrize("name", MOVING)
def test_the_time_of_a_directory_may_have_been_set_to_the_present(place: Path, name: str) -> None:
    os.utime(place / "now" / name)
    assert outcome(place, Case(strict=True)).equal  # names were made and removed in it, or bytes went through it
    assert "time" in outcome(place, Case(strict=True, set_to_now=True)).difference


def test_times_of_a_directory_follow_from_names_made_and_removed(place: Path) -> None:
    for folder in ("now", "now/work", "now/work/sub"):
        (place / folder / "new").mkdir()
        (place / folder / "new").rmdir()
    assert outcome(place, Case(strict=True)).equal


def test_a_time_set_in_the_lower_counts(place: Path) -> None:
    _copy_up(place / "now")
    for name in ("etc", "etc/motd"):
        status = os.stat(place / "lower" / name)
        os.utime(place / "now" / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = place / "lower/etc/motd", place / "now/etc/motd"
    assert os.stat(before[0]).st_mtime_ns == os.stat(before[1]).st_mtime_ns
    os.utime(place / "now/etc", (1, 1))
    assert "time" in outcome(place, Case(strict=True)).difference
    assert outcome(place).equal


def test_a_whiteout_has_no_times(place: Path) -> None:
    for tree in ("before", "now"):
        (place / tree / "etc").mkdir()
        os.mknod(place / tree / "etc/motd", 0o20000, 0)
    os.utime(place / "now/etc/motd", (1, 1))
    status = os.stat(place / "before/etc")
    os.utime(place / "now/etc", ns=(status.st_atime_ns, status.st_mtime_ns))
    arguments = ((place / "before").resolve(), (place / "now").resolve(), place / "lower", Case(strict=True))
    assert trees(*arguments, bounds=PATIENT, hints=["/etc/motd"]).equal


def test_another_inode_is_another_file_while_somebody_may_hold_the_old_one(place: Path) -> None:
    assert outcome(place, Case(replaced=False)).equal
    _replace(place / "now/work/file", "same\n")
    assert outcome(place).equal
    assert "another file" in outcome(place, Case(replaced=False)).difference


def test_without_a_snapshot_everything_new_counts(place: Path) -> None:
    empty = place / "empty"
    empty.mkdir(mode=0o755)
    lower = place / "lower"
    assert trees(None, empty, lower, Case(), bounds=PATIENT).equal
    (empty / "etc").mkdir()
    assert trees(None, empty, lower, Case(), bounds=PATIENT).equal  # a directory that was copied up
    (empty / "etc/new").write_text("")
    assert "/etc/new" in trees(None, empty, lower, Case(), bounds=PATIENT).difference
    empty.chmod(0o700)
    assert trees(None, empty, lower, Case(), bounds=PATIENT).difference.startswith("/:")


@pytest.mark.parametrize("bounds", [Bounds(entries=3), Bounds(content=3), Bounds(seconds=0)])
def test_beyond_the_bounds_nothing_is_known(place: Path, bounds: Bounds) -> None:
    found = outcome(place, bounds=bounds)
    assert not found.equal and found.unknown


def test_a_tree_that_is_gone_is_unknown(place: Path) -> None:
    assert trees(None, place / "gone", place / "lower", Case(), bounds=PATIENT).unknown


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


facts = st.builds(
    Facts,
    inode=st.integers(1, 2),
    mode=st.sampled_from([0o100644, 0o100600, 0o40755, 0o120777, 0o20000]),
    uid=st.integers(0, 1),
    gid=st.integers(0, 1),
    device=st.integers(0, 1),
    size=st.integers(0, 2),
    links=st.integers(1, 2),
    blocks=st.integers(0, 1),
    modified=st.integers(1, 2),
    changed=st.integers(1, 2),
)


@given(
    facts,
    facts,
    st.builds(
        Case,
        strict=st.booleans(),
        set_to_now=st.booleans(),
        replaced=st.booleans(),
        taken_at=st.sampled_from([0.0, 9.0]),
    ),
)
def test_nothing_is_the_same_unseen_unless_its_old_change_time_proves_it(one: Facts, two: Facts, case: Case) -> None:
    found = compare(one, two, case)
    if found == "same":
        assert one == replace(two, blocks=one.blocks) and case.taken_at
    if found in ("same", "look"):
        assert (one.mode, one.uid, one.gid) == (two.mode, two.uid, two.gid)
        if not one.directory:
            assert one.links == two.links
        if case.strict and not one.moves:
            assert one.modified == two.modified
        if one.moves and (case.set_to_now or (case.strict and two.modified != two.changed)):
            assert one.modified == two.modified


def test_a_hint_ends_the_comparison_early_and_never_hides_anything(place: Path) -> None:
    (place / "now/work/new").write_text("")
    arguments = ((place / "before").resolve(), (place / "now").resolve(), place / "lower", Case())
    none = Bounds(entries=0, seconds=60)
    assert trees(*arguments, bounds=none).unknown
    assert "/work/new: new" in trees(*arguments, bounds=none, hints=["/etc/motd", "/work/file", "/work/new"]).difference
    assert "/work/new" in trees(*arguments, bounds=PATIENT, hints=["/nowhere", "/work/\0", "../x"]).difference
    rules = checked(IgnoreRules(paths=["/work/new"]))
    assert trees(*arguments, bounds=PATIENT, rules=rules, hints=["/work/new"]).equal
