"""Each thing that a file tree consists of makes a difference when it differs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.differences import differences
from sandbox.tree import facts

WHEN = (10**18, 10**18)


def make(root: Path) -> Path:
    upper = root / "upper"
    (upper / "d").mkdir(parents=True)
    (upper / "f").write_bytes(b"content")
    with open(upper / "sparse", "wb") as file:
        file.truncate(4 << 20)
        file.write(b"begin")
    os.link(upper / "f", upper / "d" / "second")
    os.symlink("f", upper / "l")
    os.mkfifo(upper / "p")
    for path in (*upper.rglob("*"), upper):
        os.utime(path, ns=WHEN, follow_symlinks=False)
    return upper


def _fill(upper: Path) -> None:
    with open(upper / "sparse", "r+b") as file:
        file.write(b"begin".ljust(4 << 20, b"\0"))


def _unlink(upper: Path) -> None:
    (upper / "d" / "second").unlink()
    (upper / "d" / "second").write_bytes(b"content")


def _aim(upper: Path) -> None:
    (upper / "l").unlink()
    os.symlink("d", upper / "l")


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda upper: (upper / "f").write_bytes(b"Content"),
    "data": _fill,  # the same bytes without a hole
    "same file as": _unlink,
    "target": _aim,
    "mode": lambda upper: (upper / "p").chmod(0o600),
    "xattrs": lambda upper: os.setxattr(upper / "f", "user.x", b"y"),
    "absent": lambda upper: (upper / "new").touch(),
}


@pytest.mark.parametrize("word", CHANGES)
def test_a_change_of_the_tree_is_a_difference(tmp_path: Path, word: str) -> None:
    before, after = make(tmp_path / "a"), make(tmp_path / "b")
    assert differences(facts.tree(before), facts.tree(after)) == []
    assert facts.tree_differences(before, after) == []
    CHANGES[word](after)
    for path in (*after.rglob("*"), after):
        os.utime(path, ns=WHEN, follow_symlinks=False)
    result = differences(facts.tree(before), facts.tree(after))
    assert result and all(word in line for line in result), result
    assert len(result := facts.tree_differences(before, after)) and all(word in line for line in result), result
