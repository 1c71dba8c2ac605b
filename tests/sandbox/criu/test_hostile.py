"""What a sandbox prepares for CRIU's hands: nothing of the host is touched, whatever becomes of the restore."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import paths
from sandbox.container.container import Bind, Container
from sandbox.criu.gate import gate
from sandbox.errors import CheckpointFailed, PagurusError, Unsupported
from tests.support.checkpoint_support import Bench, shell

# Runs, as root, what stands in the file that is its first argument, then waits for ever.
HOLD = """
python3 -u - {args} >/t.out 2>&1 <<'E' &
{body}
import os, signal
open('/ready', 'w').close()
while True: signal.pause()
E
while [ ! -e /ready ]; do sleep 0.02; done
"""


WAIT = """
import signal
open('/ready', 'w').close()
while True: signal.pause()
"""
LINKS = "for f in /proc/$(pgrep -ox python3)/fd/*; do readlink $f; done"
HELD = """
p=$(pgrep -ox python3)
{ readlink /proc/$p/cwd; for f in /proc/$p/fd/[3-9]; do readlink $f; done; cat /proc/$p/fd/4; } | cat -v
"""


@pytest.fixture
def host() -> Iterator[Path]:
    """A directory of the host that everybody may write to, with a file that nobody else may change."""
    made = Path(tempfile.mkdtemp(prefix="pagurus-host-", dir="/var/tmp"))
    made.chmod(0o777)
    (made / "victim.txt").write_text("precious")
    try:
        yield made
    finally:
        shutil.rmtree(made)


async def hold(sb: Container, body: str, *args: object) -> None:
    """Run a Python program that goes on holding what it has opened."""
    await shell(sb, HOLD.format(body=body, args=" ".join(map(str, args))))


def listed(host: Path) -> list[tuple[str, int, str]]:
    return [(path.name, path.stat().st_mode, path.read_text()) for path in sorted(host.iterdir())]


GHOST_DIRECTORY = """
import os, sys
os.makedirs('/a/victim.txt')
held = os.open('/a/victim.txt', os.O_RDONLY | os.O_DIRECTORY)
os.rmdir('/a/victim.txt'); os.rmdir('/a')
os.symlink(sys.argv[1], '/a')
"""
GHOST_FILE = """
import os, sys
os.mkdir('/a')
held = os.open('/a/new', os.O_RDWR | os.O_CREAT)
os.write(held, b'#!/bin/sh')
os.fchmod(held, 0o6777)
os.unlink('/a/new'); os.rmdir('/a')
os.symlink(sys.argv[1], '/a')
"""
GHOST_BELOW_PROC = GHOST_FILE.replace("sys.argv[1]", "'/proc/1/root' + sys.argv[1]")


@pytest.mark.parametrize("held_open", [False, True], ids=["gate", "no gate"])
@pytest.mark.parametrize("body", [GHOST_DIRECTORY, GHOST_FILE, GHOST_BELOW_PROC], ids=["directory", "file", "proc"])
async def test_a_link_in_place_of_a_deleted_directory_leads_nowhere(
    bench: Bench, host: Path, body: str, held_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by the gate, and harmless in CRIU's private root when there is no gate."""
    if held_open:
        monkeypatch.setattr(gate, "passes", lambda *_, **__: None)
        monkeypatch.setattr(gate, "refuse_lost", lambda *_: None)
    before = listed(host)
    sb = await bench.maker.create()
    await hold(sb, body, host)
    try:
        saved = await bench.save(sb)
        await sb.kill()
        await sb.remount(bench.snapshot(saved.tree, readonly=False))
        await bench.checkpointer.restore(sb, saved.capture.dir)
    except PagurusError as error:
        assert held_open == ("CRIU could not" in str(error))
    else:
        assert held_open
    assert listed(host) == before


async def restored(bench: Bench, sb: Container) -> None:
    saved = await bench.save(sb)
    await sb.kill()
    await sb.remount(bench.snapshot(saved.tree, readonly=False))
    await bench.checkpointer.restore(sb, saved.capture.dir)


MADE_AGAIN = "import os; os.mkdir('/b'); os.chdir('/b'); os.rmdir('/b'); os.mkdir('/b')"
WITH_ITS_PARENT = """
import os
os.makedirs('/b/c'); held = os.open('/b', 0), os.open('/b/c', 0)
os.rmdir('/b/c'); os.rmdir('/b')
"""
BELOW_A_DELETED_ONE = WITH_ITS_PARENT.replace("os.open('/b', 0), ", "")
BEHIND_A_LINK = """
import os
os.mkdir('/b'); held = os.open('/b/f', os.O_CREAT | os.O_RDWR)
os.unlink('/b/f'); os.rmdir('/b'); os.symlink('/etc', '/b')
"""


