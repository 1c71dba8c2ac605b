"""The fingerprint of what processes hold: any difference of it is told, and nothing else is."""

from __future__ import annotations

import stat

from hypothesis import given
from hypothesis import strategies as st

from sandbox.criu.open_files import Identity, OpenFiles

KINDS = st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR])
SMALL = st.integers(1, 3)
IDENTITIES: st.SearchStrategy[Identity] = st.tuples(SMALL, KINDS, SMALL, SMALL, st.integers(0, 2))
PATHS = st.builds("".join, st.tuples(st.sampled_from(["/a", "/b", "/b/c"]), st.sampled_from(["", " (deleted) 7"])))
FILES = st.dictionaries(PATHS, st.tuples(IDENTITIES, st.none() | IDENTITIES), max_size=4)


@given(FILES, FILES)
def test_whatever_differs_is_told_by_its_path(before: dict, after: dict) -> None:
    reported = OpenFiles(before).changes(OpenFiles(after))
    differing = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert {line.rpartition(": ")[0] for line in reported} == differing
    assert OpenFiles(before).changes(OpenFiles(before)) == []


@given(FILES)
def test_files_that_lost_one_of_several_names_are_found(files: dict) -> None:
    for path in OpenFiles(files).half_named():
        inode, mode, _, _, names = files[path][0]
        assert inode and names and stat.S_ISREG(mode) and path.endswith("(deleted) 7")
    assert OpenFiles({"/a (deleted) 7": ((7, stat.S_IFREG, 0, 0, 1), None)}).half_named() == ["/a (deleted) 7"]
