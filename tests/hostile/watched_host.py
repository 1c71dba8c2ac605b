"""Whether anything of the host is opened for writing, made, changed or removed while something hostile goes on.

Guarantee: each change of the bait is found, by comparison and by its event. Changes elsewhere on the root's file system
are found when the process that made them was in the watched control group at one of many looks at it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import struct
import threading
import time
from pathlib import Path

from bench.harness import aftermath

_CLOEXEC, _NONBLOCK, _UNLIMITED, _DFID_NAME = 0x1, 0x2, 0x10, 0xC00
_ADD, _FILESYSTEM = 0x1, 0x100
_MODIFY, _ATTRIB, _CLOSE_WRITE = 0x2, 0x4, 0x8
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE, _ON_CHILD, _ONDIR = 0x40, 0x80, 0x100, 0x200, 0x08000000, 0x40000000
_CHANGES = _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONDIR
_READS = 0x1 | 0x20  # reading, opening
_HEAD = struct.Struct("=IBBHQii")
POLL_INTERVAL = 0.001  # seconds between looks at a control group
_libc = ctypes.CDLL(None, use_errno=True)


def bait_directory(where: str = "/var/tmp") -> Path:
    """A new directory of bait. Those of killed runs are removed: a name says which process made it."""
    for left in Path(where).glob("pagurus-bait-*"):
        pid = left.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return aftermath.directory(f"pagurus-bait-{os.getpid()}-", where)


class WatchedHost:
    """Bait in a directory of the host that everybody may write to, and in one that only root may.

    `where`: a directory of the host. `reads`: also what this process only opens or reads of it counts; then nothing
    else goes on while `findings` looks.
    """

    def __init__(self, where: str = "/var/tmp", *, reads: bool = False) -> None:
        self.bait = bait_directory(where)
        self.secret = f"precious-{secrets.token_hex(8)}"  # what files and links of the bait say, and nobody else
        self.events = 0  # of anybody, anywhere on the host's file system
        self.bait.chmod(0o777)
        for path, mode in (
            ("victim.txt", 0o644),
            ("open.txt", 0o666),
            ("dir/inner.txt", 0o600),
            ("locked/secret", 0o600),
        ):
            (self.bait / path).parent.mkdir(exist_ok=True)
            (self.bait / path).write_text(self.secret)
            (self.bait / path).chmod(mode)
        (self.bait / "empty").mkdir()
        (self.bait / "locked").chmod(0o700)
        (self.bait / "dir/elsewhere").symlink_to(self.secret)
        self._before = self._poll()
        directories = [(self.bait, 0), *((path, 0) for path in self.bait.iterdir() if path.is_dir())]
        self._near = self._group(directories)
        self._far = self._group([(Path("/"), _FILESYSTEM)])
        self._reads = self._group(directories, _READS) if reads else -1

    def paths(self) -> list[str]:
        """Paths that an attacker would like to reach."""
        return [str(self.bait), *(str(path) for path in sorted(self.bait.rglob("*")))]

    def findings(self, pids: set[int]) -> list[str]:
        """What has happened since the last call, to the bait or by one of these processes."""
        result = [f"event {mask:#x} on the bait" for mask, _ in _events(self._near)]
        far = _events(self._far)
        self.events += len(far)
        result += [f"event {mask:#x} on the host by process {pid}" for mask, pid in far if pid in pids]
        if self._reads >= 0:
            opened = [mask for mask, pid in _events(self._reads) if pid == os.getpid()]
            result += [f"the bait was opened or read: {mask:#x}" for mask in opened]
        now = self._poll()
        if self._reads >= 0:
            _events(self._reads)  # of our own look
        result += [f"the bait changed: {line}" for line in sorted(self._before.symmetric_difference(now))]
        self._before = now
        return result

    def close(self) -> None:
        for fd in (self._near, self._far, self._reads):
            if fd >= 0:
                os.close(fd)
        shutil.rmtree(self.bait)

    def _poll(self) -> set[str]:
        observed = set()
        for path in (self.bait, *self.bait.rglob("*")):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            facts = status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_nlink, status.st_mtime_ns
            observed.add(f"{path} {facts} {content!r}")
        return observed

    @staticmethod
    def _group(marks: list[tuple[Path, int]], what: int = _CHANGES) -> int:
        group = _libc.fanotify_init(_DFID_NAME | _NONBLOCK | _CLOEXEC | _UNLIMITED, 0)
        if group < 0:
            raise OSError(ctypes.get_errno(), "fanotify_init")
        for path, flags in marks:
            mask = ctypes.c_uint64(what | (0 if flags else _ON_CHILD))
            if _libc.fanotify_mark(group, _ADD | flags, mask, -100, os.fsencode(path)):
                raise OSError(ctypes.get_errno(), f"fanotify_mark {path}")
        return int(group)


def _events(group: int) -> list[tuple[int, int]]:
    """(what, who) of each event that waits."""
    result: list[tuple[int, int]] = []
    while True:
        try:
            data = os.read(group, 1 << 18)
        except BlockingIOError:
            return result
        at = 0
        while at < len(data):
            size, _, _, _, mask, _, pid = _HEAD.unpack_from(data, at)
            result.append((mask, pid))
            at += size


class Observed:
    """The processes that are in a control group, at one look or another, while the block runs."""

    def __init__(self, group: Path):
        self._file = group / "cgroup.procs"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.pids: set[int] = set()

    def __enter__(self) -> Observed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self.pids.update(map(int, self._file.read_text().split()))
            except OSError:
                return
            time.sleep(POLL_INTERVAL)
