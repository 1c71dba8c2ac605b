"""Unpacks an archive in a process of its own: ``python -m sandbox.image.unpacking SOURCE TREE``.

Guarantee: what an archive makes its reader do (decompress, read headers, write) takes neither memory nor threads of the
caller's: the process has a limit of memory and of time, and ends with the one that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from sandbox.errors import ErrorBody, Invalid, NoSpace, PagurusError, from_body, hinted
from sandbox.image import oci
from sandbox.messages import ImageConfig

MAX_MEMORY = 1 << 30  # bytes of the process
TIMEOUT = 3600.0  # seconds
NICE = 10
LAYOUT = "layout"  # next to the tree: what an archive of a layout is unpacked to, removed with the tree's directory
_DEATH_SIGNAL = 1  # prctl


class UnpackedImage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the process prints."""

    config: ImageConfig | None = None
    error: ErrorBody | None = None


def unpack(source: Path, tree: Path) -> ImageConfig | None:
    """Fill the empty directory `tree`, whose parent is the caller's own. Blocks."""
    argv = [sys.executable, "-m", "sandbox.image.unpacking", str(source), str(tree)]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=TIMEOUT, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise Invalid(
            f"{source.name} was not unpacked within {TIMEOUT:.0f} s",
            hint="make the image smaller, or try again while the host does less",
        ) from None
    try:
        said = msgspec.json.decode(done.stdout, type=UnpackedImage)
    except msgspec.DecodeError:
        text = f"the process that unpacked {source.name} ended with status {done.returncode}"
        raise PagurusError(text, hint="try again; see the host's memory and the log") from None
    if said.error is not None:
        raise from_body(said.error)
    return said.config


def bound_process() -> None:
    """Bound this process, which reads what a stranger has packed; it ends with the one that started it."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


@hinted("make the archive again: `docker save`, `skopeo copy`, or `tar` of a root directory")
def fill(source: Path, tree: Path) -> ImageConfig | None:
    """What the process does, in this one."""
    if source.is_dir():
        return oci.unpack(source, tree)
    if not oci.is_layout(source):
        oci.unpack_root(source, tree)
        return None
    layout = tree.parent / LAYOUT
    layout.mkdir(mode=0o700)
    oci.extract_layout(source, layout)
    return oci.unpack(layout, tree)


def main(source: str, tree: str) -> int:
    bound_process()
    try:
        said = UnpackedImage(config=fill(Path(source), Path(tree)))
    except PagurusError as error:
        said = UnpackedImage(error=error.body())
    except MemoryError:
        text = f"reading the archive takes more than {MAX_MEMORY >> 20} MiB of memory"
        said = UnpackedImage(error=Invalid(text, hint="pack the image again").body())
    except OSError as error:
        said = UnpackedImage(error=NoSpace(str(error), hint="free disk space and repeat").body())
    sys.stdout.buffer.write(msgspec.json.encode(said))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