@pytest.mark.parametrize(
    ("body", "reason", "hint"),
    [
        (MADE_AGAIN, "the directory /b was deleted and made again", "cd"),
        (WITH_ITS_PARENT, "deleted directory /b/c and the one above it are both held", "leave"),
        (BELOW_A_DELETED_ONE, "directory above /b/c, which is deleted and held, is deleted too", "cd"),
        (BEHIND_A_LINK, "above the deleted /b/f is no directory", "close"),
    ],
    ids=["made again", "with its parent", "below a deleted one", "behind a link"],
)
async def test_what_cannot_come_back_is_refused_when_it_is_dumped(
    bench: Bench, body: str, reason: str, hint: str
) -> None:
    sb = await bench.maker.create()
    await hold(sb, body)
    with pytest.raises(CheckpointFailed, match=reason) as caught:
        await bench.save(sb)
    assert re.search(r"held by pid \d+ in the sandbox \(python3\)|both held", str(caught.value)), caught.value
    assert hint in caught.value.hint
    await shell(sb, "kill -9 $(pgrep -x python3); while pgrep -x python3; do sleep 0.02; done")
    await bench.save(sb)


async def test_a_file_by_the_name_of_a_descriptor_of_the_host_stays_a_file(bench: Bench) -> None:
    """CRIU matches what it inherited by names, which a sandbox may give to files."""
    sb = await bench.maker.create()
    body = """
import os
pipe = os.readlink('/proc/self/fd/1')
files = [open(f'/{name}', 'w+') for name in ('pagurus-net', pipe)]
for file in files: file.write('mine'); file.flush()
os.dup2(os.open('/t.fds', os.O_CREAT | os.O_WRONLY), 2)
"""
    running = asyncio.ensure_future(sb.exec(["python3", "-u", "-c", body + WAIT]))
    await shell(sb, "while [ ! -e /ready ]; do sleep 0.02; done")
    before = await shell(sb, LINKS)
    assert "/pagurus-net" in before and "/pipe:[" in before
    await restored(bench, sb)
    after = await shell(sb, LINKS)
    assert [one for one in after.split() if one.startswith("/")] == [
        one for one in before.split() if one.startswith("/")
    ]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_files_whose_names_are_not_utf8(bench: Bench) -> None:
    sb = await bench.maker.create()
    body = """
import os
kept = open(b'/kept-\\xff\\xfe', 'w+'); gone = open(b'/gone-\\xff', 'w+'); gone.write('gone'); gone.flush()
os.unlink(b'/gone-\\xff'); os.mkdir(b'/dir-\\xfe'); os.chdir(b'/dir-\\xfe')
"""
    await hold(sb, body.replace("\\\\", "\\"))
    before = await shell(sb, HELD)
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, HELD) == before


async def test_criu_has_a_root_in_which_nothing_of_the_host_is(bench: Bench, tmp_path: Path) -> None:
    sb = await bench.maker.create(binds=(Bind(tmp_path, "/mnt"),))
    await bench.checkpointer.warm(sb)
    dumps = bench.checkpointer._warm[sb.spec.id].worker.pid
    restores = bench.checkpointer._waiting[sb.spec.id].worker.pid
    await asyncio.to_thread(poll_around, dumps, set(), True)
    await asyncio.to_thread(poll_around, restores, {"sandbox", "mounts"}, False)


def poll_around(pid: int, more: set[str], may_trace: bool) -> None:
    """What a CRIU process finds: CRIU, /proc, its images, and `more`."""
    while os.readlink(f"/proc/{pid}/exe").endswith("/pagurus-criu-root"):
        time.sleep(0.01)
    root = Path(f"/proc/{pid}/root")
    mounts = {line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}
    programs = {
        point
        for point in mounts
        if point.endswith(("/x86_64-linux-gnu", "/sbin/criu", "/criu-plugins", "/written.so", "/terminals.so"))
        or point[:4] == "/usr"
    }
    binds = {"/sandbox"} | {point for point in mounts if point.startswith("/mounts/")} if more else set()
    assert ("/mounts/0" in binds) == bool(more)
    assert programs and mounts - programs == {"/", "/proc", "/run", "/dev/pts", "/images"} | binds
    ways = {point.split("/")[1] for point in programs}
    assert {entry.name for entry in root.iterdir()} == {"tmp", "dev", "proc", "run", "images"} | ways | more
    assert {entry.name for entry in (root / "dev").iterdir()} == {"null", "pts"}
    assert {entry.name for entry in (root / "run").iterdir()} <= {"criu.kdat"}
    below_tmp = {
        point.split("/")[2] for point in programs if point.startswith("/tmp/")
    }  # of a checkout that lies there
    assert {entry.name for entry in (root / "tmp").iterdir()} == below_tmp
    assert {entry.name for entry in (root / "images").iterdir()} <= {"dump.log"}  # it has its request already
    capabilities = int(Path(f"/proc/{pid}/status").read_text().split("CapBnd:")[1].split()[0], 16)
    assert may_trace == bool(capabilities >> 19 & 1)  # CAP_SYS_PTRACE


async def test_a_criu_that_does_not_wait_stops_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library is of another version, which a checkout that was not built again has."""
    sb = await bench.maker.create()
    empty = tmp_path / "written.so"
    await asyncio.to_thread(
        subprocess.run, ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(empty), "/dev/null"], check=True
    )
    with monkeypatch.context() as other:
        other.setattr(paths, "written", lambda: empty)
        with pytest.raises(Unsupported, match="another version"):
            await bench.save(sb)
    assert await shell(sb, "echo up") == "up\n"
    await bench.save(sb)
