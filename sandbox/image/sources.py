"""Where images come from: a directory, an archive, debootstrap, a Docker Engine.

Guarantee: a source that fails raises with its own words; the caller throws the half-filled directory away.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sandbox.container import identity
from sandbox.errors import ImageNotFound, Invalid, NoSpace, Unsupported
from sandbox.image import unpacking
from sandbox.messages import ImageConfig
from sandbox.tree import walk
from sandbox.tree.safe_path import refused
from sandbox.tree.space import Reserve

COPY = (sys.executable, "-m", "sandbox.tree.copy")


def directory(source: Path, tree: Path) -> None:
    """Copy a directory, owners and extended attributes included."""
    if not source.is_dir():
        raise Invalid(f"{source} is not a directory", hint="name a directory, or an archive")
    _run(*COPY, str(source.resolve()), str(tree))


def archive(source: Path, tree: Path) -> ImageConfig | None:
    """Unpack an OCI layout, what ``docker save`` wrote, or a tar of a root file system."""
    if not source.is_file() and not (source / "index.json").is_file():
        raise Invalid(f"{source} is not a file", hint="name an archive, or a directory")
    return unpacking.unpack(source.resolve(), tree)


def debootstrap(tree: Path, suite: str, include: Sequence[str], mirror: str | None) -> None:
    """Install a minimal Debian."""
    if shutil.which("debootstrap") is None:
        raise Unsupported("debootstrap is missing", hint="apt-get install debootstrap")
    extra = [f"--include={','.join(include)}"] if include else []
    _run("debootstrap", "--variant=minbase", *extra, suite, str(tree), mirror or _host_mirror())
    for leftover in (tree / "var/cache/apt/archives").glob("*.deb"):
        leftover.unlink()


def docker(reference: str, tree: Path) -> ImageConfig | None:
    """Take an image from the local Docker Engine, with its configuration."""
    import docker as sdk  # a second of import time that no other command pays
    from docker.errors import APIError, DockerException
    from docker.errors import ImageNotFound as NoSuchImage

    try:
        engine = sdk.from_env()
    except DockerException as error:
        raise Unsupported(
            f"no Docker Engine answers: {error}", hint="start dockerd, or import an archive, or use debootstrap"
        ) from error
    try:
        with contextlib.closing(engine), tempfile.NamedTemporaryFile(dir=tree.parent) as saved:
            try:
                image = engine.images.get(reference)
            except NoSuchImage:
                image = engine.images.pull(reference)
            reserve = Reserve(saved.fileno())
            for chunk in image.save():
                try:
                    reserve.take(len(chunk))
                except OSError as error:
                    raise refused(error, f"the image {reference}") from error
                saved.write(chunk)
            saved.flush()
            return archive(Path(saved.name), tree)
    except NoSuchImage as error:
        raise ImageNotFound(
            f"the Docker Engine has no image {reference!r} and cannot pull it",
            hint="pull it with `docker pull`, or use `pagurus image pull`",
        ) from error
    except APIError as error:
        raise Invalid(
            f"Docker Engine: {error.explanation or error}",
            hint="see `docker info`; `pagurus image pull` needs no Docker Engine",
        ) from error


def checkpoint(upper: Path | None, lower: Path, tree: Path) -> None:
    """Copy the files of a checkpoint: what its sandbox wrote (None: nothing) over the tree of its image."""
    top = tree.parent / "top"
    top.mkdir()
    try:
        layers = [top] if identity.without_host(top, upper, lower) else []
        overlay([*layers, *([upper] if upper is not None else []), lower], tree)
    finally:
        walk.remove_path(top)


def overlay(layers: Sequence[Path], tree: Path) -> None:
    """Copy what an overlay of these directories shows, the topmost first."""
    if len(layers) == 1:
        return directory(layers[0], tree)
    point = tree.parent / "merged"
    point.mkdir()
    # In a mount namespace of its own, so that no crash leaves the mount behind. Paths are passed as arguments.
    script = 'mount -t overlay overlay -o "ro,lowerdir=$1" "$2"; a=$2 b=$3; shift 3; exec "$@" "$a" "$b"'
    below = ":".join(_layer(layer) for layer in layers)
    _run("unshare", "--mount", "sh", "-ec", script, "sh", below, str(point), str(tree), *COPY)
    point.rmdir()
    return None


def _layer(path: Path) -> str:
    """A path as overlayfs reads it in a list of layers."""
    return re.sub(r"([\\:,])", r"\\\1", str(path))


def _host_mirror() -> str:
    """The Debian mirror that the host's own apt uses."""
    sources = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    for path in sources:
        with contextlib.suppress(FileNotFoundError):
            text = path.read_text()
            match = re.search(r"^(?:URIs:|deb(?:\s+\[[^\]]*\])?)\s+(\S*/debian/?)(?:\s|$)", text, re.MULTILINE)
            if match is not None:
                return match[1]
    raise Unsupported("apt's sources name no Debian mirror", hint="name one: debootstrap(..., mirror=...)")


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = " | ".join((done.stdout + done.stderr).strip().splitlines()[-4:])
        if "No space left" in done.stdout + done.stderr:
            raise NoSpace(f"{argv[0]}: {tail}", hint="free disk space and repeat")
        if "is larger than a file" in tail:
            raise Invalid(tail, hint="make the file smaller (`truncate`) or remove it, then take a checkpoint of that")
        raise Invalid(f"{argv[0]} failed: {tail}", hint="correct what it says, and try again")
