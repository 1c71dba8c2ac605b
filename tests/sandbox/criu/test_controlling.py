"""Controlling terminals of restored processes, their children's above all."""

from __future__ import annotations

import asyncio

import pytest

from sandbox import procfs
from sandbox.container.container import Container
from sandbox.container.supervisor import Mode
from sandbox.errors import CheckpointFailed
from tests.sandbox.container.test_supervisor import connected, reads, started
from tests.support.checkpoint_support import Bench
from tests.support.container_support import Maker

#: A terminal with an interactive shell, whose child starts another shell, in the background of a third one's terminal.
NESTED = """
import os, pty, time
def terminal(*argv):
    pid, master = pty.fork()
    if pid == 0:
        os.execvp(argv[0], argv)
    return master
a = terminal("bash", "--norc", "-ic", "bash --norc -c 'sleep 1000; true' & bash --norc -ic 'sleep 2000; true'; true")
b = terminal("python3", "-c", "import pty; pty.spawn(['bash', '--norc', '-ic', 'sleep 3000; true'])")
time.sleep(10000)
"""


def terminals(container: Container) -> dict[str, tuple[int, bool]]:
    """(device of the controlling terminal, whether that has a group in front) of each process, by name and number."""
    result = {}
    for pid in container.tasks():
        fields = procfs.stat(pid)
        name = f"{procfs.status(pid, 'Name')} {procfs.inner_pid(pid)}"
        result[name] = (int(fields[procfs.TERMINAL]), int(fields[procfs.FOREGROUND]) != -1)
    return result


async def test_children_have_the_terminal_of_their_session(bench: Bench) -> None:
    container = await bench.maker.create()
    await container.exec(["/bin/sh", "-c", 'setsid python3 -c "$1" > /dev/null 2>&1 &', "sh", NESTED])
    await until_sleeping(container, 3)
    before = terminals(container)
    assert len([one for one, (device, _) in before.items() if device]) >= 8
    saved = await bench.save(container)
    for _ in range(2):
        await bench.kill_and_restore(container, saved, saved.dump)
        assert terminals(container) == before
        saved = await bench.save(container)


#: A terminal whose leader waits in the background of a child that holds /dev/tty, and so does a child of that.
HELD = """
import os, pty, time
pid, master = pty.fork()
if pid == 0:
    held = "exec 5<>/dev/tty 6<>/dev/tty; sleep 1000 & sleep 2000; true"
    os.execvp("bash", ["bash", "--norc", "-ic", f"bash --norc -c '{held}'; true"])
pid, second = pty.fork()
if pid == 0:
    os.execvp("bash", ["bash", "--norc", "-ic", "exec 5<>/dev/tty; bash --norc -ic 'sleep 3000'"])
time.sleep(10000)
"""


async def test_who_holds_dev_tty_comes_back(bench: Bench) -> None:
    container = await bench.maker.create()
    await container.exec(["/bin/sh", "-c", 'setsid python3 -c "$1" > /dev/null 2>&1 &', "sh", HELD])
    await until_sleeping(container, 3)
    before = terminals(container)
    saved = await bench.save(container)
    assert "/dev/tty" in links(container), "a dump changes nothing"
    for _ in range(2):
        await bench.kill_and_restore(container, saved, saved.dump)
        assert terminals(container) == before
        assert links(container) >= {"/dev/pts/0", "/dev/pts/1"}
        saved = await bench.save(container)


async def test_a_shell_in_a_shell_is_one_after_a_restore(bench: Bench) -> None:
    container = await bench.maker.create()
    a = await started(container, "x", Mode.TERMINAL, "/bin/bash", "--norc", "-i")
    await a.write(b"bash --norc -i\n", 0)
    await a.write(b"echo re''ady\n", (await a.state()).written)
    await reads(a, b"ready\r\n")
    saved = await bench.save(container)
    await bench.kill_and_restore(container, saved, saved.dump)
    a = await connected(container, "x")
    await a.write(b"python3 -c 'import getpass; print(getpass.getpass())' < /dev/null\n", (await a.state()).written)
    await reads(a, b"Password: ")
    await a.write(b"secret\n", (await a.state()).written)
    await reads(a, b"Password: \r\nsecret\r\n")  # which is not echoed
    await a.write(b"sh -c 'echo na\"\"med > /dev/tty; exec sleep 1000'\n", (await a.state()).written)
    await reads(a, b"named\r\n")
    await a.write(b"\x1a", (await a.state()).written)
    await reads(a, b"Stopped")
    await a.write(b"fg\n", (await a.state()).written)
    await reads(a, b"fg\r\nsh -c ")


async def test_a_terminal_that_is_closed_is_refused_by_its_name(bench: Bench) -> None:
    container = await bench.maker.create()
    await container.exec(["/bin/sh", "-c", "script -qec 'trap \"\" HUP; exec 5<>/dev/tty; sleep 1000 &' /dev/null"])
    with pytest.raises(CheckpointFailed) as caught:
        await bench.save(container)
    assert "/dev/tty) of" in caught.value.message and "is closed" in caught.value.message


async def test_without_a_terminal_dev_tty_cannot_be_opened(maker: Maker) -> None:
    container = await maker.create()
    done = await container.exec(["/bin/sh", "-c", "echo > /dev/tty"])
    assert b"No such device or address" in done.stderr


def links(container: Container) -> set[str]:
    return {link for pid in container.tasks() for _, link in procfs.descriptors(pid)}


async def until_sleeping(container: Container, count: int) -> None:
    for _ in range(1200):
        if sum(name.startswith("sleep ") for name in terminals(container)) == count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(terminals(container))
