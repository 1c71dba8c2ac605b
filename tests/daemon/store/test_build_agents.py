"""RUN --mount=type=ssh: programs of a build ask an agent of keys that is not in the sandbox."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import Client
from sandbox.errors import Invalid
from tests.support.programs import Program

pytestmark = pytest.mark.skipif(not shutil.which("ssh-agent"), reason="needs ssh-agent: apt-get install openssh-client")
ASK = r"""
import os, socket, struct, sys
def ask(one, body):
    one.sendall(struct.pack(">I", len(body)) + body)
    size, = struct.unpack(">I", one.recv(4, socket.MSG_WAITALL))
    return one.recv(size, socket.MSG_WAITALL)
place = os.environ["SSH_AUTH_SOCK"]
many = [socket.socket(socket.AF_UNIX) for _ in range(12)]
[one.connect(place) for one in many]
answers = {ask(one, b"\x0b") for one in many for _ in range(3)}
key = open("/key", "rb").read()
string = lambda data: struct.pack(">I", len(data)) + data
signed = ask(many[0], b"\x0d" + string(key) + string(b"x" * int(sys.argv[1])) + struct.pack(">I", 0))
many[3].sendall(struct.pack(">I", 1 << 30))
gone = many[3].recv(1)
status = os.stat(place)
found = key in ask(many[5], b"\x0b")
print(len(answers), answers.pop()[0], found, signed[0], gone, oct(status.st_mode & 0o777), status.st_uid, place)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """An agent with a key, whose public half is in ``context/key``."""
    (tmp_path / "context").mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "id")], check=True)
    (tmp_path / "context/key").write_bytes(base64.b64decode((tmp_path / "id.pub").read_text().split()[1]))
    (tmp_path / "context/ask.py").write_text(ASK)
    place = tmp_path / "agent"
    running = Program(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.DEVNULL)
    try:
        env = {**os.environ, "SSH_AUTH_SOCK": str(place)}
        while subprocess.run(["ssh-add", "-q", str(tmp_path / "id")], env=env, capture_output=True).returncode:
            assert running.poll() is None
        yield place
    finally:
        running.end()


def dockerfile(tmp_path: Path, *lines: str) -> Path:
    text = "\n".join(["FROM debian", "COPY key ask.py /", *lines, ""])
    (tmp_path / "context/Dockerfile").write_text(text)
    return tmp_path / "context"


async def test_an_agent_answers_and_leaves_nothing(host: Client, agent: Path, tmp_path: Path) -> None:
    context = dockerfile(
        tmp_path,
        "RUN --mount=type=ssh python3 /ask.py 1000 > /one",
        "RUN --mount=type=ssh,id=two,target=/a/b/sock,mode=0666,uid=7,required python3 /ask.py 200000 > /two",
        "USER 7",
        "RUN --mount=type=ssh,uid=7 --mount=type=ssh,id=two python3 /ask.py 10 > /tmp/three",
        "RUN ls -A /run /a > /tmp/left 2>&1; echo [$SSH_AUTH_SOCK] >> /tmp/left",
    )
    await host.images.build("built", context, ssh={"default": agent, "two": agent}, replace=True)
    async with host.create("built") as sb:
        told = (await sb.exec("cat /one /two /tmp/three /tmp/left", ends_turn=False)).text.splitlines()
    expected = "1 12 True 14 b'' 0o{} {} {}"
    assert told[:3] == [
        expected.format(600, 0, "/run/buildkit/ssh_agent.0"),
        expected.format(666, 7, "/a/b/sock"),
        expected.format(600, 7, "/run/buildkit/ssh_agent.0"),
    ]
    assert told[-1] == "[]" and not [line for line in told[3:] if "buildkit" in line or "sock" in line]


async def test_who_gives_no_agent_builds_without(host: Client, agent: Path, tmp_path: Path) -> None:
    context = dockerfile(tmp_path, "RUN --mount=type=ssh test ! -e $SSH_AUTH_SOCK")
    await host.images.build("built", context, replace=True)
    context = dockerfile(tmp_path, "RUN true", "RUN --mount=type=ssh,id=other,required true")
    with pytest.raises(Invalid, match=r"line 4: the agent of keys other is required .*--ssh other"):
        await host.images.build("built", context, ssh={"default": agent}, replace=True)
    with pytest.raises(Invalid, match="line 4: no agent of keys answers at /nowhere"):
        await host.images.build("built", context, ssh={"other": "/nowhere"}, replace=True)
    context = dockerfile(tmp_path, f"RUN --mount=type=ssh,target=/{'x' * 120} true")
    with pytest.raises(Invalid, match="line 3: no socket can be made at /xxx"):
        await host.images.build("built", context, ssh={"default": agent}, replace=True)


async def test_an_agent_that_ends_is_a_connection_that_ends(host: Client, tmp_path: Path, agent: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    server = await asyncio.start_unix_server(silent, tmp_path / "silent")
    async with server:
        ask = "import os,socket;s=socket.socket(socket.AF_UNIX);s.connect(os.environ['SSH_AUTH_SOCK'])"
        ask += ";s.sendall(b'\\0\\0\\0\\1\\x0b');assert s.recv(9)==b''"
        context = dockerfile(tmp_path, f'RUN --mount=type=ssh python3 -c "{ask}"')
        await host.images.build("built", context, ssh={"default": tmp_path / "silent"}, replace=True)
