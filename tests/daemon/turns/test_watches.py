"""Watches and their readers: places, order, what is looked through where, what is lost and says so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.turns import watches
from daemon.turns.watches import BACKLOG, MAX_WATCHES, WATCHES_EACH, events, keep, place
from sandbox.errors import Invalid, TooMany
from sandbox.messages import FileEvent
from sandbox.tree import watch
from tests.support.daemon_host import TIMEOUT


class Tree:
    """A directory in place of a sandbox's root. While `gate` is closed nobody gets in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gate = threading.Event()
        self.gate.set()
        self.requested = threading.Event()
        self.opened = True

    @contextlib.contextmanager
    def root(self) -> Iterator[int]:
        self.requested.set()
        self.opened = self.gate.wait(20)
        descriptor = os.open(self.path, os.O_PATH | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


async def reported(result: asyncio.Queue[FileEvent], count: int) -> list[tuple[str, str]]:
    async with asyncio.timeout(TIMEOUT):
        return [(event.kind, event.path) for event in [await result.get() for _ in range(count)]]


async def test_a_tree_is_looked_through_beside_the_event_loop_and_in_order(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    (tmp_path / "w").mkdir()
    (tmp_path / "new/below").mkdir(parents=True)
    (tmp_path / "new/below/file").touch()
    async with events(tree.root, "/w", recursive=True) as result:
        tree.gate.clear()
        tree.requested.clear()
        (tmp_path / "new").rename(tmp_path / "w/new")
        (tmp_path / "w/later").touch()
        await asyncio.to_thread(tree.requested.wait, TIMEOUT)  # it is being looked through, and we run
        assert result.empty()
        tree.gate.set()
        assert await reported(result, 4) == [
            ("created", "new"),
            ("created", "new/below"),
            ("created", "new/below/file"),
            ("created", "later"),
        ]
        assert tree.opened
        (tmp_path / "w/new/below/file").write_text("x")
        while (event := (await reported(result, 1))[0]) == ("modified", "later"):
            pass
        assert event == ("modified", "new/below/file")


async def test_whoever_leaves_does_not_wait_for_a_large_tree(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for name in ("w", "new"):
        (tmp_path / name).mkdir()
    async with events(tree.root, "/w", recursive=True):
        tree.gate.clear()
        tree.requested.clear()
        (tmp_path / "new").rename(tmp_path / "w/new")
        await asyncio.to_thread(tree.requested.wait, TIMEOUT)
        asyncio.get_running_loop().call_later(0.1, tree.gate.set)
    leaving = asyncio.ensure_future(_enter(tree))
    tree.gate.clear()
    tree.requested.clear()
    await asyncio.to_thread(tree.requested.wait, TIMEOUT)
    leaving.cancel()  # while it is being opened
    asyncio.get_running_loop().call_later(0.1, tree.gate.set)
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert instances() == 0


def instances() -> int:
    """inotify instances of this process."""
    result = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            result += os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:inotify"
    return result


async def _enter(tree: Tree) -> None:
    async with events(tree.root, "/w", recursive=True):
        await asyncio.Event().wait()


async def test_what_is_too_much_to_tell_is_an_overflow_and_the_rest_is_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_EVENTS", 3)
    tree = Tree(tmp_path)
    (tmp_path / "w").mkdir()
    for name in "abcdef":
        (tmp_path / "new" / name).mkdir(parents=True)
    async with events(tree.root, "/w", recursive=True) as result:
        (tmp_path / "new").rename(tmp_path / "w/new")
        assert [kind for kind, _ in await reported(result, 4)] == ["created"] * 3 + ["overflow"]
        for name in "abcdef":
            (tmp_path / "w/new" / name / "x").mkdir()
            assert await reported(result, 1) == [("created", f"new/{name}/x")]
        (tmp_path / "w").rename(tmp_path / "away")
        assert await reported(result, 1) == [("end", "")]


async def test_more_directories_than_can_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_DIRECTORIES", 3)
    tree = Tree(tmp_path)
    for name in ("w/a", "w/b", "new/c"):
        (tmp_path / name).mkdir(parents=True)
    async with events(tree.root, "/w", recursive=True) as result:
        (tmp_path / "new").rename(tmp_path / "w/new")
        assert await reported(result, 1) == [("end", "")]
    with pytest.raises(Invalid):
        async with events(tree.root, "/w", recursive=True):
            pass


def test_the_end_is_told_to_a_reader_that_takes_nothing() -> None:
    result: asyncio.Queue[FileEvent] = asyncio.Queue(BACKLOG)
    for _ in range(BACKLOG + 5):
        keep(result, FileEvent(kind="created", path="x"))
    keep(result, FileEvent(kind="end"))
    kinds = [result.get_nowait().kind for _ in range(result.qsize())]
    assert kinds == ["created"] * (BACKLOG - 2) + ["overflow", "end"]


def test_places_are_shared() -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(WATCHES_EACH):
            stack.enter_context(place("a"))
        with pytest.raises(TooMany), place("a"):
            pass
        for _ in range(MAX_WATCHES - WATCHES_EACH):
            stack.enter_context(place(""))  # the host's own user
        for owner in ("", "b"):
            with pytest.raises(TooMany), place(owner):
                pass
    assert not watches._taken
