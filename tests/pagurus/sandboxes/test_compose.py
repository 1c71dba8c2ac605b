"""``pagurus up``, ``down``, ``ps``, ``logs``, ``services`` and ``--service``: against the fake host, and a real one."""

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
from tests.support.daemon_host import Daemon

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


#: What `docker run -d --name made debian echo within` sends, and `docker wait`.
RUN = """
import http.client, json, os
for path, body in (
    ("create?name=made", {"Image": "debian", "Cmd": ["echo", "within"]}), ("made/start", None), ("made/wait", None),
):
    peer = http.client.HTTPConnection(os.environ["DOCKER_HOST"].removeprefix("tcp://"), timeout=60)
    peer.request("POST", f"/v1.43/containers/{path}", json.dumps(body) if body else None)
    answer = peer.getresponse()
    print(answer.status, answer.read())
    assert answer.status < 400
"""


async def pagurus(fake: FakeHost, directory: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return await command(directory, {"PAGURUS_HOST": fake.address}, *words)


async def command(directory: Path, more: dict[str, str], *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **more, "PYTHONPATH": str(Path(__file__).parents[3])}
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


async def test_this_directory_names_the_sandbox(fake: FakeHost, tmp_path: Path) -> None:
    """As `docker compose` is typed."""
    for verb in ("ps", "logs", "down", "services"):
        done = await pagurus(fake, tmp_path, verb)
        assert done.returncode == 1 and b"no sandbox of the project" in done.stderr and b"pagurus up" in done.stderr
    sandbox = (await pagurus(fake, tmp_path, "up", "-d")).stdout.decode().strip()
    assert b"web" in (await pagurus(fake, tmp_path, "ps")).stdout
    assert (
        json.loads((await pagurus(fake, tmp_path, "services", "--stop", "web", "--json")).stdout)[0]["state"]
        == "exited"
    )
    other = (await pagurus(fake, tmp_path, "up", "-d")).stdout.decode().strip()
    done = await pagurus(fake, tmp_path, "down")
    assert done.returncode == 1 and sandbox in done.stderr.decode() and other in done.stderr.decode()
    assert (await pagurus(fake, tmp_path, "down", other)).stdout.decode().strip() == other
    (tmp_path / "compose.yaml").write_text(
        TEXT.replace("command: serve", "volumes: [data:/data]") + "volumes: {data: }\n"
    )
    done = await pagurus(fake, tmp_path, "down")
    assert done.returncode == 1 and b"data" in done.stderr and b"pagurus down -v" in done.stderr
    assert (await pagurus(fake, tmp_path, "down", "-v")).stdout.decode().strip() == sandbox


async def test_up_with_docker(daemon: Daemon, tmp_path: Path) -> None:
    """The real thing: the main service alone has docker, and its containers are there for `ps` and `logs`."""
    (tmp_path / "compose.yaml").write_text(
        "services: {agent: {image: debian, command: sleep infinity}, db: {image: debian, command: echo said}}\n"
    )
    environment = {"PAGURUS_HOST": str(daemon.socket)}
    done = await command(tmp_path, environment, "up", "-d", "--docker", "--name", "box")
    assert done.returncode == 0, done.stderr
    try:
        done = await command(tmp_path, environment, "exec", "box", "sh", "-c", "echo $DOCKER_HOST $DOCKER_BUILDKIT")
        assert done.stdout == b"tcp://127.0.0.1:2375 0\n"
        done = await command(tmp_path, environment, "exec", "--service", "db", "box", "sh", "-c", "echo $DOCKER_HOST")
        assert done.stdout == b"\n"
        done = await command(tmp_path, environment, "exec", "box", "python3", "-c", RUN)
        assert done.returncode == 0, done.stderr
        listed = json.loads((await command(tmp_path, environment, "ps", "--json")).stdout)
        assert [one["name"] for one in listed] == ["agent", "db", "made"]
        logs = (await command(tmp_path, environment, "logs")).stdout.decode().splitlines()
        assert [line.split() for line in logs] == [["db", "|", "said"], ["made", "|", "within"]]
        assert (await command(tmp_path, environment, "logs", "made")).stdout == b"within\n"
        done = await command(tmp_path, environment, "logs", "nosuch")
        assert done.returncode == 1 and b"no job, no sandbox and no service nosuch" in done.stderr
    finally:
        done = await command(tmp_path, environment, "down")
    assert done.returncode == 0, done.stderr


async def test_up_shows_all_and_ends_with_its_services(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(
        "services: {a: {image: debian, command: echo one}, bb: {image: debian, command: echo two}}\n"
    )
    environment = {"PAGURUS_HOST": str(daemon.socket)}
    done = await command(tmp_path, environment, "up")
    assert done.returncode == 0 and sorted(done.stdout.decode().splitlines()) == ["a  | one", "bb | two"], done.stderr
    assert json.loads((await command(tmp_path, environment, "ls", "--json")).stdout) == []


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
