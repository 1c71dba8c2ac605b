"""Keys of build steps, what a context holds, which kept steps are given up. No sandboxes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.catalogue import RetainedStep
from daemon.store.build_cache import surplus
from sandbox.errors import Invalid
from sandbox.image.dockerfile import parse
from sandbox.image.stages import Action, CopyInstruction, RunAction
from sandbox.messages import Limits, Network
from sandbox.patterns import PatternList
from sandbox.sdk.plan import needed, references, step_key
from sandbox.sdk.sources.context import BuildContext

RUN = RunAction(("make",), {"A": "1"}, "/w", "")
COPY = CopyInstruction(("a", "b"), "/to/")


def key(
    action: Action = RUN,
    *,
    parent: str = "p",
    content: str = "",
    network: Network | None = None,
    limits: Limits | None = None,
) -> str:
    return step_key(parent, action, content=content, network=network or Network.none(), limits=limits or Limits())


def test_what_a_command_runs_with_is_in_its_key() -> None:
    others = [
        key(parent="q"),
        key(replace(RUN, command=("make all",))),
        key(replace(RUN, variables={"A": "2"})),
        key(replace(RUN, variables={"A": "1", "B": ""})),
        key(replace(RUN, workdir="/x")),
        key(replace(RUN, user="nobody")),
        key(replace(RUN, network="none")),
        key(network=Network.open()),
        key(limits=Limits(cpus=2)),
        key(content="1"),
    ]
    assert len({key(), *others}) == 1 + len(others)


def test_what_is_copied_and_how_is_in_the_key_of_a_copy() -> None:
    others = [
        key(COPY, content="1"),
        key(COPY, content="2"),
        key(replace(COPY, add=True), content="1"),
        key(replace(COPY, target="/other/"), content="1"),
        key(replace(COPY, owner="7"), content="1"),
        key(replace(COPY, documents=(("a", "text"),)), content="1"),
    ]
    assert len(set(others)) == len(others)
    assert key(COPY, content="1") == key(COPY, content="1", network=Network.open())


def test_stages_that_are_needed() -> None:
    stages = parse(
        "FROM a AS one\nFROM one AS two\nFROM b\nFROM c\nCOPY --from=two x y\nRUN --mount=from=2,target=/x true\nFROM d"
    ).stages
    bases = [stage.base for stage in stages]
    assert needed(stages, bases, 3) == {0, 1, 2, 3} and needed(stages, bases, 4) == {4}
    assert references(stages[3]) == ["two", "2"]


def test_a_digest_is_of_what_is_copied(tmp_path: Path) -> None:
    root = tmp_path / "context"
    (root / "app/sub").mkdir(parents=True)
    (root / "app/file").write_text("text")
    (root / "app/link").symlink_to("file")
    (root / "app/skipped").write_text("secret")
    (root / ".dockerignore").write_text("app/skipped\n")

    def digest() -> str:
        return BuildContext.of(root).select(["app"], 4).digest()

    first = digest()
    os.utime(root / "app/file", (1, 1))
    (root / "app/skipped").write_text("another secret")
    (root / "alongside").write_text("not copied")
    assert digest() == first
    changes = [
        lambda: (root / "app/file").write_text("texts"),
        lambda: (root / "app/file").chmod(0o755),
        lambda: (root / "app/file").rename(root / "app/other"),
        lambda: (root / "app/empty").mkdir(),
        lambda: ((root / "app/link").unlink(), (root / "app/link").symlink_to("other")),
        lambda: (root / "app/sub").rmdir(),
        lambda: os.mkfifo(root / "app/fifo"),  # never opened
    ]
    observed = {first}
    for change in changes:
        change()
        observed.add(digest())
    assert len(observed) == 1 + len(changes)
    assert [*BuildContext.of(root).select(["app"], 4).entries] == [
        "app",
        "app/empty",
        "app/fifo",
        "app/link",
        "app/other",
    ]


def test_what_sources_reach(tmp_path: Path) -> None:
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "src/app.py").write_text("")
    (tmp_path / "src/deep/x.txt").write_text("")
    (tmp_path / "link").symlink_to("/src/deep")
    (tmp_path / "outside").symlink_to("/etc/passwd")

    def reached(source: str, *patterns: str) -> list[str]:
        return [*BuildContext(tmp_path, PatternList(patterns)).select([source], 4).entries]

    assert reached("src/app.py") == ["src", "src/app.py"]
    assert reached("../../src/app.py") == ["src", "src/app.py"]
    assert reached("*/*.py") == ["src", "src/app.py"] and reached("*.none") == []
    assert reached("link") == ["link", "src", "src/deep", "src/deep/x.txt"]
    assert reached(".", "*", "!src/app.py") == ["src", "src/app.py"]
    assert reached("/", "**/*.txt", "link", "outside") == ["src", "src/app.py", "src/deep"]
    assert reached("src", ".dockerignore", "src/deep") == ["src", "src/app.py"]
    for wrong in ("none", "outside", "src/app.py/x"):
        with pytest.raises(Invalid, match=f"line 4: {wrong} is not in the context"):
            reached(wrong)
    with pytest.raises(Invalid) as caught:
        reached("src/app.py", "src")
    assert "dockerignore" in caught.value.hint


_STEPS = st.lists(
    st.builds(RetainedStep, key=st.uuids().map(str), size=st.integers(0, 9), used_at=st.floats(0, 100)), max_size=12
)


@given(_STEPS, st.integers(0, 12), st.integers(0, 40), st.floats(0, 120))
def test_what_is_given_up_is_what_was_used_longest_ago(
    steps: list[RetainedStep], limit: int, size: int, age: float
) -> None:
    gone = surplus(steps, 100.0, limit=limit, size=size, unused=age)
    retained = [step for step in steps if step.key not in gone]
    assert len(retained) <= limit and sum(step.size for step in retained) <= size
    assert all(100.0 - step.used_at <= age for step in retained)
    if retained and gone:
        newest_gone = max(step.used_at for step in steps if step.key in gone)
        assert newest_gone <= min(step.used_at for step in retained)
    assert surplus(retained, 100.0, limit=limit, size=size, unused=age) == set()
    assert not surplus(steps, 100.0, limit=len(steps), size=200, unused=100.0)
