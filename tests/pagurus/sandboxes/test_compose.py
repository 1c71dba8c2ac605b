"""``pagurus up``, ``services`` and ``--service``, against the fake host."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.testing import FakeHost

TEXT = """
services:
  web: {image: debian, ports: ["8080:80"], command: serve}
  db: {image: debian, profiles: ["${PROFILE:-x}"], healthcheck: {test: "true"}}
"""


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeHost]:
    (tmp_path / "compose.yaml").write_text(TEXT)
    async with FakeHost() as host:
        host.on(r"cat (\S+)", effect=lambda files, match: files.read(match[1]))
        yield host


async def pagurus(fake: FakeHost, directory: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PAGURUS_HOST": fake.address, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "pagurus", *words]
    return await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


async def test_services_are_started_listed_restarted_and_stopped(fake: FakeHost, tmp_path: Path) -> None:
    done = await pagurus(fake, tmp_path, "up", "-d", "--name", "box", "-e", "PROFILE=p", "--profile", "p")
    assert done.returncode == 0, done.stderr
    sandbox = done.stdout.decode().strip()
    listed = json.loads((await pagurus(fake, tmp_path, "services", "box", "--json")).stdout)
    assert [(one["name"], one["state"]) for one in listed] == [("web", "running"), ("db", "running")]
    done = await pagurus(fake, tmp_path, "services", sandbox, "--stop", "web", "--restart", "db")
    lines = done.stdout.decode().splitlines()
    assert lines[1].split()[:4] == ["web", "debian", "exited", "(143)"] and "8080->80" in lines[1]
    assert "healthy" in lines[2] and "127.1.0.2" in lines[2]
    done = await pagurus(fake, tmp_path, "services", "box", "--up")
    assert "exited" not in done.stdout.decode()


async def test_commands_and_copies_name_a_service(fake: FakeHost, tmp_path: Path) -> None:
    await pagurus(fake, tmp_path, "up", "-d", "--name", "box", "-e", "PROFILE=p", "--profile", "p")
    (tmp_path / "note").write_text("for the db\n")
    assert (await pagurus(fake, tmp_path, "cp", "--service", "db", "note", "box:/note")).returncode == 0
    done = await pagurus(fake, tmp_path, "exec", "--service", "db", "box", "cat", "/note")
    assert (done.returncode, done.stdout) == (0, b"for the db\n")
    assert (await pagurus(fake, tmp_path, "cp", "--service", "db", "box:/note", "back")).returncode == 0
    assert (tmp_path / "back").read_text() == "for the db\n"
    done = await pagurus(fake, tmp_path, "exec", "--service", "no", "box", "true")
    assert done.returncode == 125 and b"no service no" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("up", "-f", "no.yaml"), b"there is no compose file"),
        (("up", "--pull", "perhaps"), b"--pull is missing, always or never"),
        (("up", "--main", "no"), b"there is no service no"),
        (("up", "-e", "x"), b"--env 'x' has no value"),
    ],
)
async def test_what_cannot_be_is_refused(fake: FakeHost, tmp_path: Path, words: tuple[str, ...], said: bytes) -> None:
    done = await pagurus(fake, tmp_path, *words)
    assert done.returncode == 1 and said in done.stderr and b"Traceback" not in done.stderr
