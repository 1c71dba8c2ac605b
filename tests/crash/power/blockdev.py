"""A block device that remembers every write and every flush, and what a power cut would leave of them.

::

    file system ─▶ loop device ─▶ file of the recorder ─▶ FUSE ─▶ log: write, write, flush, write, ...

A loop device passes a flush on as fsync, and a write of its own at once, so the log has the order and the barriers that
a disk would see. After a power cut a disk holds every write before the last flush that it answered, and of those after
it any subset, in whole sectors of 4096 bytes.

Guarantee: :func:`cuts` yields only such states. The recorder is a process of its own: it never waits for a file
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

SECTOR = 4096
WRITE, FLUSH = 1, 2
_RECORD = struct.Struct("<BQI")  # kind, offset, length; data follows
_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_BUFFER = (1 << 20) + 8192
_LIMIT = 1 << 17  # bytes of one write
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
        command = [sys.executable, "-m", "tests.crash.power.blockdev", str(self.image), str(self.log), str(self._mount)]
        self._process = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[3])
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
        options = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_LIMIT}"
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
                target = flags & (1 << 5 | 1 << 22)  # BIG_WRITES, MAX_PAGES
                return struct.pack("<IIIIHHIIHHIIHHI20x", 7, min(minor, 31), ahead, target, 1, 1, _LIMIT, 1, 32, 0, 0,
                0,
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
class Event:
    place: int
    kind: int
    offset: int
    data: int  # place of the data in the log
    length: int

    @property
    def end(self) -> int:
        return self.data + self.length


Span = tuple[Event, int, int]  # of the data of a write: bytes from the first number up to the second


@dataclass(frozen=True)
class Cut:
    """A power cut: what the disk holds of the log when the power goes at `position`."""

    position: int  # of the log: everything before was answered
    base: int  # everything before this place is on the disk
    extra: tuple[Span, ...]  # what of the writes after it is on the disk as well
    name: str = ""


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


#: What may become of the writes that no flush has confirmed when the power goes behind the last of them.
CRASH_STATES = ("all", "none", "last", "overtaken", "torn", "some", "sectors")


def cuts(log: Path, chance: random.Random, crash_states: int = 1) -> Iterator[Cut]:
    """Power cuts behind every write and every flush, in order; `fates` different ones behind each write."""
    base = 0
    pending: list[Event] = []
    for event in events(log):
        if event.kind == FLUSH:
            base, pending = event.end, []
            yield Cut(event.end, base, (), name="flushed")
            continue
        pending.append(event)
        for name in chance.sample(CRASH_STATES, min(crash_states, len(CRASH_STATES))):
            yield Cut(event.end, base, tuple(survivors(name, pending, chance)), name)


def survivors(crash_state: str, pending: Sequence[Event], chance: random.Random) -> Iterator[Span]:
    """What of the writes that were not flushed reaches the disk."""
    for event in pending:
        last = event is pending[-1]
        match crash_state:
            case "all":
                reached = event.length
            case "none":
                reached = 0
            case "last":  # before all others
                reached = event.length if last else 0
            case "overtaken":  # the first one comes last
                reached = 0 if event is pending[0] else event.length
            case "torn":
                half = event.length // 2 // SECTOR * SECTOR
                reached = half if last and event.length > SECTOR else event.length
            case "some":
                reached = event.length if chance.random() < 0.5 else 0
            case _:  # any sectors of any write
                for first in range(0, event.length, SECTOR):
                    if chance.random() < 0.5:
                        yield event, first, min(first + SECTOR, event.length)
                continue
        if reached:
            yield event, 0, reached


class Disk:
    """States of the disk, made from the image at the beginning and the log. Ask for them in the order of the log."""

    def __init__(self, image: Path, log: Path) -> None:
        self._image = image  # everything before `_base` is in it
        self._file = open(image, "r+b", buffering=0)  # noqa: SIM115 - closed by close()
        self._log = open(log, "rb")  # noqa: SIM115 - closed by close()
        self._writes = [event for event in events(log) if event.kind == WRITE]
        self._next = 0
        self._sum = 0  # over the marks of all sectors that ever changed

    def close(self) -> None:
        self._file.close()
        self._log.close()

    def state(self, cut: Cut) -> int:
        """Equal for two cuts that leave the same bytes on the disk."""
        self._advance(cut.base)
        return self._sum + self._difference(self._overlay(cut))

    def make(self, cut: Cut, into: Path) -> None:
        """Write what the disk holds after `cut`."""
        self._advance(cut.base)
        subprocess.run(["cp", "--sparse=always", str(self._image), str(into)], check=True)
        with open(into, "r+b") as file:
            for number, content in self._overlay(cut).items():
                os.pwrite(file.fileno(), content, number * SECTOR)

    def _advance(self, base: int) -> None:
        while self._next < len(self._writes) and self._writes[self._next].place < base:
            event = self._writes[self._next]
            changed = self._applied([(event, 0, event.length)])
            self._sum += self._difference(changed)
            for number, content in changed.items():
                os.pwrite(self._file.fileno(), content, number * SECTOR)
            self._next += 1

    def _overlay(self, cut: Cut) -> dict[int, bytes]:
        return self._applied(cut.extra)

    def _applied(self, spans: Iterable[Span]) -> dict[int, bytes]:
        """The sectors that these parts of writes touch, as they are afterwards."""
        sectors: dict[int, bytes] = {}
        for event, first, end in spans:
            self._log.seek(event.data + first)
            data, place = self._log.read(end - first), event.offset + first
            while data:
                number, inside = divmod(place, SECTOR)
                part, data = data[: SECTOR - inside], data[SECTOR - inside :]
                if len(part) < SECTOR:
                    old = sectors[number] if number in sectors else self._sector(number)
                    part = old[:inside] + part + old[inside + len(part) :]
                sectors[number] = part
                place = (number + 1) * SECTOR
        return sectors

    def _sector(self, number: int) -> bytes:
        return os.pread(self._file.fileno(), SECTOR, number * SECTOR)

    def _difference(self, changed: dict[int, bytes]) -> int:
        """What the sum over all sectors changes by. A sum does not ask in which order they were written."""
        return sum(_mark(number, new) - _mark(number, self._sector(number)) for number, new in changed.items())


def _mark(number: int, content: bytes) -> int:
    return int.from_bytes(blake3(number.to_bytes(8, "little") + content).digest(), "little")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Server(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])).serve()
