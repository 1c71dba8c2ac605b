"""Git repositories that ADD names: which commit, which directory, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.errors import Invalid
from sandbox.sdk.sources import repository
from tests.support.git_server import GitServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitServer]:
    with GitServer(tmp_path_factory.mktemp("git")) as made:
        yield made


@pytest.mark.parametrize(
    ("fragment", "content", "which"), [("", "2\n", 1), ("#main", "2\n", 1), ("#old", "1\n", 0), ("#v1", "1\n", 0)]
)
def test_branches_and_tags(server: GitServer, tmp_path: Path, fragment: str, content: str, which: int) -> None:
    commit, top = repository.clone(f"{server.address}{fragment}", tmp_path, "", False)
    assert commit == server.commits[which] and (top / "file").read_text() == content
    assert (top / "link").is_symlink() and (top / "sub/deep/run").stat().st_mode & 0o111
    assert not (top / ".git").exists()


def test_a_commit_and_a_directory(server: GitServer, tmp_path: Path) -> None:
    commit, top = repository.clone(
        f"{server.address}#{server.commits[0]}:sub/deep", tmp_path, server.commits[0][:12], False
    )
    assert commit == server.commits[0] and [path.name for path in top.iterdir()] == ["run"]


def test_the_repository_itself_stays_where_it_is_wanted(server: GitServer, tmp_path: Path) -> None:
    _, top = repository.clone(server.address, tmp_path, "", True)
    assert (top / ".git/HEAD").is_file()


@pytest.mark.parametrize(
    ("fragment", "commit", "message"),
    [
        ("#nosuch", "", "git: "),
        ("#main:nosuch", "", "there is no directory nosuch"),
        ("#main:../..", "", "there is no directory"),
        ("#main:file", "", "there is no directory file"),
        ("#main", "0" * 40, "is the commit"),
        ("#--upload-pack=x", "", "git: "),
    ],
)
def test_what_is_not_there_is_refused(
    server: GitServer, tmp_path: Path, fragment: str, commit: str, message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        repository.clone(f"{server.address}{fragment}", tmp_path, commit, False)
