"""redis-server for a bench, from Debian's packages, without touching an image.

Guarantee: :func:`layer` gives a directory that is complete, or says why there is none.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from sandbox import paths

PACKAGES = ("redis-tools", "libjemalloc2", "liblzf1", "libatomic1")  # what the base image lacks
PLACE = "opt/redis"  # in the sandbox
KEYS = 20_000
START = (
    f"LD_LIBRARY_PATH=/{PLACE} /{PLACE}/redis-server --save '' --enable-debug-command yes --dir /tmp --daemonize no "
    "</dev/null >/dev/null 2>&1 & "
    "bash -c 'until exec 3<>/dev/tcp/127.0.0.1/6379; do sleep 0.05; done 2>/dev/null; "
    f'printf "DEBUG POPULATE {KEYS}\\r\\n" >&3; read -r answer <&3; [ "$answer" = "+OK$(printf "\\r")" ]\''
)


def layer() -> Path:
    """A directory whose content belongs to PLACE. Raises OSError with the reason when it cannot be had. Blocks."""
    retained = paths.state() / "bench" / "redis"
    if retained.is_dir():
        return retained
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise OSError("redis-server comes from Debian's packages, and apt-get is missing")
    retained.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=retained.parent) as name:
        work = Path(name)
        _run(work, "apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *PACKAGES)
        for package in sorted(work.glob("*.deb")):
            _run(work, "dpkg-deb", "-x", str(package), "root")
        made = work / "redis"
        made.mkdir()
        shutil.copy2(work / "root/usr/bin/redis-check-rdb", made / "redis-server")  # one program by several names
        for library in (work / "root").glob("**/*.so.*"):
            shutil.copyfile(library, made / _soname(library))
        made.rename(retained)
    return retained


def _soname(library: Path) -> str:
    """``libatomic.so.1.2.0`` is asked for as ``libatomic.so.1``."""
    stem, _, version = library.name.partition(".so.")
    return f"{stem}.so.{version.split('.')[0]}"


def _run(directory: Path, *argv: str) -> None:
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise OSError(f"{' '.join(argv[:1])}: {done.stderr.strip()[-300:]}")
