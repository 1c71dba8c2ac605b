"""Ignore rules: a table of patterns, names that name nothing for certain, and properties over all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.verdict.ignore import NOTHING, RunningTask, checked, without
from daemon.verdict.judge import judge
from sandbox.errors import Invalid
from sandbox.messages import Effects, Verdict
from sandbox.messages.ignore import IgnoreRules

MATCHES = [
    ("/var/cache/**", "/var/cache", True),
    ("/var/cache/**", "/var/cache/apt/x.bin", True),
    ("/var/cache/**", "/var/cached", False),
    ("/var/cache/**", "/srv/var/cache/x", False),
    ("/var/cache", "/var/cache/x", True),
    ("**/__pycache__/**", "/__pycache__/a.pyc", True),
    ("**/__pycache__/**", "/app/deep/__pycache__", True),
    ("**/__pycache__/**", "/app/__pycache__x/a", False),
    ("/app/*.log", "/app/a.log", True),
    ("/app/*.log", "/app/sub/a.log", False),
    ("/app/**/*.log", "/app/sub/deep/a.log", True),
    ("/app/**/*.log", "/app/a.log", True),
    ("/app/**/keep/**", "/app/keep", True),
    ("**/.git/index", "/work/.git/index", True),
    ("**/.git/index", "/work/.git/index.lock", False),
    ("/a?c", "/abc", True),
    ("/a?c", "/a/c", False),
]


@pytest.mark.parametrize(("pattern", "path", "expected"), MATCHES)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert checked(IgnoreRules(paths=[pattern])).path(path) is expected


@pytest.mark.parametrize(
    "pattern", ["", "/", "**", "/**", "/*", "**/*", "relative", "*/x", "/a/../b", "/a//b", "/./a", "/" + "x" * 600]
)
def test_a_pattern_that_ignores_everything_or_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(Invalid):
        checked(IgnoreRules(paths=[pattern]))


@pytest.mark.parametrize("name", ["", "exactly15bytes!", "a name that the kernel cuts off", "ünïcödé-näme"])
def test_a_name_that_could_be_cut_off_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="for certain"):
        checked(IgnoreRules(processes=[name]))


def test_too_many_rules_are_refused() -> None:
    with pytest.raises(Invalid, match="too many"):
        checked(IgnoreRules(paths=[f"/p{number}" for number in range(65)]))


def test_no_rules_are_nothing() -> None:
    assert not checked(None) and not checked(IgnoreRules()) and not NOTHING.path("/x")


TMUX = checked(IgnoreRules(processes=["tmux: server", "/usr/bin/watcher"]))


@pytest.mark.parametrize(
    ("tasks", "effects", "expected"),
    [
        ([RunningTask("tmux: server", True, False)], Effects(survivors=1, survivors_new=1), Verdict.NONE),
        ([RunningTask("tmux: server", False, True)], Effects(survivors=1, survivors_ran=1), Verdict.NONE),
        ([RunningTask("tmux: serve", True, False)], Effects(survivors=1, survivors_new=1), Verdict.PROCESSES),
        ([RunningTask("x", True, False, "/usr/bin/watcher")], Effects(survivors=1, survivors_new=1), Verdict.NONE),
        (
            [RunningTask("watcher", True, False, "/tmp/watcher")],
            Effects(survivors=1, survivors_new=1),
            Verdict.PROCESSES,
        ),
        (
            [RunningTask("tmux: server", False, True), RunningTask("bash", False, True)],
            Effects(survivors=2, survivors_ran=2),
            Verdict.PROCESSES,
        ),
        (
            [RunningTask("tmux: server", False, True), RunningTask("bash", False, False)],
            Effects(survivors=2, survivors_ran=1),
            Verdict.NONE,
        ),
        # Somebody was born or ended while they were counted.
        ([RunningTask("tmux: server", True, False)], Effects(survivors=2, survivors_new=2), Verdict.PROCESSES),
        # What it did, and that it ended, counts.
        (
            [RunningTask("tmux: server", True, False)],
            Effects(survivors=1, survivors_new=1, data_writes=1),
            Verdict.FILES,
        ),
        ([], Effects(survivors_gone=1), Verdict.PROCESSES),
        ([RunningTask("tmux: server", True, False)], Effects(survivors=1, survivors_new=1, unknown=True), Verdict.BOTH),
        # What an ignored one says to another.
        (
            [RunningTask("tmux: server", False, True, spoke=True), RunningTask("bash", False, False)],
            Effects(survivors=2, survivors_ran=1),
            Verdict.PROCESSES,
        ),
        (
            [RunningTask("tmux: server", False, True), RunningTask("bash", False, False, spoke=True)],
            Effects(survivors=2, survivors_ran=1),
            Verdict.NONE,
        ),
        ([RunningTask("tmux: server", False, True, spoke=True)], Effects(survivors=1, survivors_ran=1), Verdict.NONE),
        # A channel to nobody but ignored ones.
        ([RunningTask("tmux: server", False, False)], Effects(survivors=1, channels=1), Verdict.NONE),
    ],
)
def test_processes(tasks: list[RunningTask], effects: Effects, expected: Verdict) -> None:
    assert judge(without(effects, tasks, TMUX)).verdict is expected


parts = st.lists(st.sampled_from(["a", "b", "cc", "d.e"]), min_size=1, max_size=6)


@given(parts, st.lists(st.sampled_from(["a", "*", "**", "c?"]), min_size=1, max_size=5))
def test_what_ignores_a_directory_ignores_what_lies_in_it(path: list[str], pattern: list[str]) -> None:
    try:
        rules = checked(IgnoreRules(paths=["/" + "/".join(pattern)]))
    except Invalid:
        return
    if rules.path("/" + "/".join(path)):
        assert rules.path("/" + "/".join([*path, "below"]))


@given(
    st.lists(
        st.builds(RunningTask, st.sampled_from(["tmux: server", "bash"]), st.booleans(), st.booleans()), max_size=5
    ),
    st.builds(Effects, data_writes=st.integers(0, 2), signals=st.integers(0, 2), unknown=st.booleans()),
)
def test_ignoring_never_touches_what_is_not_a_living_process(tasks: list[RunningTask], effects: Effects) -> None:
    before = type(effects)(
        data_writes=effects.data_writes,
        signals=effects.signals,
        unknown=effects.unknown,
        survivors=len(tasks),
        survivors_new=sum(task.new for task in tasks),
        survivors_ran=sum(task.ran and not task.new for task in tasks),
    )
    after = without(before, tasks, TMUX)
    assert (after.data_writes, after.signals, after.unknown) == (before.data_writes, before.signals, before.unknown)
    assert after.survivors + after.ignored == before.survivors
    if any(task.name == "bash" and (task.new or task.ran) for task in tasks):
        assert judge(after).verdict.processes
