"""State equality: a canonical form of a file tree, and how two trees differ.

Compared: names, type, mode, owner, extended attributes (ACLs and capabilities among them), size, content, where data
and holes lie, times of modification, targets of links, devices, which names are one file.
Not compared: ctime and atime, bookkeeping xattrs of overlayfs.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sandbox.differences import SHOWN, Facts, differences
from sandbox.errors import Invalid
from sandbox.tree import safe_path, sparse
from sandbox.tree.holes import data_ranges
from sandbox.tree.walk import walk

MAX_PATHS = 256 << 20  # bytes of all paths of a tree whose canonical form is made


def tree(upper: Path) -> Facts:
    """The canonical form of a file tree that does not change. Blocks; reads all data of every file."""
    linked: dict[int, str] = {}
    left = MAX_PATHS
    with safe_path.directory(upper) as root:
        facts: Facts = {"file /": _root(root)}
        for step in walk(root):
            path = f"/{step.path}"
            left -= len(path)
            if left < 0:
                raise Invalid(
                    f"the paths of its files are longer than {MAX_PATHS >> 20} MiB together",
                    hint="remove files, or shorten their paths",
                )
            (holder,), (result,) = step.parents, step.result
            facts[f"file {path}"] = _entry(holder, step.name, result, linked, path)
    return facts


def tree_differences(before: Path, after: Path) -> list[str]:
    """What differs between two trees that do not change, as `differences` returns it. Blocks; reads what may differ."""
    lines: list[str] = []
    linked: tuple[dict[int, str], dict[int, str]] = ({}, {})
    with safe_path.directory(before) as one, safe_path.directory(after) as other:
        lines += differences({"file /": _root(one)}, {"file /": _root(other)})
        for number, step in enumerate(walk(one, other)):
            if _untouched(*step.result):
                continue
            sides: list[Facts] = []
            for holder, result, links in zip(step.parents, step.result, linked, strict=True):
                sides.append(_entry(holder, step.name, result, links, f"number {number}") if result is not None else {})
            if sides[0] == sides[1]:
                continue
            if not all(sides):
                step.enter = [False, False]  # its content is missing as well: named once
            if len(lines) > SHOWN:
                return [*lines[:SHOWN], "and more"]
            key = f"file /{step.path}"
            lines += differences(*({key: side} if side else {} for side in sides))
    return lines


def _untouched(before: os.stat_result | None, after: os.stat_result | None) -> bool:
    """Whether a file of one snapshot is still that of another, so that its data need not be read.

    A snapshot keeps inode numbers and times of change, which whatever touches a file renews and no program can set.
    """
    if before is None or after is None or not stat.S_ISREG(before.st_mode) or before.st_nlink > 1:
        return False
    return all(getattr(before, name) == getattr(after, name) for name in _SAME)


_SAME = ("st_ino", "st_ctime_ns", "st_mtime_ns", "st_size", "st_blocks", "st_mode", "st_uid", "st_gid", "st_nlink")


def _root(root: int) -> Facts:
    result = os.fstat(root)
    owner = (result.st_uid, result.st_gid)
    return {"mode": oct(result.st_mode), "owner": owner, "xattrs": _xattrs(root), "mtime": result.st_mtime_ns}


def _entry(holder: int, name: str, result: os.stat_result | None, linked: dict[int, str], label: str) -> Facts:
    assert result is not None  # the tree does not change
    fact: Facts = {"mode": oct(result.st_mode), "owner": (result.st_uid, result.st_gid)}
    fact["xattrs"] = _xattrs(safe_path.named(holder, name))
    if stat.S_ISREG(result.st_mode):
        with safe_path.regular(holder, name) as file:
            data = list(data_ranges(file))
            fact.update(size=result.st_size, mtime=result.st_mtime_ns, content=sparse.of_file(file).hex(), data=data)
        if result.st_nlink > 1:
            fact["same file as"] = linked.setdefault(result.st_ino, label)
    elif stat.S_ISLNK(result.st_mode):
        fact.update(target=os.readlink(name, dir_fd=holder), mtime=result.st_mtime_ns)
    elif stat.S_ISCHR(result.st_mode) or stat.S_ISBLK(result.st_mode):
        fact.update(device=result.st_rdev)  # 0 is overlayfs' mark of a deleted lower file
    else:
        fact.update(mtime=result.st_mtime_ns)
    return fact


def _xattrs(of: int | str) -> dict[str, str]:
    retained = {}
    follow = isinstance(of, int)
    for name in os.listxattr(of, follow_symlinks=follow):
        if name.startswith("trusted.overlay.") and name.rpartition(".")[2] in ("origin", "impure", "uuid", "nlink"):
            continue
        retained[name] = os.getxattr(of, name, follow_symlinks=follow).hex()
    return retained
