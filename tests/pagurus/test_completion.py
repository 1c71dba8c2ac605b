"""What the shell's completion offers, against the public fake; and bars on long work, at a real terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagurus import common
from sandbox import Sandbox
from sandbox.testing import FakeHost
from tests.support.daemon_host import Daemon
from tests.support.programs import Program


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeHost]:
    async with FakeHost(images=("debian", "other")) as host:
        monkeypatch.setenv(common.HOST, host.address)
        yield host


async def completed(*words: str) -> list[str]:
    """What bash is offered behind these words; the last one is incomplete."""
    line = " ".join(("pagurus", *words))
    requested = {"_PAGURUS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    command = [sys.executable, "-m", "pagurus"]
    environment = {**os.environ, **requested}
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


async def test_names_and_ids_are_known(fake: FakeHost) -> None:
    async with fake.client() as host, host.create("debian", name="box") as sb:
        saved = await sb.checkpoint("one")
        first = (await sb.tree())[0]
        assert set(await asyncio.to_thread(common.sandbox_names, "")) == {"box", sb.id}
        assert await asyncio.to_thread(common.image_names, "o") == ["other"]
        assert await asyncio.to_thread(common.checkpoint_ids, "") == [saved.id, first.id]
        assert await asyncio.to_thread(common.checkpoint_ids, saved.id[:-1]) == [saved.id]
        assert set(await asyncio.to_thread(common.sources, "")) == {"box", sb.id, saved.id, first.id}


async def test_checkpoints_are_offered_where_one_is_meant(fake: FakeHost) -> None:
    async with fake.client() as host, host.create("debian", name="box") as sb:
        (saved,) = await sb.tree()
        for words in (
            ("restore", "box"),
            ("fork",),
            ("diff", "box"),
            ("checkpoint", "export"),
            ("checkpoint", "verify"),
            ("checkpoint", "label"),
            ("checkpoint", "rm"),
            ("image", "commit", "new"),
        ):
            assert await completed(*words, "c-") == [saved.id], words


async def test_without_a_daemon_there_is_nothing_to_offer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(common.HOST, str(tmp_path / "nobody"))
    assert await asyncio.to_thread(common.checkpoint_ids, "") == []


# --------------------------------------------------------------------------- bars


def at_a_terminal(daemon: Daemon, *arguments: str) -> tuple[int, bytes, bytes]:
    """Exit code, stdout, and what a terminal saw on stderr."""
    master, slave = pty.openpty()
    observed = bytearray()

    def poll() -> None:
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # EIO: nobody has the other end any more
                return
            observed.extend(data)

    environment = {**os.environ, "PAGURUS_RUN": str(daemon.run), "TERM": "xterm", "COLUMNS": "120"}
    looking = threading.Thread(target=poll)
    process = Program(
        [sys.executable, "-m", "pagurus", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
    )
    os.close(slave)
    looking.start()
    try:
        out, _ = process.communicate(timeout=240)
    finally:
        process.end()
        looking.join()
        os.close(master)
    return process.returncode, out, bytes(observed)


async def test_long_work_has_a_bar(daemon: Daemon, sb: Sandbox, tmp_path: Path) -> None:
    saved = (await sb.checkpoint(wait="durable")).id
    code, content, observed = at_a_terminal(daemon, "checkpoint", "export", saved)
    assert code == 0 and f"export {saved}".encode() in observed
    file = tmp_path / "exported"
    file.write_bytes(content)
    for words, what in (
        (("checkpoint", "import", str(file)), b"import"),
        (("checkpoint", "pull", str(daemon.socket), saved), b"pull c-"),
        (("checkpoint", "verify", saved), b"verify"),
        (("restore", sb.id, saved), b"restore s-"),
        (("fork", saved), b"fork c-"),
    ):
        code, out, observed = at_a_terminal(daemon, *words)
        assert code == 0 and what in observed, (words, out, observed)
        code, out, observed = at_a_terminal(daemon, *words, "--json")
        assert (code, observed) == (0, b"") and out[:1] in b"[{", (words, out, observed)
