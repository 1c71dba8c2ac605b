"""Images: read-only file trees that sandboxes start from.

Owns: bringing them in (directory, tar archive, debootstrap, Docker Engine), their folder, what makes a tree fit to be
a sandbox's root. Does not own: which images a job needs.
Guarantee: an image is visible under its name only when complete (built aside, synced, renamed), holds no device node,
and is never changed afterwards: its trees are lower layers of living sandboxes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.errors import Conflict, ImageNotFound, Invalid, NoSpace, Unsupported

if TYPE_CHECKING:
    from sandbox.pool import Pool

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MOUNT_POINTS = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "tmp": 0o1777, "run": 0o755, "root": 0o700, "etc": 0o755}
HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"


class ImageStore:
    """The images of a host, below ``<state>/images``."""

    def __init__(self, pool: Pool):
        self.folder = pool.images

    def list(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir() and NAME.fullmatch(path.name))

    def path(self, name: str) -> Path:
        """The tree of an image; raises ImageNotFound, which names those there are."""
        path = self.folder / name
        if NAME.fullmatch(name) is None or not path.is_dir():
            known = ", ".join(self.list()) or "none"
            raise ImageNotFound(f"no image {name!r}; there are: {known}", remedy="pagurus image import, or make setup")
        return path

    def remove(self, name: str) -> None:
        """Remove an image. The caller knows that no sandbox uses it."""
        path = self.path(name)
        gone = self.folder / f".gone-{name}-{secrets.token_hex(4)}"
        path.rename(gone)
        shutil.rmtree(gone)

    # ---------------------------------------------------------------- bringing in

    def import_directory(self, name: str, source: Path) -> Path:
        """Copy a directory, owners and extended attributes included."""
        if not source.is_dir():
            raise Invalid(f"{source} is not a directory")
        return self._build(name, lambda tree: _run("cp", "-a", "--reflink=auto", f"{source}/.", str(tree)))

    def import_tar(self, name: str, archive: Path) -> Path:
        """Unpack a tar archive of a root file system, compressed or not."""
        if not archive.is_file():
            raise Invalid(f"{archive} is not a file")
        return self._build(name, lambda tree: _run(*_untar(tree), "--file", str(archive)))

    def import_docker(self, name: str, reference: str) -> Path:
        """Take an image from the local Docker Engine, pulled if it is not there."""
        return self._build(name, lambda tree: _export_docker(reference, tree))

    def debootstrap(
        self, name: str, *, suite: str = "bookworm", include: Sequence[str] = (), mirror: str | None = None
    ) -> Path:
        """Install a minimal Debian with the packages `include`. About 80 s."""
        if shutil.which("debootstrap") is None:
            raise Unsupported("debootstrap is missing", remedy="apt-get install debootstrap")

        def install(tree: Path) -> None:
            extra = [f"--include={','.join(include)}"] if include else []
            _run("debootstrap", "--variant=minbase", *extra, suite, str(tree), mirror or _host_mirror())
            for leftover in (tree / "var/cache/apt/archives").glob("*.deb"):
                leftover.unlink()

        return self._build(name, install)

    def _build(self, name: str, fill: Callable[[Path], None]) -> Path:
        if NAME.fullmatch(name) is None:
            raise Invalid(f"not an image name: {name!r}", remedy="use a-z, 0-9, dot, dash and underscore")
        target = self.folder / name
        if target.exists():
            raise Conflict(f"image {name} exists already", remedy=f"pagurus image rm {name}")
        aside = self.folder / f".new-{name}-{secrets.token_hex(4)}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside.mkdir(mode=0o755)
        try:
            fill(aside)
            normalise(aside)
            os.sync()
            aside.rename(target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return target


def normalise(tree: Path) -> None:
    """Make a tree fit to be a sandbox's root: mount points, name resolution, and no device nodes."""
    tree.chmod(0o755)
    for node in _special(tree):
        node.unlink()
    (tree / ".dockerenv").unlink(missing_ok=True)
    if (tree / "dev").is_dir() and not (tree / "dev").is_symlink():
        shutil.rmtree(tree / "dev")  # the runtime layer brings the one that sandboxes have
    for name, mode in MOUNT_POINTS.items():
        point = tree / name
        if point.is_symlink() or (point.exists() and not point.is_dir()):
            raise Invalid(f"/{name} of the image is not a directory")
        if not point.exists():
            point.mkdir()
            point.chmod(mode)
    hosts = tree / "etc/hosts"
    if not hosts.is_symlink() and (not hosts.exists() or hosts.stat().st_size == 0):
        hosts.write_text(HOSTS)
        hosts.chmod(0o644)


def _special(tree: Path) -> Iterator[Path]:
    """Block and character devices and sockets of a tree."""
    for folder, _, files in os.walk(tree):
        for name in files:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if stat.S_ISBLK(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode):
                yield path


def _host_mirror() -> str:
    """The Debian mirror that the host's own apt uses."""
    sources = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    for path in sources:
        with contextlib.suppress(FileNotFoundError):
            text = path.read_text()
            match = re.search(r"^(?:URIs:|deb(?:\s+\[[^\]]*\])?)\s+(\S*/debian/?)(?:\s|$)", text, re.MULTILINE)
            if match is not None:
                return match[1]
    raise Unsupported("apt's sources name no Debian mirror", remedy="name one: debootstrap(..., mirror=...)")


def _untar(tree: Path) -> list[str]:
    # GNU tar refuses names with "..", strips leading slashes, and makes links that point outside only at the end.
    return ["tar", "--extract", "--numeric-owner", "--preserve-permissions", "--xattrs", "--directory", str(tree)]


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        _fail(argv[0], done.stdout + done.stderr)


def _fail(program: str, output: str) -> None:
    tail = " | ".join(output.strip().splitlines()[-4:])
    if "No space left" in output:
        raise NoSpace(f"{program}: {tail}", remedy="free disk space and repeat")
    raise Invalid(f"{program} failed: {tail}")


def _export_docker(reference: str, tree: Path) -> None:
    import docker  # a second of import time that nobody else pays
    from docker.errors import APIError, DockerException
    from docker.errors import ImageNotFound as NoSuchImage

    try:
        engine: Any = docker.from_env()
    except DockerException as error:
        raise Unsupported(
            f"no Docker Engine answers: {error}", remedy="start dockerd, or import a tar, a directory or debootstrap"
        ) from error
    try:
        with contextlib.closing(engine):
            try:
                engine.images.get(reference)
            except NoSuchImage:
                engine.images.pull(reference)
            container = engine.containers.create(reference, command=["/bin/true"])
            try:
                _untar_stream(container.export(), tree)
            finally:
                container.remove(force=True)
    except NoSuchImage as error:
        raise ImageNotFound(f"the Docker Engine has no image {reference!r} and cannot pull it") from error
    except APIError as error:
        raise Invalid(f"Docker Engine: {error.explanation or error}") from error


def _untar_stream(chunks: Iterator[bytes], tree: Path) -> None:
    with subprocess.Popen([*_untar(tree), "--file", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as tar:
        assert tar.stdin is not None and tar.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # tar says why on stderr
            for chunk in chunks:
                tar.stdin.write(chunk)
            tar.stdin.close()
        error = tar.stderr.read().decode("utf-8", "replace")
    if tar.returncode:
        _fail("tar", error)
