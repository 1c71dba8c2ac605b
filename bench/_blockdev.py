"""A block device that remembers every write and every flush, and what a power cut would leave of them.

Owns: the recorder (one file behind FUSE, on which a loop device sits), its log, the states that a log allows. Does not
own: what is written, or what must be true of it.

::

    file system ─▶ loop device ─▶ file of the recorder ─▶ FUSE ─▶ log: write, write, flush, write, ...

A loop device passes a flush on as fsync, and a write of its own at once, so the log has the order and the barriers that
a disk would see. After a power cut a disk holds every write before the last flush that it answered, and of those after
it any subset, in whole sectors of 4096 bytes.

Guarantee: :func:`states` yields only such states. The recorder is a process of its own: it never waits for a file
system that waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTOR = 4096
WRITE, FLUSH = 1, 2
_RECORD = struct.Struct("<BQI")  # kind, offset, length; data follows
_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_BUFFER = (1 << 20) + 8192
_MOST = 1 << 17  # bytes of one write
ROOT, DISK = 1, 2
ENOENT, ENOSYS = 2, 38


def available() -> str:
    """What keeps a recorder from running here; "" when nothing does."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [path for path in ("/dev/fuse", "/dev/loop-control") if not Path(path).exists()]
    return f"missing: {', '.join(absent)}" if absent else ""


# ---------------------------------------------------------------------------- recording


class Recorder:
    """`image` behind FUSE: :attr:`disk` is the file to put a loop device on, `log` what happened to it."""

    def __init__(self, image: Path, directory: Path) -> None:
        self.image, self.log = image, directory / "log"
        self._mount = directory / "recorder"
        self.disk = self._mount / "disk"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Recorder:
        self._mount.mkdir()
        self.log.touch()
        command = [sys.executable, "-m", "bench._blockdev", str(self.image), str(self.log), str(self._mount)]
        self._process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent)
        deadline = time.monotonic() + 30
        while not self._mounted():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the recorder does not start")
            time.sleep(0.02)
        return self

    def _mounted(self) -> bool:
        return f" {self._mount} fuse" in Path("/proc/self/mounts").read_text()

    def position(self) -> int:
        """Everything that was answered until now lies before this place of the log."""
        return self.log.stat().st_size

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self._mount)], check=False, capture_output=True)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()


class _Server:
    """The FUSE side: a directory with one file. One request at a time, so the log is in order."""

    def __init__(self, image: Path, log: Path, mount: Path) -> None:
        self._image = os.open(image, os.O_RDWR | os.O_CLOEXEC)
        self._size = os.fstat(self._image).st_size
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_MOST}"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"recorder", os.fsencode(mount), b"fuse.recorder", 6, options.encode()):
            raise OSError(ctypes.get_errno(), f"mount {mount}")

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._fuse, _BUFFER)
            except OSError as error:
                if error.errno == 19:  # ENODEV: unmounted
                    return
                continue
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            answer = self._answer(opcode, node, memoryview(request)[_IN.size :])
            if answer is None:
                continue
            failed, body = (answer, b"") if isinstance(answer, int) else (0, answer)
            with contextlib.suppress(OSError):  # the request was interrupted
                os.write(self._fuse, _OUT.pack(_OUT.size + len(body), -failed, unique) + body)

    def _answer(self, opcode: int, node: int, body: memoryview) -> bytes | int | None:
        match opcode:
            case 26:  # INIT
                _, minor, ahead, flags = struct.unpack_from("<IIII", body)
                wanted = flags & (1 << 5 | 1 << 22)  # BIG_WRITES, MAX_PAGES
                return struct.pack("<IIIIHHIIHHIIHHI20x", 7, min(minor, 31), ahead, wanted, 1, 1, _MOST, 1, 32, 0, 0, 0,
                                   0, 0, 0)[:64]  # fmt: skip
            case 1:  # LOOKUP
                if node == ROOT and bytes(body).rstrip(b"\0") == b"disk":
                    return struct.pack("<QQQQII", DISK, 0, 3600, 3600, 0, 0) + self._attributes(DISK)
                return ENOENT
            case 3 | 4:  # GETATTR, SETATTR (times only)
                return struct.pack("<QII", 3600, 0, 0) + self._attributes(node)
            case 14 | 27:  # OPEN, OPENDIR
                return struct.pack("<QII", 0, 0, 0)
            case 15:  # READ
                _, offset, size = struct.unpack_from("<QQI", body)
                return os.pread(self._image, size, offset)
            case 16:  # WRITE
                _, offset, size = struct.unpack_from("<QQI", body)
                return self._write(offset, body[40 : 40 + size])
            case 20:  # FSYNC: a flush
                os.write(self._log, _RECORD.pack(FLUSH, 0, 0))
                return b""
            case 17:  # STATFS
                return struct.pack("<QQQQQIIII24x", self._size >> 12, 0, 0, 1, 0, 4096, 255, 4096, 0)
            case 2 | 42:  # FORGET, BATCH_FORGET: no answer
                return None
            case 18 | 25 | 29 | 30 | 34 | 36 | 38:  # RELEASE, FLUSH (of a descriptor), ..., DESTROY
                return b""
        return ENOSYS

    def _write(self, offset: int, data: memoryview) -> bytes:
        os.write(self._log, _RECORD.pack(WRITE, offset, len(data)) + data)
        os.pwrite(self._image, data, offset)
        return struct.pack("<II", len(data), 0)

    def _attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o700 if node == ROOT else stat.S_IFREG | 0o600
        size = 0 if node == ROOT else self._size
        return _ATTR.pack(node, size, size >> 9, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, SECTOR, 0)


