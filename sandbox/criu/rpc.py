"""CRIU's RPC over a transport of ours: one worker process, one protobuf per packet.

Guarantee: :meth:`CriuWorker.call` returns a successful response or raises :class:`CriuError` with CRIU's message and
the tail of its log; a NOTIFY callback runs before CRIU continues, on the thread of the exchange, so that what it does
happens exactly at that point of the dump.

pycriu supplies the messages only. Its client forks, drops ``cr_errmsg`` and cannot answer NOTIFY.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from sandbox import hints, paths
from sandbox.container.shim import going_first
from sandbox.criu import Record
from sandbox.descriptors import closing
from sandbox.errors import Unsupported
from sandbox.libc import checked, library

PACKET = 1 << 20  # CRIU's responses are far smaller
LOG_TAIL_LINES = 6
_EXCHANGES = ThreadPoolExecutor(
    128, "criu"
)  # each waits for a CRIU, which may take long: nothing short is kept from it
#: CRIU complains harmlessly where it may not raise the limit, and where its private root has no tun device.
NOISE = re.compile("RLIMIT_NOFILE|Unable to create tun")

#: Notifications of a CRIU that is started ahead; the last one is native/written.c's.
STARTING = ("pre-dump", "ready")

#: What to do at a NOTIFY, by the name of CRIU's script; called with the pid that CRIU passes (0 when none).
Notify = Mapping[str, Callable[[int], None]]


class CriuError(Exception):
    """CRIU refused or died. `words` are its own, `log` the tail of its log."""

    def __init__(self, words: str, log: str = ""):
        super().__init__(words)
        self.words = words
        self.log = log

    def __str__(self) -> str:
        return f"{self.words}; log: {self.log}" if self.log and self.log != self.words else self.words


@functools.cache
def messages() -> ModuleType:
    """pycriu's rpc_pb2, from the Python path or from CRIU's private prefix."""
    _find_pycriu()
    return importlib.import_module("pycriu.rpc_pb2")


@functools.cache
def images() -> ModuleType:
    """pycriu's image parser."""
    _find_pycriu()
    return importlib.import_module("pycriu.images")


def options(**own: Any) -> Record:
    """What a dump and a restore ask for alike, and what is its `own`."""
    return messages().criu_opts(  # type: ignore[no-any-return]
        images_dir_fd=-1,  # required, and for nothing
        tcp_established=True,
        shell_job=True,
        file_locks=True,
        link_remap=True,
        orphan_pts_master=True,
        manage_cgroups=True,
        manage_cgroups_mode=messages().IGNORE,
        notify_scripts=True,
        log_level=2,
        **own,
    )


def load(path: Path) -> list[dict[str, Any]]:
    """The entries of an image file as dictionaries, slowly."""
    with open(path, "rb") as file:
        entries: list[dict[str, Any]] = images().load(file)["entries"]
    return entries


def as_dictionary(message: Record) -> dict[str, Any]:
    """A message of an image as pycriu's parser gives it."""
    _find_pycriu()
    from pycriu.images import pb2dict

    return pb2dict.pb2dict(message)  # type: ignore[no-any-return]


@functools.cache
def _find_pycriu() -> None:
    with contextlib.suppress(ImportError):
        import pycriu  # noqa: F401

        return
    for result in sorted((paths.prefix() / "criu").glob("**/pycriu/rpc_pb2.py")):
        sys.path.append(str(result.parent.parent))
        return
    raise Unsupported("pycriu (CRIU's message classes) is not installed", hint=hints.parts())


#: Where CRIU finds what it works with, in its root.
IMAGES = "/images"
SANDBOX = "/sandbox"
MOUNTS = "/mounts"
GROUPS = "/groups"
IMAGES_FD = 4  # in the launcher; 3 is the socket
FIRST_FD = 5  # of those that a worker is given

_SYS_OPEN_TREE = 428
_OPEN_TREE_CLONE = 1
_AT_EMPTY_PATH = 0x1000


def launcher() -> Path:
    """The helper that starts CRIU in its private root."""
    return paths.prefix() / "bin" / "pagurus-criu-root"


