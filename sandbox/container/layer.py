"""The runtime layer of sandboxes: an overlay layer with pid 1, device nodes and mount points above every image.

Guarantee: a layer that has a name never changes, since sandboxes and checkpoints stay with the one they were made with.
Needs root (device nodes) and no compiler: a package brings the two programs, its layer is made at the first start.

The standard library alone at the top: set-up runs it as a program, before there is an environment.

::

    python3 sandbox/container/layer.py PROGRAMS HOME    # HOME/layers/NAME of the three programs there
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_DIRECTORIES = {
    ".pagurus": 0o755,
    ".pagurus/empty": 0o555,
    "dev": 0o755,
    "dev/pts": 0o755,
    "dev/shm": 0o1777,
    "etc": 0o755,
    "proc": 0o555,
    "sys": 0o555,
}
_LINKS = {
    "dev/ptmx": "pts/ptmx",
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    # Each sandbox's own, and that of each fork: see sandbox/container/identity.py.
    "etc/machine-id": "/proc/sys/kernel/domainname",
}
# The daemon answers questions for names there, in each sandbox's network namespace; without a network nothing listens,
# and the question fails at once. An image's own file names servers of wherever it was built.
_RESOLV_CONF = "nameserver 127.0.0.53\noptions timeout:2 attempts:5\n"
_PROGRAMS = ("init", "attend", "relay")


def ensure() -> None:
    """Make the layer of new sandboxes where no set-up has: an installed package has none. Raises Unsupported."""
    from sandbox import hints, paths
    from sandbox.errors import Unsupported

    home, programs = paths.runtime_home(), paths.runtime_programs()
    if home == paths.prefix():
        return
    if not all((programs / name).exists() for name in _PROGRAMS):
        raise Unsupported(
            f"{programs} has no programs for sandboxes",
            hint=hints.parts(),
        )
    home.mkdir(mode=0o711, parents=True, exist_ok=True)
    build(programs, home)


def build(programs: Path, home: Path) -> str:
    """Make the layer of these programs below ``home/layers`` and point ``home/layer`` at it; its name. Idempotent."""
    layers = home / "layers"
    layers.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="new.", dir=layers))
    try:
        _fill(made, programs)
        name = _digest(made)
        if not (layers / name).is_dir():
            with contextlib.suppress(FileExistsError):
                made.rename(layers / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _point(home / "layer", f"layers/{name}")
    return name


def _fill(layer: Path, programs: Path) -> None:
    layer.chmod(0o755)
    for name, mode in _DIRECTORIES.items():
        (layer / name).mkdir()
        (layer / name).chmod(mode)
    for name in _PROGRAMS:
        shutil.copyfile(programs / name, layer / ".pagurus" / name)
        (layer / ".pagurus" / name).chmod(0o755)
    for name, (major, minor) in _DEVICES.items():
        os.mknod(layer / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        (layer / "dev" / name).chmod(0o666)
    for name, target in _LINKS.items():
        (layer / name).symlink_to(target)
    (layer / "etc" / "resolv.conf").write_text(_RESOLV_CONF)
    (layer / "etc" / "resolv.conf").chmod(0o644)


def _digest(layer: Path) -> str:
    """Of names, kinds, modes, links, devices and content."""
    digest = hashlib.sha256()
    for path in [layer, *sorted(layer.rglob("*"))]:
        result = path.lstat()
        words = [str(path.relative_to(layer)), oct(result.st_mode), str(result.st_rdev)]
        if stat.S_ISLNK(result.st_mode):
            words.append(os.readlink(path))
        elif stat.S_ISREG(result.st_mode):
            words.append(hashlib.sha256(path.read_bytes()).hexdigest())
        digest.update("\0".join(words).encode() + b"\n")
    return digest.hexdigest()[:32]


def _point(link: Path, target: str) -> None:
    """Have `link` lead to `target`, in one step."""
    if link.is_symlink() and os.readlink(link) == target:
        return
    new = link.with_name(f"{link.name}.{os.getpid()}")
    new.symlink_to(target)
    new.rename(link)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