# ---------------------------------------------------------------------------- replaying


@dataclass(frozen=True)
class Cut:
    """A power cut: what the disk holds of the log when the power goes at `position`."""

    position: int  # of the log: everything before was answered
    base: int  # everything before this place is on the disk
    extra: tuple[int, ...]  # places of the writes after it that are on the disk as well
    torn: bool = False  # the last of these only in part
    name: str = ""


@dataclass(frozen=True)
class Event:
    place: int
    kind: int
    offset: int
    data: int  # place of the data in the log
    length: int

    @property
    def end(self) -> int:
        return self.data + self.length


def events(log: Path) -> Iterator[Event]:
    """What the log holds, in order."""
    place, size = 0, log.stat().st_size
    with open(log, "rb") as file:
        while place + _RECORD.size <= size:
            file.seek(place)
            kind, offset, length = _RECORD.unpack(file.read(_RECORD.size))
            if place + _RECORD.size + length > size:
                return
            yield Event(place, kind, offset, place + _RECORD.size, length)
            place += _RECORD.size + length


def cuts(log: Path, chance: random.Random) -> Iterator[Cut]:
    """A power cut behind every write and every flush, each with one legal fate of the writes that were not flushed."""
    base = 0
    pending: list[int] = []
    for event in events(log):
        if event.kind == FLUSH:
            base, pending = event.end, []
            yield Cut(event.end, base, (), name="flushed")
            continue
        pending.append(event.place)
        name = chance.choice(("all", "none", "some", "last", "torn"))
        chosen = {
            "all": pending,
            "none": [],
            "some": [place for place in pending if chance.random() < 0.5],
            "last": pending[-1:],
            "torn": pending,
        }[name]
        yield Cut(event.end, base, tuple(chosen), name == "torn", name)


class Disk:
    """States of the disk, made from the image at the beginning and the log. Ask for them in the order of the log."""

    def __init__(self, image: Path, log: Path) -> None:
        self._image = image  # everything before `_base` is in it
        self._base = 0
        self._log = open(log, "rb")  # noqa: SIM115 - closed by close()
        self._events = {event.place: event for event in events(log)}
        self._order = sorted(self._events)
        self._next = 0

    def close(self) -> None:
        self._log.close()

    def make(self, cut: Cut, into: Path) -> None:
        """Write what the disk holds after `cut`."""
        with open(self._image, "r+b") as file:
            while self._next < len(self._order) and self._order[self._next] < cut.base:
                self._apply(self._events[self._order[self._next]], file.fileno())
                self._next += 1
        subprocess.run(["cp", "--sparse=always", str(self._image), str(into)], check=True)
        with open(into, "r+b") as file:
            for place in cut.extra:
                torn = cut.torn and place == cut.extra[-1]
                self._apply(self._events[place], file.fileno(), torn=torn)

    def _apply(self, event: Event, fd: int, *, torn: bool = False) -> None:
        if event.kind != WRITE:
            return
        self._log.seek(event.data)
        data = self._log.read(event.length)
        if torn and len(data) > SECTOR:
            data = data[: len(data) // 2 // SECTOR * SECTOR]
        os.pwrite(fd, data, event.offset)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Server(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])).serve()