@dataclass(frozen=True)
class Root:
    """What CRIU's private root holds in addition to CRIU and /proc."""

    cache: Path  # a directory on a tmpfs: what CRIU knows of the kernel
    images: Path  # the directory in which it reads or writes
    sandbox: Path | None = None  # the root of the sandbox, in the shim's mount namespace
    mounts: Sequence[Path] = ()  # directories of the host that the sandbox gets, likewise
    result: Sequence[int | None] = ()  # descriptors that our plugin looks for among CRIU's: see native/waits.c
    preload: Path | None = None  # a library that is loaded before CRIU's own
    groups: Mapping[str, Path] = field(default_factory=dict)  # the sandbox's control groups, by their names in GROUPS
    onward: tuple[str, str] | None = None  # of ServiceGroups, with a new namespace of control groups

    def program(self, *, cgroup_namespace: bool, first_group: int) -> list[str]:
        """The argument vector that starts CRIU; verbs are appended. `first_group`: descriptor of the first of these."""
        plugins = _resolved(paths.criu_plugins())  # the private root has no link to it
        preload = [] if self.preload is None else [_resolved(self.preload)]
        for needed in (launcher(), paths.criu(), plugins / "waits.so", *preload):
            if not needed.exists():
                raise Unsupported(f"{needed} is missing", hint=hints.parts())
        words = _words(paths.criu())
        return [
            str(launcher()),
            f"images={IMAGES_FD}",
            *(f"group={name}:{first_group + number}" for number, name in enumerate(self.groups)),
            f"run={self.cache}",
            *(f"program={part}" for part in (*_parts(words), str(plugins), *preload)),
            *(f"preload={part}" for part in preload),
            *([f"sandbox={self.sandbox}"] if self.sandbox is not None else []),
            *(f"mount={place}" for place in self.mounts),
            *(["ptrace=never"] if self.sandbox is not None else []),  # a dump enters namespaces as another user
            *(["cgroupns=new"] if cgroup_namespace else []),
            *(["leaf=" + ":".join(self.onward)] if cgroup_namespace and self.onward is not None else []),
            *words,
            "--libdir",
            str(plugins),
        ]


