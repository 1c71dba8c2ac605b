"""Programs that the host puts into a sandbox by setns, as `nsenter` and `docker exec` do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox import paths
from sandbox.errors import Unsupported

NATIVE = paths.CHECKOUT / "tests" / "conformance" / "native"
WAYS = ("setns", "nested", "moved")
# Without restartable sequences: the kernel writes the number of the CPU into memory registered for them, and a survivor
# that only woke on the other CPU would differ from what it was.
STILL = {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}


def compiled(source: str, target: Path) -> Path:
    """A static program from native/."""
    if shutil.which("cc") is None:
        raise Unsupported("no C compiler", hint="install gcc and libc6-dev")
    command = ["cc", "-O2", "-static", "-pthread", "-o", str(target), str(NATIVE / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unsupported(f"{source} does not compile: {done.stderr[-500:]}", hint="install libc6-dev")
    return target


@dataclass(frozen=True)
class Done:
    """How a program ended."""

    exit_code: int
    output: str


class Enter:
    """The helper process. Ends when it is closed, or forgotten."""

    def __init__(self, program: Path):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [str(program), str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._link = ours
        self._link.settimeout(60)
        self.close = weakref.finalize(self, _end, self._link, self._process)

    def run(self, way: str, init: int, cgroup: Path, nested: Path, argv: Sequence[str]) -> Done:
        """Run a program of the sandbox to its end. `way`: see native/enter.c."""
        words = [way, str(init), str(cgroup), str(nested), *argv]
        self._link.send(b"".join(os.fsencode(word) + b"\0" for word in words))
        try:
            answer = self._link.recv(1 << 16)
        except TimeoutError as error:
            raise RuntimeError(f"{' '.join(argv)} in the sandbox of {init} does not end") from error
        if not answer:
            raise RuntimeError(f"the helper that enters sandboxes ended: {self._process.wait()}")
        status, _, output = answer.partition(b"\0")
        return Done(os.waitstatus_to_exitcode(int(status)), output.decode(errors="replace"))


def _end(link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    link.close()
    process.wait()
