"""Images: read-only file trees that sandboxes start from, stored by their content.

Guarantee: an image is visible under its name only when complete (built aside, synced, renamed), holds no device node,
and is never changed afterwards: its trees are lower layers of living sandboxes. Equal trees are stored once; a tree is
removed only when no name points to it and the caller says that it is not used.

::

    <state>/images/NAME                     symbolic link to a tree; ``%2F`` is a slash of the name
    <state>/images/.layers/                 layers of registries, as they came (:mod:`sandbox.image.registry`)
    <state>/images/.trees/DIGEST/tree/      the tree
    <state>/images/.trees/DIGEST/image.json its source, size and configuration
    <state>/images/.trees/DIGEST/CONFIG/    another configuration of the same tree: image.json, and a link to the tree
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
from blake3 import blake3

from sandbox import hints
from sandbox.descriptors import closing
from sandbox.errors import Conflict, ImageNotFound, Invalid
from sandbox.image import reference, registry, sources
from sandbox.messages import ImageConfig, ImageInfo
from sandbox.tree import btrfs, facts, walk
from sandbox.tree.copy_into import ALWAYS_THERE
from sandbox.tree.safe_path import NO_LINKS, directory, openat2

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MAX_FILE = 250  # characters of the name of a file
DIGEST = re.compile(r"[0-9a-f]{64}")
MOUNT_POINTS = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "tmp": 0o1777, "run": 0o755, "root": 0o700, "etc": 0o755}
BUILT, COMPOSED = "built-", "composition-"  # beginnings of names that the daemon gives; no list of names shows them
HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
Used = Callable[[], Container[str]]  # digests of trees that sandboxes use, or are about to
Fill = Callable[[Path], ImageConfig | None]


class _Record(msgspec.Struct, kw_only=True):
    """image.json"""

    source: str
    created_at: float
    size: int
    config: ImageConfig


@dataclass(frozen=True)
class StoredImage:
    """A tree and what is known of it."""

    digest: str
    tree: Path
    config: ImageConfig


class ImageStore:
    """The images of a host, below ``<state>/images``. Several processes may use it at once."""

    def __init__(self, images: Path):
        self.directory = images
        self.trees = images / ".trees"
        self.layers = images / ".layers"  # of registries, as they came

    # ---------------------------------------------------------------- finding

    def list(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        here = [(unquote(path.name), path) for path in self.directory.iterdir() if not path.name.startswith(".")]
        return sorted(name for name, path in here if path.is_dir() and filed(name) == path.name)

    def info(self, name: str, used: dict[str, int] | None = None) -> ImageInfo:
        """An image as listed; `used` counts the sandboxes that use a digest."""
        image = self.resolve(name)
        record = _read(self._place(name))
        return ImageInfo(
            name=name,
            digest=image.digest,
            source=record.source,
            created_at=record.created_at,
            size=record.size,
            used_by=(used or {}).get(image.digest, 0),
            config=record.config,
        )

    def resolve(self, name: str) -> StoredImage:
        """The image that `name` means now; raises ImageNotFound, which names those there are.

        ``python`` and ``docker.io/library/python:latest`` are one image, whichever name it has here. A plain directory
        that a user put there is taken in first, which reads all of it once.
        """
        path = self._path(name)
        if path is None:
            existing = ", ".join(name for name in self.list() if not name.startswith((BUILT, COMPOSED))) or "none"
            raise ImageNotFound(
                f"no image {name!r}; there are: {existing}",
                hint=f"pagurus image pull or import; for debian {hints.image()}",
            )
        tree = path.resolve()
        if not _stored(tree):
            tree = self._take_in(path, tree)
        return StoredImage(tree.parent.name, tree, _read(self._place(name)).config)

    def _place(self, name: str) -> Path:
        """The directory with the image.json of this name."""
        path = self._path(name) or self.directory
        while path.is_symlink():  # a name may point to one of another store
            path = path.parent / os.readlink(path)
            if (path.parent / "image.json").is_file():
                break
        return path.parent

    def _path(self, name: str) -> Path | None:
        """What points to the image that `name` means."""
        latest = f":{reference.LATEST}"
        for file in filter(None, (filed(name), filed(f"{name}{latest}"))):
            for item in (file, file.removesuffix(latest)):
                if (self.directory / item).is_dir():
                    return self.directory / item
        return None

    def path(self, name: str) -> Path:
        """The tree of an image; raises ImageNotFound."""
        return self.resolve(name).tree

    def image(self, content: str, name: str = "") -> StoredImage:
        """The image with this digest, whether or not a name still points to it; configured as `name` if that does."""
        if name in self.list() and (named := self.resolve(name)).digest == content:
            return named
        tree = self.tree(content)
        return StoredImage(content, tree, _read(tree.parent).config)

    def tree(self, content: str) -> Path:
        """The tree with this digest, whether or not a name still points to it."""
        tree = self.trees / content / "tree"
        if DIGEST.fullmatch(content) is not None:
            if tree.is_dir():
                return tree.resolve()
            for name in self.list():  # a name may point into another store
                if (result := self.resolve(name)).digest == content:
                    return result.tree
        raise ImageNotFound(f"no image with the content {content[:16]}", hint="import the image that it came from")

    # ---------------------------------------------------------------- removing

    def remove(self, name: str, used: Used = tuple) -> bool:
        """Remove a name, and its tree unless another name points to it or `used` says that it is used.

        Returns whether the tree went too.
        """
        with self._locked():
            image = self.resolve(name)
            (self._path(name) or self.directory).unlink()
            if any(self.resolve(other).digest == image.digest for other in self.list()):
                return False
            return self._drop(image.digest, used)

    def collect(self, used: Used) -> int:
        """Remove trees that no name points to and no sandbox uses, and what a crash left half made; how many trees.

        What another process is making stays.
        """
        with self._locked():
            named = {self.resolve(name).digest for name in self.list()}
            gone = 0
            for entry in _entries(self.trees):
                if DIGEST.fullmatch(entry.name) is None:
                    held = contextlib.nullcontext() if entry.is_symlink() else _alone(entry)
                    with contextlib.suppress(OSError), held:  # else it is tried again by the next
                        walk.remove_path(entry)
                elif entry.name not in named:
                    gone += self._drop(entry.name, used)
            return gone

    def _drop(self, content: str, used: Used) -> bool:
        place = self.trees / content
        if not place.is_dir() or content in used():
            return False
        aside = self.trees / f".gone-{secrets.token_hex(6)}"
        place.rename(aside)
        if content in used():  # by one that began in between; one that begins now does not find it
            aside.rename(place)
            return False
        walk.remove_path(aside)
        return True

    # ---------------------------------------------------------------- bringing in

    def import_directory(self, name: str, source: Path, *, replace: bool = False) -> Path:
        """Copy a directory, owners and extended attributes included. Raises Invalid for one that holds this store."""
        if source.is_dir():
            store = self.directory.resolve()
            if any(place.exists() and place.samefile(source) for place in (store, *store.parents)):
                raise Invalid(
                    f"{source} holds the image store itself, {store}: the copy would have no end",
                    hint="import a directory next to it, or an archive made with `tar --exclude`",
                )
        return self.build(name, lambda tree: sources.directory(source, tree), f"directory {source}", replace)

    def import_archive(self, name: str, archive: Path, *, replace: bool = False) -> Path:
        """Unpack an archive: an OCI layout, what ``docker save`` wrote, or a tar of a root file system."""
        return self.build(name, lambda tree: sources.archive(archive, tree), f"archive {archive.name}", replace)

    def import_docker(self, name: str, reference: str, *, replace: bool = False) -> Path:
        """Take an image from the local Docker Engine, pulled if it is not there."""
        return self.build(name, lambda tree: sources.docker(reference, tree), f"docker {reference}", replace)

    def pull(self, target: str, name: str | None = None, *, report: registry.Report = lambda done, total: None) -> str:
        """Take an image from a registry, and give it `name`, or its own; which that is. An equal one stays as it is."""
        address = reference.parse(target)
        name = name or address.name
        self.check_free(name, replace=True)
        result = registry.manifest(address)
        source = result.reference.address
        if self._path(name) == self.directory / (filed(name) or "") and self.info(name).source == source:
            return name
        self.build(name, lambda tree: registry.fetch(result, self.layers, tree, report), source, replace=True)
        return name

    def debootstrap(
        self, name: str, *, suite: str = "bookworm", include: Sequence[str] = (), mirror: str | None = None
    ) -> Path:
        """Install a minimal Debian with the packages `include`. About 80 s."""
        return self.build(name, lambda tree: sources.debootstrap(tree, suite, include, mirror), f"debootstrap {suite}")

    def check_free(self, name: str, replace: bool) -> None:
        """Raise unless `name` can be given to a new image."""
        file = filed(name)
        if file is None:
            raise Invalid(
                f"not an image name: {name!r}", hint="use a-z, 0-9, dot, dash and underscore, or registry/path:tag"
            )
        if not replace and (self.directory / file).exists():
            raise Conflict(f"image {name} exists already", hint=f"replace it, or pagurus image rm {name}")

    def give_name(self, name: str, content: str, source: str, config: ImageConfig, *, replace: bool = False) -> bool:
        """Let a name point to the tree with this digest; False: that is not here."""
        self.check_free(name, replace)
        with self._locked():
            place = self.trees / content
            if not place.exists():
                self._borrow(place)
            if not (place / "image.json").is_file():
                return False
            record = msgspec.structs.replace(_read(place), source=source, config=config)
            self._point(name, place, record)
            return True

    def _borrow(self, place: Path) -> None:
        """A tree of another store, to which a name of this one points, gets its place here as a link."""
        for existing in (self.resolve(name) for name in self.list()):
            if existing.digest == place.name:
                self.trees.mkdir(mode=0o700, parents=True, exist_ok=True)
                place.mkdir(mode=0o700)
                (place / "tree").symlink_to(existing.tree)
                _write(place, _read(existing.tree.parent))
                return

    def build(
        self, name: str, fill: Fill, source: str, replace: bool = False, *, identity: tuple[str, int] | None = None
    ) -> Path:
        """A new image whose tree `fill` writes; its tree. `identity`: what :func:`fingerprint` need not find out."""
        self.check_free(name, replace)
        self.trees.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self.trees / f".new-{secrets.token_hex(6)}"
        tree = aside / "tree"
        tree.mkdir(mode=0o755, parents=True)
        aside.chmod(0o700)
        try:
            with _alone(aside):
                config = fill(tree) or ImageConfig()
                normalise(tree)
                with self._locked():
                    return self._publish(name, aside, source, config, identity or fingerprint(tree))
        finally:
            with contextlib.suppress(OSError):  # what stays is collected later
                walk.remove_path(aside)
            with contextlib.suppress(OSError):
                self.trees.rmdir()  # when it is empty: a failure leaves nothing

    @contextlib.contextmanager
    def aside(self) -> Iterator[Path]:
        """An empty directory on the disk of the images for the length of a block; what a crash leaves is collected."""
        self.trees.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = self.trees / f".new-{secrets.token_hex(6)}"
        place.mkdir(mode=0o700)
        try:
            with _alone(place):
                (place / "tree").mkdir(mode=0o755)
                yield place / "tree"
        finally:
            with contextlib.suppress(OSError):  # what stays is collected later
                walk.remove_path(place)

    def _publish(self, name: str, aside: Path, source: str, config: ImageConfig, identity: tuple[str, int]) -> Path:
        content, size = identity
        record = _Record(source=source, created_at=time.time(), size=size, config=config)
        _write(aside, record)
        place = self.trees / content
        btrfs.flush(self.trees)
        if not place.exists():
            aside.rename(place)
        self._point(name, place, record)
        return place / "tree"

    def _point(self, name: str, place: Path, record: _Record) -> None:
        """Let a name point to a tree, under the configuration of `record`."""
        target = f".trees/{place.name}/tree"
        if _read(place).config != record.config:
            target = f".trees/{place.name}/{self._variant(place, record)}/tree"
        link = self.trees / f".link-{secrets.token_hex(6)}"
        link.symlink_to(target)
        link.rename(self.directory / (filed(name) or name))  # replaces a former link in one step

    def _variant(self, place: Path, record: _Record) -> str:
        """Keep another configuration of a tree that is there already; the name of its directory."""
        name = blake3(msgspec.json.encode(record.config, order="sorted")).hexdigest()[:16]
        if not (place / name).exists():
            made = self.trees / f".new-{secrets.token_hex(6)}"
            made.mkdir(mode=0o700)
            _write(made, record)
            (made / "tree").symlink_to("../tree")
            made.rename(place / name)
        return name

    def _take_in(self, path: Path, tree: Path) -> Path:
        if tree != path:
            raise ImageNotFound(f"image {path.name} points to {tree}, which is no image", hint="remove the link")
        with self._locked():
            if path.is_symlink():  # another process was faster
                return path.resolve()
            content, size = fingerprint(tree)
            place = self.trees / content
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            record = _Record(source="directory", created_at=time.time(), size=size, config=ImageConfig())
            _write(place, record)
            link = self.trees / f".link-{secrets.token_hex(6)}"
            link.symlink_to(f".trees/{content}/tree")
            tree.rename(place / "tree")
            link.rename(path)
            return place / "tree"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Names and trees change together; one process at a time."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """A process that makes or removes a tree holds its directory. Raises OSError where another one does."""
    with closing(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def filed(name: str) -> str | None:
    """The file that a name is: itself, or one of a registry without its slashes. None: it is no name of an image."""
    if NAME.fullmatch(name) is not None:
        return name
    try:
        file = quote(reference.parse(name).name, safe=":@")
    except Invalid:
        return None
    return file if len(file) <= MAX_FILE else None


def _stored(tree: Path) -> bool:
    return tree.name == "tree" and (tree.parent / "image.json").is_file()


def _read(place: Path) -> _Record:
    return msgspec.json.decode((place / "image.json").read_bytes(), type=_Record)


def _write(place: Path, record: _Record) -> None:
    """On the disk before a name points to it."""
    with open(place / "image.json", "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record)))
        file.flush()
        os.fsync(file.fileno())


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def fingerprint(tree: Path) -> tuple[str, int]:
    """Digest of a tree's content and the bytes of its files. Times of directories do not count. Reads every file."""
    observed, size = blake3(), 0
    for name, fact in sorted(facts.tree(tree).items()):
        if stat.S_ISDIR(int(fact["mode"], 8)):
            fact.pop("mtime", None)
        size += fact.get("size", 0)
        observed.update(msgspec.json.encode([os.fsencode(name), fact]))
    return observed.hexdigest(), size


