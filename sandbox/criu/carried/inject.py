"""System calls made by the tasks of a sandbox, on our behalf, while all of them are stopped.

Guarantee: between entering and leaving :func:`standing` no task of the sandbox runs an instruction of its own. What a
call changes of its task (registers, signal mask, memory, restartable sequence) is put back after it. Blocks; everything
happens on the caller's thread, which is the tracer.

::

    frozen ▸ seize every task ▸ thaw: they stop for us ▸ calls ▸ freeze ▸ let go: frozen again
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox import procfs
from sandbox.descriptors import closing
from sandbox.errors import RestoreFailed

_CONT_TO_SYSCALL, _GETREGS, _SETREGS, _DETACH = 24, 12, 13, 17
_SETOPTIONS, _SEIZE, _INTERRUPT = 0x4200, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK, _GET_RSEQ = 0x420A, 0x420B, 0x420F
_TRACESYSGOOD, _SUSPEND_SECCOMP = 1, 1 << 21
_WALL = 0x40000000
_AT_CALL = signal.SIGTRAP | 0x80
_REGISTERS = struct.Struct("=27Q")
_R10, _R9, _R8, _AX, _DX, _SI, _DI, _ORIG_AX, _IP, _SP = 7, 8, 9, 10, 12, 13, 14, 15, 16, 19
_RED_ZONE = 512  # bytes below the stack pointer that stay as they are
_RSEQ_CS = 8  # offset in struct rseq: 8 bytes
_SYSCALL = b"\x0f\x05"
TIMEOUT = 10.0  # seconds for a task to stop
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


class Standing:
    """The seized tasks, by host pid of their processes."""

    def __init__(self, threads: dict[int, list[int]]):
        self._threads = threads
        self._instructions: dict[int, int] = {}  # where each process has one that makes a system call

    def call(self, pid: int, number: int, *arguments: int | None, data: bytes = b"") -> int:
        """Have a thread of the process `pid` make a system call; returns what the kernel returned, errors negative.

        `data` lies in its memory during it: at the address that stands for an argument None. Raises RestoreFailed when
        the process is gone, or does not make the call.
        """
        if pid not in self._threads:
            raise RestoreFailed(f"process {pid} was killed", hint="restore it again")
        thread = self._threads[pid][0]
        with _memory(thread) as memory, _retained(thread, memory) as registers:
            at = _capacity(pid, registers[_SP], len(data)) if data else 0
            before = _peek(memory, at, len(data))
            changed = list(registers)
            changed[_AX], changed[_ORIG_AX] = number, (1 << 64) - 1
            if pid not in self._instructions:
                self._instructions[pid] = _instruction(pid, memory)
            changed[_IP] = self._instructions[pid]
            for register, value in zip((_DI, _SI, _DX, _R10, _R8, _R9), arguments, strict=False):
                changed[register] = (at if value is None else value) & (1 << 64) - 1
            try:
                _poke(memory, at, data)
                _set_registers(thread, changed)
                for _ in ("enters", "leaves"):
                    _ptrace(_CONT_TO_SYSCALL, thread)
                    if (observed := _stopped(thread)) != _AT_CALL:
                        raise RestoreFailed(
                            f"task {thread} stopped with {observed} instead of making a system call",
                            hint="restore it again, or an older checkpoint (`pagurus tree`)",
                        )
                result: int = struct.unpack("=q", struct.pack("=Q", _registers(thread)[_AX]))[0]
            finally:
                _poke(memory, at, before)
        return result


@contextlib.contextmanager
def standing(pids: list[int], *, thaw: Callable[[], None], freeze: Callable[[], None]) -> Iterator[Standing]:
    """Seize every thread of the frozen processes `pids`; `thaw` and `freeze` act on all of them."""
    threads = {pid: result for pid in pids if (result := _alive(pid))}
    seized: list[int] = []
    thawed = False
    try:
        for thread in (one for result in threads.values() for one in result):
            _ptrace(_SEIZE, thread, data=_TRACESYSGOOD | _SUSPEND_SECCOMP)
            seized.append(thread)
            _ptrace(_INTERRUPT, thread)
        for thread in seized:
            _stopped(thread)
        thaw()
        thawed = True
        yield Standing(threads)
    finally:
        if thawed:
            freeze()
        for thread in reversed(seized):  # of a process that was killed, the first one ends last
            try:
                _ptrace(_DETACH, thread)
            except ProcessLookupError:
                with contextlib.suppress(ChildProcessError, RestoreFailed):  # seen already; or still in the kernel
                    _wait(thread)


def _alive(pid: int) -> list[int]:
    """The threads of a process but for those that have ended, the first one first; empty when it is gone."""
    result = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in procfs.threads(pid):
            if procfs.stat(f"/proc/{pid}/task/{thread}/stat")[procfs.STATE] not in procfs.ENDED:
                result.append(thread)
    return result


@contextlib.contextmanager
def _retained(thread: int, memory: int) -> Iterator[list[int]]:
    """The registers of a thread; they, its signal mask and its restartable sequence are put back."""
    registers, mask, sequence = _registers(thread), ctypes.create_string_buffer(8), _sequence(thread)
    under_way = _peek(memory, sequence + _RSEQ_CS, 8 if sequence else 0)
    _ptrace(_GETSIGMASK, thread, 8, mask)
    _ptrace(_SETSIGMASK, thread, 8, ctypes.create_string_buffer(b"\xff" * 8, 8))
    try:
        yield registers
    finally:
        _poke(memory, sequence + _RSEQ_CS, under_way)
        _set_registers(thread, registers)
        _ptrace(_SETSIGMASK, thread, 8, mask)


@contextlib.contextmanager
def _memory(thread: int) -> Iterator[int]:
    with closing(os.open(f"/proc/{thread}/mem", os.O_RDWR | os.O_CLOEXEC)) as file:
        yield file


def _sequence(thread: int) -> int:
    """Address of the rseq area of a thread; 0 where it has none, or the kernel does not report it."""
    buffer = ctypes.create_string_buffer(24)
    try:
        _ptrace(_GET_RSEQ, thread, 24, buffer)
    except OSError as error:
        if error.errno in (errno.EIO, errno.EINVAL):
            return 0
        raise
    return int(struct.unpack_from("=Q", buffer.raw)[0])


def _instruction(pid: int, memory: int) -> int:
    """Where code of a process holds a `syscall` instruction: its vDSO has some."""
    for start, end, access, name in _maps(pid):
        if access.startswith("r-x") and name == "[vdso]":
            result = _peek(memory, start, end - start).find(_SYSCALL)
            if result >= 0:
                return start + result
    raise RestoreFailed(
        f"process {pid} has no vDSO with a system call in it",
        hint="restore it again, or an older checkpoint (`pagurus tree`)",
    )


def _capacity(pid: int, stack: int, size: int) -> int:
    """Where `size` bytes may lie for a moment: below the stack, else in the first memory that can be written."""
    below = (stack - _RED_ZONE - size) & ~15
    writable = [(start, end) for start, end, access, _ in _maps(pid) if access == "rw-p" and end - start >= size]
    if any(start <= below and below + size <= end for start, end in writable):
        return below
    if not writable:
        raise RestoreFailed(
            f"process {pid} has no memory that can be written",
            hint="restore it again, or an older checkpoint (`pagurus tree`)",
        )
    return writable[0][0]


def _maps(pid: int) -> Iterator[tuple[int, int, str, str]]:
    for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
        if (match := re.match(rb"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)", line)) is not None:
            yield int(match[1], 16), int(match[2], 16), match[3].decode(), match[4].decode(errors="replace")


def _peek(memory: int, at: int, size: int) -> bytes:
    return os.pread(memory, size, at) if size else b""


def _poke(memory: int, at: int, data: bytes) -> None:
    if data:
        os.pwrite(memory, data, at)


def _registers(thread: int) -> list[int]:
    buffer = ctypes.create_string_buffer(_REGISTERS.size)
    _ptrace(_GETREGS, thread, 0, buffer)
    return list(_REGISTERS.unpack(buffer.raw))


def _set_registers(thread: int, registers: list[int]) -> None:
    _ptrace(_SETREGS, thread, 0, ctypes.create_string_buffer(_REGISTERS.pack(*registers), _REGISTERS.size))


def _stopped(thread: int) -> int:
    """Wait until a thread has stopped; the signal that it says it stopped with."""
    status = _wait(thread)
    if not os.WIFSTOPPED(status):
        raise RestoreFailed(f"task {thread} was killed", hint="restore again")
    return os.WSTOPSIG(status)


def _wait(thread: int) -> int:
    deadline = time.monotonic() + TIMEOUT
    while True:
        result, status = os.waitpid(thread, _WALL | os.WNOHANG)
        if result:
            return status
        if time.monotonic() > deadline:
            raise RestoreFailed(f"task {thread} does not stop (in an uninterruptible wait)", hint="try again")
        time.sleep(0.0001)


def _ptrace(request: int, thread: int, address: int = 0, data: object = None) -> None:
    pointer = ctypes.cast(data, ctypes.c_void_p) if isinstance(data, ctypes.Array) else data
    if _libc.ptrace(request, thread, address, pointer) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x} of task {thread}: {os.strerror(number)}")
