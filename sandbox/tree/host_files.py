"""What comes out of a sandbox or an image, written to the host: trees, files, names that a stranger has chosen.

No other module unpacks an archive on the host, or joins a path of the host with a name out of a sandbox and opens it
(tests look for it). Guarantee: each component is resolved by the kernel below a directory that the caller named
(``openat2`` with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS), so that neither a link that came with an earlier copy nor
one that appears while it is written leads anywhere. Only regular files, directories and symbolic links are made; links
are made, and never followed. Owners are those of the caller, set-id and sticky bits are dropped, holes stay holes, and
neither more than the limit is written nor more than the disk has to spare.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sandbox.descriptors import closing
from sandbox.errors import Invalid, NotFound
from sandbox.tree import walk
from sandbox.tree.safe_path import BENEATH, ON_HOST, make_parents, open_kind, openat2, opened, refused

PREFIX = ".pagurus-"  # of names of fresh directories
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def target(local: str | Path, below: str = "") -> Iterator[int]:
    """The directory `local`, made when need be, or `below` it, opened to be filled.

    `local` is a path that the caller vouches for. If a symbolic link lies there it may be one that a stranger has made:
    it is followed only where the path ends with a slash. In `below` no link is followed at all. Raises Invalid.
    """
    text = os.fspath(local)
    try:
        os.makedirs(text, exist_ok=True)
        follow = 0 if text.endswith("/") else os.O_NOFOLLOW
        top = os.open(text, _DIRECTORY | follow)
    except OSError as error:
        if os.path.islink(text.rstrip("/")):
            raise Invalid(
                f"{text} is a symbolic link", hint="name the directory that it leads to, or end the path with a slash"
            ) from error
        raise Invalid(
            f"{text} cannot be a directory to copy into: {os.strerror(error.errno or 0)}",
            hint="name a directory that exists and that you may write to",
        ) from error
    with closing(top):
        if not below:
            yield top
            return
        make_parents(top, _name(below), resolve=ON_HOST)
        with opened(top, below, _DIRECTORY, resolve=ON_HOST) as result:
            yield result


def unpack(stream: IO[bytes], directory: int, *, limit: int) -> int:
    """Unpack the tar stream of a stranger below the open `directory`; the bytes of its files. Raises as `archive`."""
    from sandbox.tree import archive  # whoever reads a file only starts sooner without it

    return archive.unpack(stream, directory, limit=limit, rules=archive.HOST)


@contextlib.contextmanager
def fresh_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new, empty directory for what comes from one source. It is gone at the end, however deep it has become."""
    made = Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
    try:
        yield made
    finally:
        walk.remove_path(made)


@contextlib.contextmanager
def fresh_name(directory: int) -> Iterator[str]:
    """The name of such a directory in an open one."""
    name = f"{PREFIX}{secrets.token_hex(8)}"
    os.mkdir(name, 0o700, dir_fd=directory)
    try:
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            walk.remove(directory, name)


@contextlib.contextmanager
def new_file(directory: Path, name: str) -> Iterator[IO[bytes]]:
    """A new file in a directory that the caller has made, open for writing; `name` may be a stranger's."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    if len(_name(name).parts) != 1:
        raise Invalid(f"not the name of a file: {name[:80]!r}", hint="use one name without / and NUL")
    try:
        with closing(os.open(directory, _DIRECTORY)) as parent:
            file = os.open(name, flags, 0o600, dir_fd=parent)
    except OSError as error:
        raise refused(error, name) from error
    with os.fdopen(file, "wb") as out:
        yield out


def write(local: str | Path, content: bytes) -> None:
    """Give the file `local` this content, made or replaced with its missing directories. The caller vouches for its
    directory; a link at its own name, which an earlier download may have brought, is replaced. Raises Invalid."""
    path = Path(local)
    with target(path.parent) as directory, fresh_name(directory) as fresh:
        with new_file(path.parent / fresh, "content") as out:
            out.write(content)
        move_up(directory, fresh, "content", path.name)


def move_up(directory: int, fresh: str, name: str, as_name: str) -> None:
    """Give the file `name` of the fresh directory in an open one the name `as_name` in that, whatever had it before."""
    for item in (name, as_name):
        if len(_name(item).parts) != 1:
            raise Invalid(f"not the name of a file: {item[:80]!r}", hint="use one name without / and NUL")
    try:
        with closing(openat2(directory, fresh, os.O_PATH | os.O_DIRECTORY, resolve=ON_HOST)) as source:
            os.replace(name, as_name, src_dir_fd=source, dst_dir_fd=directory)
    except OSError as error:
        raise refused(error, as_name) from error


def read(directory: Path, name: str, limit: int) -> bytes:
    """A regular file of a directory that a stranger may have filled, such as a Dockerfile; links stay in there.

    Raises NotFound, and Invalid for what is no regular file, leads out of the directory or is larger than `limit`.
    """
    with open_file(directory, name) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise Invalid(f"{name} is larger than {limit} bytes", hint="make the file smaller")
    return content


def open_file(directory: Path, name: str) -> IO[bytes]:
    """Such a file, open for reading. Raises likewise."""
    try:
        with closing(os.open(directory, _DIRECTORY)) as top:
            return os.fdopen(open_kind(top, name, os.O_RDONLY, (stat.S_IFREG,), resolve=BENEATH), "rb")
    except FileNotFoundError as error:
        raise NotFound(f"no such file: {directory / name}", hint="check the name") from error
    except OSError as error:
        if error.errno == errno.EXDEV:
            text = f"{name} is a link that leads out of {directory}"
            raise Invalid(text, hint="put the file itself there") from error
        raise refused(error, name) from error


def _name(text: str) -> PurePosixPath:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in text:
        raise Invalid(f"not a path below a directory: {text[:80]!r}", hint="use a relative path without ..")
    return path