def normalise(tree: Path) -> None:
    """Make a tree fit to be a sandbox's root: mount points, name resolution, and no device nodes.

    Whatever the tree holds is looked at before it is opened, and never followed: a FIFO would block for ever.
    """
    with directory(tree) as root:
        os.fchmod(root, 0o755)
        _drop_special(root)
        for name in (".dockerenv", ".pagurus", "dev"):  # of the container or sandbox that it was made from
            if name != "dev" or stat.S_ISDIR(_mode(root, name)):  # the runtime layer brings the /dev of sandboxes
                with contextlib.suppress(FileNotFoundError):
                    walk.remove(root, name)
        for name, mode in MOUNT_POINTS.items():
            result = _mode(root, name)
            if result and not stat.S_ISDIR(result) and name not in ALWAYS_THERE:
                raise Invalid(f"/{name} of the image is not a directory", hint="make it a directory in the image")
            if not result:
                os.mkdir(name, mode, dir_fd=root)
                os.chmod(name, mode, dir_fd=root)
        with closing(openat2(root, "etc", os.O_RDONLY | os.O_DIRECTORY, resolve=NO_LINKS)) as etc:
            _name_itself(etc)


def _name_itself(etc: int) -> None:
    """Give an /etc without a usable hosts file one. A symbolic link, and what a file already says, stays."""
    with contextlib.suppress(FileNotFoundError):
        result = os.stat("hosts", dir_fd=etc, follow_symlinks=False)
        kind = stat.S_IFMT(result.st_mode)
        if kind in (stat.S_IFLNK, stat.S_IFDIR) or (kind == stat.S_IFREG and result.st_size):
            return
        os.unlink("hosts", dir_fd=etc)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(os.open("hosts", flags, 0o644, dir_fd=etc)) as file:
        os.write(file, HOSTS.encode())
        os.fchmod(file, 0o644)
        os.utime(file, (0, 0))  # equal archives give equal trees


def _mode(root: int, name: str) -> int:
    """0: there is nothing."""
    try:
        return os.stat(name, dir_fd=root, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _drop_special(root: int) -> None:
    """Remove block and character devices and sockets of a tree."""
    for step in walk.walk(root):
        (result,) = step.result
        if result is not None and stat.S_IFMT(result.st_mode) in (stat.S_IFBLK, stat.S_IFCHR, stat.S_IFSOCK):
            os.unlink(step.name, dir_fd=step.parents[0])
