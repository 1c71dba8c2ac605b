"""No archive reaches the host, however damaged, while the tree that it is unpacked into changes."""

from __future__ import annotations

import os

import pytest

from tests.hostile import treefuzz

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def check(cases: int) -> None:
    result = treefuzz.run(cases, seconds=7200, seed=cases)
    assert (result["escapes"], result["crashes"]) == ([], {})
    assert result["taken"] and result["refused"] and result["packed"]


def test_archives_reach_nothing_outside() -> None:
    check(400)


@pytest.mark.long
def test_many_archives_reach_nothing_outside() -> None:
    check(1_000_000)


def test_the_watcher_sees_what_leaves_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rule that follows links out of the tree, cases do reach the bait."""
    monkeypatch.setattr(treefuzz, "RULES", (treefuzz.archive.Rules(resolve=0),))
    assert treefuzz.run(400, seconds=7200, seed=1)["escapes"]
