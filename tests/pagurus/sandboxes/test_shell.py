"""`pagurus shell` at a real terminal, and `pagurus port-forward`, against a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagurus.sandboxes.terminal import ports
from sandbox import Sandbox
from sandbox.errors import Invalid
from tests.support.daemon_host import Daemon
from tests.support.programs import Program


class Person:
    """Somebody at a terminal of this host who runs `pagurus`."""

    def __init__(self, daemon: Daemon, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        self.size(25, 95)
        self.before = termios.tcgetattr(self.slave)
        environment = {**os.environ, "PAGURUS_RUN": str(daemon.run), "TERM": "xterm"}
        self.process = Program(
            [sys.executable, "-m", "pagurus", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.observed = b""

    def size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def sees(self, target: bytes) -> None:
        deadline = time.monotonic() + 240
        while target not in self.observed:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], self.observed
            self.observed += os.read(self.master, 65536)
        self.observed = self.observed.partition(target)[2]

    def types(self, data: bytes) -> None:
        os.write(self.master, data)

    def ends(self) -> int:
        deadline = time.monotonic() + 240
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.observed
            if select.select([self.master], [], [], 0.1)[0]:
                self.observed += os.read(self.master, 65536)
        assert self.process.returncode is not None
        assert termios.tcgetattr(self.slave) == self.before  # as it was, whatever happened
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.destroy()
        os.close(self.master)
        os.close(self.slave)


@contextlib.contextmanager
def person(daemon: Daemon, *arguments: str) -> Iterator[Person]:
    client = Person(daemon, *arguments)
    try:
        yield client
    finally:
        client.close()


async def test_a_real_terminal(daemon: Daemon, sb: Sandbox) -> None:
    def use() -> None:
        with person(daemon, "shell", sb.id, "/bin/sh", "-i") as me:
            me.sees(b"# ")
            me.types(b"stty size\n")
            me.sees(b"25 95")
            me.size(50, 150)
            me.sees(b"# ")
            os.kill(me.process.pid, signal.SIGWINCH)
            me.types(b"sh -c 'while [ \"$(stty size)\" != \"50 150\" ]; do sleep 0.05; done; echo re''sized'\n")
            me.sees(b"resized")
            me.types(b"sh -c 'echo re''ady; exec sleep 1000'\n")
            me.sees(b"ready")
            me.types(b"\x03")  # inside, not here
            me.sees(b"# ")
            me.types(b"touch /typed; exit 7\n")
            assert me.ends() == 7
        with person(daemon, "shell", sb.id, "/bin/sh", "-i") as me:
            me.sees(b"# ")
            me.process.send_signal(signal.SIGTERM)
            assert me.ends() != 0  # and the terminal is as before

    await asyncio.to_thread(use)
    assert (await sb.exec("ls /typed")).exit_code == 0


@pytest.mark.parametrize("words", [["exec", "-it"], ["run", "-it"]])
async def test_it_means_a_terminal(daemon: Daemon, sb: Sandbox, words: list[str]) -> None:
    def use() -> None:
        with person(daemon, *words, sb.id if words[0] == "exec" else "debian", "bash", "--norc") as me:
            me.sees(b"# ")
            me.types(b"tty; exit 7\n")
            me.sees(b"/dev/pts/")
            assert me.ends() == 7

    await asyncio.to_thread(use)


async def test_without_a_terminal(daemon: Daemon, sb: Sandbox) -> None:
    environment = {**os.environ, "PAGURUS_RUN": str(daemon.run)}
    command = [
        sys.executable,
        "-m",
        "pagurus",
        "shell",
        sb.id,
        "sh",
        "-c",
        "stty -echo; read -r x; echo got $x; exit 3",
    ]
    done = await asyncio.to_thread(
        subprocess.run, command, input=b"it\n", capture_output=True, env=environment, timeout=240
    )
    assert done.returncode == 3 and b"got it" in done.stdout, done


async def test_input_from_a_file(daemon: Daemon, sb: Sandbox, tmp_path: Path) -> None:
    """Which is always ready, so that nothing can wait for it; and /dev/null."""
    (tmp_path / "typed").write_text("stty -echo\necho si''x; exit 6\n")
    environment = {**os.environ, "PAGURUS_RUN": str(daemon.run)}
    command = [sys.executable, "-m", "pagurus", "exec", "-it", sb.id, "bash", "--norc"]

    def use(name: str) -> subprocess.CompletedProcess[bytes]:
        with open(name, "rb") as typed:
            return subprocess.run(command, stdin=typed, capture_output=True, env=environment, timeout=240, check=False)

    done = await asyncio.to_thread(use, str(tmp_path / "typed"))
    assert done.returncode == 6 and b"six" in done.stdout, done
    done = await asyncio.to_thread(use, "/dev/null")
    assert done.returncode == 0 and not done.stderr, done


@pytest.mark.parametrize(("text", "pair"), [("80", (0, 80)), ("8080:80", (8080, 80))])
def test_pairs_of_ports(text: str, pair: tuple[int, int]) -> None:
    assert ports(text) == pair


@pytest.mark.parametrize("text", ["", "x", "1:x", "0", "1:0", "70000", "1:2:3", "-1:5"])
def test_nonsense_for_ports(text: str) -> None:
    with pytest.raises(Invalid):
        ports(text)
