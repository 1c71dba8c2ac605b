"""An image with the languages and servers that Debian has, and in each of them programs that wait.

Guarantee: :func:`image` gives a tree that is complete; a language that could not be had is in `missing`, with why.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sandbox import paths

PACKAGES = {
    "ruby": ("ruby",),
    "node": ("nodejs",),
    "java": ("default-jdk-headless",),
    "redis": ("redis-server",),
    "go": ("golang-go",),
}
PROGRAMS = {"perl": "perl", "python": "python3", "bash": "bash"}  # that the image itself has
NATIVE = Path(__file__).parent / "native"
SOURCES = NATIVE / "sleepers"
PLACE = "opt/sleepers"  # in the image
_JAVA = "/usr/lib/jvm/java-17-openjdk-amd64/bin"
_GO = "/usr/lib/go-1.19/bin/go"
_ENVIRONMENT = "PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp GOCACHE=/tmp/go GOFLAGS=-buildvcs=false"

CALLS = f"/{PLACE}/waits"  # many calls, from C
#: How each program is started: with the seconds and the file of its outcomes.
COMMANDS = {
    "bash": f"bash /{PLACE}/wait.sh",
    "perl": f"perl /{PLACE}/wait.pl",
    "python": f"python3 /{PLACE}/wait.py",
    "ruby": f"ruby /{PLACE}/wait.rb",
    "node": f"node /{PLACE}/wait.js",
    "java": f"{_JAVA}/java -Xshare:auto -cp /{PLACE} Wait",
    "go": f"/{PLACE}/wait-go",
    "redis": f"python3 /{PLACE}/wait_redis.py",
}


def image(base: Path) -> tuple[Path, dict[str, str]]:
    """A copy of the image tree `base` with everything in it, and what is missing. Kept below the state. Blocks."""
    retained = paths.state() / "bench" / "languages" / _version(base) / "tree"
    missing = {name: "not in the image" for name, program in PROGRAMS.items() if not _has(base, program)}
    if (retained / PLACE / "missing").exists() and (retained / PLACE / "missing").read_text():
        shutil.rmtree(retained.parent)  # what could not be fetched then may be there now
    if not retained.is_dir():
        retained.parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=retained.parent.parent) as name:
            _make(base, Path(name) / "new" / "tree")
            (Path(name) / "new").rename(retained.parent)
    lines = (retained / PLACE / "missing").read_text().splitlines()
    return retained, missing | dict(line.split("\t", 1) for line in lines)


def _make(base: Path, tree: Path) -> None:
    tree.parent.mkdir()
    _run("cp", "-a", "--reflink=auto", f"{base.resolve()}/.", str(tree))
    shutil.copy(base.resolve().parent / "image.json", tree.parent)  # what the image store knows of it
    (tree / PLACE).mkdir(parents=True)
    for source in SOURCES.iterdir():
        shutil.copy(source, tree / PLACE)
    _run("cc", "-O2", "-static", "-pthread", "-o", str(tree / PLACE / "waits"), str(NATIVE / "waits.c"))
    failed = {name: why for name in PACKAGES if (why := _add(tree, name))}
    (tree / PLACE / "missing").write_text("".join(f"{name}\t{why}\n" for name, why in failed.items()))


def _version(base: Path) -> str:
    """Changes with the programs and the image; as the name of the tree it stands for a digest of the content."""
    newest = max(int(source.stat().st_mtime) for source in (*SOURCES.iterdir(), NATIVE / "waits.c"))
    return hashlib.sha256(f"{base.resolve()} {newest}".encode()).hexdigest()


def _has(tree: Path, program: str) -> bool:
    return any((tree / place / program).exists() for place in ("usr/bin", "bin"))


def _add(tree: Path, name: str) -> str:
    """Put a language into the tree; returns why that cannot be, or ""."""
    cache = Path(f"{tree.parent}-{name}")
    try:
        (cache / "archives" / "partial").mkdir(parents=True)
        status = ["-o", f"Dir::State::status={tree}/var/lib/dpkg/status", "-o", f"Dir::Cache={cache}"]
        options = ["-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1", "--no-install-recommends"]
        _run("apt-get", "-qq", *status, *options, "install", "-y", "--download-only", *PACKAGES[name])
        for package in sorted((cache / "archives").glob("*.deb")):
            # Not -x, which puts directories in the place of the links /bin and /lib.
            _run("sh", "-c", f"dpkg-deb --fsys-tarfile {package} | tar -x --keep-directory-symlink -C {tree}")
        if name == "java":
            _inside(tree, f"{_JAVA}/java -Xshare:dump && {_JAVA}/javac -d /{PLACE} /{PLACE}/Wait.java")
        if name == "go":
            _inside(
                tree, f"cd /{PLACE} && CGO_ENABLED=0 {_GO} build -o wait-go wait.go && rm -rf /tmp/go /usr/lib/go-1.19"
            )
    except OSError as error:
        return str(error).replace("\n", " ")[-300:]
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return ""


def _inside(tree: Path, script: str) -> None:
    mounts = f"mount -t proc proc {tree}/proc && mount --rbind /dev {tree}/dev"
    inner = f"env -i {_ENVIRONMENT} sh -c '{script}'"
    _run("unshare", "-m", "sh", "-c", f"{mounts} && chroot {tree} {inner}")


def _run(*argv: str) -> None:
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    if done.returncode:
        raise OSError(f"{' '.join(argv[:2])}: {(done.stderr or done.stdout).strip()[-300:]}")
