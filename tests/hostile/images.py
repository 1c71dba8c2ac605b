"""What an attacker leaves for CRIU, which acts on it with the rights of the host's root: before it, a checkpoint takes
it, and a restore or a fork brings it back. Contained: nothing of the host's bait is touched, refused or not.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from sandbox.errors import PagurusError
from tests.hostile.act import Scene, act
from tests.hostile.watched_host import bait_directory

HOLD = """
import os, signal, socket, sys
bait = sys.argv[1]
os.makedirs('/a/dir')
{body}
print('tried', flush=True)
open('/ready', 'w').close()
while True: signal.pause()
"""
DIRECTORY = """
os.mkdir('/a/victim.txt'); held = os.open('/a/victim.txt', os.O_RDONLY | os.O_DIRECTORY)
os.rmdir('/a/victim.txt'); os.rmdir('/a/dir'); os.rmdir('/a'); os.symlink({way}, '/a')
"""
FILE = """
held = os.open('/a/victim.txt', os.O_CREAT | os.O_RDWR); os.write(held, b'#!/bin/sh'); os.fchmod(held, 0o6777)
os.unlink('/a/victim.txt'); os.rmdir('/a/dir'); os.rmdir('/a'); os.symlink({way}, '/a')
"""
FIFO = """
os.mkfifo('/a/victim.txt'); held = os.open('/a/victim.txt', os.O_RDWR)
os.unlink('/a/victim.txt'); os.rmdir('/a/dir'); os.rmdir('/a'); os.symlink({way}, '/a')
"""
WORKED_IN = """
os.mkdir('/a/empty'); os.chdir('/a/empty')
os.rmdir('/a/empty'); os.rmdir('/a/dir'); os.rmdir('/a'); os.symlink({way}, '/a')
"""
LINKED = """
held = open('/a/one', 'w+'); held.write('x'); held.flush(); os.link('/a/one', '/two'); os.unlink('/a/one')
os.rmdir('/a/dir'); os.rmdir('/a'); os.symlink({way}, '/a')
"""
SOCKET = """
held = socket.socket(socket.AF_UNIX); held.bind('/a/victim.txt'); held.listen()
os.unlink('/a/victim.txt'); os.rmdir('/a/dir'); os.rmdir('/a'); os.symlink({way}, '/a')
"""
MOVED = """
open('/a/dir/victim.txt', 'w').write('mine'); held = open('/a/dir/victim.txt', 'r+'); os.chdir('/a/dir')
os.rename('/a', '/b'); os.symlink({way}, '/a')
"""
WAYS = {"absolute": "bait", "by the root of pid 1": "'/proc/1/root' + bait", "upwards": "'../' * 20 + bait[1:]"}
WHAT = {
    "a deleted directory": DIRECTORY,
    "a deleted file": FILE,
    "a deleted FIFO": FIFO,
    "a deleted working directory": WORKED_IN,
    "a file without its name": LINKED,
    "a deleted socket": SOCKET,
    "an open file that moved": MOVED,
}


def _register(what: str, body: str, way: str, link: str, *, forked: bool) -> None:
    @act(f"a link to the host, {way}, where a {'fork' if forked else 'restore'} has {what} to bring back")
    async def _check(scene: Scene) -> str:
        assert scene.travel is not None and scene.fork is not None
        bait = bait_directory()
        try:
            _lay(bait)
            before = _poll(bait)
            code = HOLD.replace("{body}", body.replace("{way}", link))
            if said := await _begin(scene, code, bait):
                return said
            with contextlib.suppress(PagurusError):  # refused when it was dumped, or when it was restored
                await (scene.fork() if forked else scene.travel())
            after = _poll(bait)
            return "" if after == before else f"the host's bait: {sorted(before ^ after)[:3]}"
        finally:
            shutil.rmtree(bait)


async def _begin(scene: Scene, code: str, bait: Path) -> str:
    """Have the attacker's program do its work and wait; "" or what kept it from that. Where the disk of all tests is
    full for a moment (what earlier ones removed is freed later), it is tried again."""
    start = 'rm -rf /a /b /two /ready; setsid python3 -c "$0" "$1" </dev/null >/tried 2>&1 & '
    late = "{ echo full >/probe && rm /probe; cat /tried; df -k /; grep State /proc/$!/status; exit 1; } >&2"
    wait = f"i=0; until test -e /ready; do i=$((i+1)); test $i -gt 500 && {late}; sleep 0.02; done; cat /tried"
    for _ in range(4):
        done = await scene.attacker.exec(["sh", "-c", start + wait, code, str(bait)], timeout=100)
        if done.stdout == b"tried\n":
            return ""
    return f"was not tried: {done.exit_code} {done.stdout[-200:]!r} {done.stderr[-400:]!r}"


def _lay(bait: Path) -> None:
    """What an attacker would like to remove, replace or fill, in a directory that everybody may write to."""
    bait.chmod(0o777)
    (bait / "victim.txt").write_text("precious")
    (bait / "empty").mkdir()


def _poll(bait: Path) -> set[str]:
    observed = set()
    for path in (bait, *bait.rglob("*")):
        status = path.lstat()
        content = path.read_text() if path.is_file() else ""
        observed.add(f"{path} {status.st_mode:o} {status.st_uid} {status.st_ino} {status.st_mtime_ns} {content}")
    return observed


for _what, _body in WHAT.items():
    for _way, _link in WAYS.items():
        for _forked in (False, True):
            _register(_what, _body, _way, _link, forked=_forked)