def _detached(directory: Path) -> int:
    """A mount of `directory` that lies nowhere: a process that works in it finds nothing above it."""
    with closing(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        flags = _OPEN_TREE_CLONE | _AT_EMPTY_PATH | os.O_CLOEXEC
        return checked(library.syscall(_SYS_OPEN_TREE, fd, b"", flags), str(directory))


def _all_detached(directories: Sequence[Path]) -> list[int]:
    result: list[int] = []
    try:
        for directory in directories:
            result.append(_detached(directory))
    except BaseException:
        for fd in result:
            os.close(fd)
        raise
    return result


_BY_ITS_NAME = "${0%/bin/criu}"  # in a launcher that scripts/criu.sh wrote: the directory above its own


@functools.cache
def _resolved(path: Path) -> Path:
    return path.resolve()


@functools.cache
def _words(program: Path) -> tuple[str, ...]:
    """What to execute: of a launcher script the words of its exec line, since starting a shell costs 3 ms."""
    content = program.read_bytes()
    if content.startswith(b"#!"):
        for line in content.decode().splitlines():
            words = shlex.split(line.replace(_BY_ITS_NAME, str(program.parent.parent)))
            if words[:1] == ["exec"] and words[-1] == "$@" and not any("$" in word for word in words[:-1]):
                return tuple(words[1:-1])
    return (str(program),)


@functools.cache
def _parts(words: tuple[str, ...]) -> tuple[str, ...]:
    """The files and directories that CRIU consists of: its loader's, or the system's libraries."""
    if len(words) > 1:  # LOADER --library-path LIBRARIES CRIU
        return words[2], words[3]
    return tuple(
        path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache") if os.path.lexists(path)
    )


class CriuStart:
    """What a ``criu swrk`` process is started with: ``argv`` and ``fds``, which become its 3, 4, ..."""

    def __init__(self, argv: Sequence[str], fds: Sequence[int], ours: socket.socket):
        self.argv, self.fds = argv, fds
        self._ours = ours

    @classmethod
    @contextlib.asynccontextmanager
    async def prepare(cls, root: Root, fds: Sequence[int] = (), *, cgroup_namespace: bool) -> AsyncIterator[CriuStart]:
        """To be started within; `fds` become its descriptors FIRST_FD, FIRST_FD + 1, ... (3 is the socket)."""
        result = [fd for fd in root.result if fd is not None]
        argv = root.program(cgroup_namespace=cgroup_namespace, first_group=FIRST_FD + len(fds) + len(result))
        images, *groups = await asyncio.to_thread(_all_detached, [root.images, *root.groups.values()])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.enter_context(ours)
            try:
                yield cls([*argv, "swrk", "3"], [theirs.fileno(), images, *fds, *result, *groups], ours)
            finally:
                for fd in (images, *groups):
                    os.close(fd)
            undo.pop_all()

    def worker(self, pid: int) -> CriuWorker:
        """It has been started."""
        return CriuWorker(self._ours, pid, os.pidfd_open(pid))


class CriuWorker:
    """One ``criu swrk`` process. It waits, warm, for its one request; closing the socket ends it."""

    def __init__(self, sock: socket.socket, pid: int, pidfd: int):
        self._socket = sock
        self._pidfd = pidfd
        self._sent = b""  # the request, where it has been sent
        self.pid = pid
        self.used = False

    async def start(self, request: bytes) -> None:
        """Send a request for a dump ahead of :meth:`call`: CRIU does what it can before the first task is stopped.

        Raises CriuError when it refuses or dies; Unsupported when it does not wait there.
        """
        self._sent = request
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        try:
            await loop.sock_sendall(self._socket, request)
            for script in STARTING:
                if not (packet := await loop.sock_recv(self._socket, PACKET)):
                    raise CriuError("CRIU died without an answer")
                response = messages().criu_resp()
                response.ParseFromString(packet)
                if response.type != messages().NOTIFY:
                    raise CriuError(_failure(response))
                if response.notify.script != script:  # the tasks are stopped already, and go on when it has gone
                    self.kill()
                    why = "CRIU does not wait before a dump: its library is of another version"
                    raise Unsupported(why, hint=hints.parts())
                if script != STARTING[-1]:  # that one is answered when the dump is wanted
                    await loop.sock_sendall(self._socket, _proceed(True))
        except OSError as error:
            raise CriuError("CRIU died without an answer") from error

    async def call(
        self,
        request: bytes,
        *,
        notify: Notify,
        timeout: float,
        log: Path,
        kill_on_cancel: bool,
    ) -> Record:
        """Send `request`, unless it was started, answer every NOTIFY, return the response.

        When the caller is cancelled, a restore is killed; a dump is waited for, since killing CRIU while its
        code sits in a task would wreck the task.
        """
        self.used = True
        loop = asyncio.get_running_loop()
        exchange = loop.run_in_executor(_EXCHANGES, self._exchange, request, notify, timeout)
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if kill_on_cancel:
                self.kill()
            with contextlib.suppress(CriuError, OSError):
                await exchange
            raise
        except CriuError as error:
            words = await asyncio.to_thread(first_error, log) if NOISE.search(error.words) else error.words
            raise CriuError(words or error.words, await asyncio.to_thread(tail, log)) from None
        finally:
            self.close()

    def _exchange(self, request: bytes, notify: Notify, timeout: float) -> Record:
        with going_first():
            return self._speak(request, notify, timeout)

    def _speak(self, request: bytes, notify: Notify, timeout: float) -> Record:
        rpc = messages()
        self._socket.settimeout(timeout)
        failed: BaseException | None = None
        try:
            if self._sent and self._sent != request:
                raise ValueError("CRIU was started for another request")
            self._socket.send(_proceed(True) if self._sent else request)
            while True:
                packet = self._socket.recv(PACKET)
                if not packet:
                    raise CriuError("CRIU died without an answer") from failed
                response: Record = rpc.criu_resp()
                response.ParseFromString(packet)
                if response.type != rpc.NOTIFY:
                    break
                callback = notify.get(response.notify.script)
                if callback is not None and failed is None:
                    failed = _run(callback, response.notify.pid)
                self._socket.send(_proceed(failed is None))
        except TimeoutError:
            self.kill()
            raise CriuError(f"CRIU gave no answer within {timeout:g} s and was killed") from None
        except (BrokenPipeError, ConnectionResetError):
            raise CriuError("CRIU died without an answer") from failed
        if failed is not None:
            raise failed
        if not response.success:
            raise CriuError(_failure(response))
        return response

    @property
    def pidfd(self) -> int:
        return self._pidfd

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def alive(self) -> bool:
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except (ProcessLookupError, OSError):
            return False
        return not self.used

    def close(self) -> None:
        """Close the socket: a waiting worker ends by itself. Idempotent."""
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _failure(response: Record) -> str:
    words = response.cr_errmsg.strip() or f"CRIU failed with errno {response.cr_errno}"
    return re.sub(r"^Error\s*", "", words)


def _proceed(good: bool) -> bytes:
    """The answer to a notification."""
    rpc = messages()
    return bytes(rpc.criu_req(type=rpc.NOTIFY, notify_success=good).SerializeToString())


def _run(callback: Callable[[int], None], pid: int) -> BaseException | None:
    """A callback's failure must still be answered to CRIU, which then thaws; it is raised afterwards."""
    try:
        callback(pid)
    except BaseException as error:  # noqa: BLE001 - handed to the caller after CRIU has thawed the tasks
        return error
    return None


def first_error(log: Path) -> str:
    """The first error in a CRIU log: the cause; what follows are its consequences."""
    result = _errors(log)
    return result[0] if result else ""


def tail(log: Path) -> str:
    """The last errors of a CRIU log, joined; empty when there are none."""
    return " | ".join(_errors(log)[-LOG_TAIL_LINES:])


def _errors(log: Path) -> list[str]:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return []
    errors = [line for line in lines if "Error" in line and not NOISE.search(line)]
    return [re.sub(r"^\(\s*[\d.]+\)\s*|^.*?Error\s*", "", line).strip() for line in errors]
