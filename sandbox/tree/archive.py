"""Whole trees as tar streams, into and out of a directory that belongs to somebody else.

Owns: packing and unpacking by descriptor, on both sides: the daemon works on a sandbox's tree, the SDK
on the user's. Does not own: transport.

Guarantee: nothing outside the given directory is read or written, whatever the archive or the tree says
(:mod:`sandbox.tree.safe_path`); a stream larger than its limit, nested too deeply or with headers too large is
refused; devices and sockets are left out. Files are replaced, never written through links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from pathlib import PurePosixPath
from typing import IO

from sandbox.descriptors import closing
from sandbox.errors import Invalid, NotFound, PagurusError
from sandbox.tree import walk
from sandbox.tree.safe_path import make_parents, open_kind, openat2, opened, refused

MAX_DEPTH = 128  # directories within one another
MAX_HEADER = 1 << 20  # bytes of one extended header
MAX_HEADERS = 4 << 20  # bytes of all that stands before one member, maps of sparse files included
MAX_CHAIN = 16  # extended headers before one member
MAX_SHARED = 64 << 10  # bytes of headers that hold for all members after them
MAX_ENTRIES = 2_000_000
MAX_TIME = 1 << 40  # seconds; what file systems can hold
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
XATTR = "SCHILY.xattr."
Times = list[tuple[str, float]]
_COPY = 1 << 20


# --------------------------------------------------------------------------- packing


def pack(root: int, path: str, out: IO[bytes], *, uid_base: int = 0) -> None:
    """Write `path` below `root` to `out`: a directory as its content, anything else as itself.

    A file that grows or shrinks meanwhile has the size that it had when its turn came.
    """
    with (
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        opened(root, path, os.O_PATH) as found,
    ):
        packer = _Packer(tar, uid_base)
        if stat.S_ISDIR(os.fstat(found).st_mode):
            with opened(root, path, os.O_RDONLY | os.O_DIRECTORY) as directory:
                packer.directory(directory, "", 0)
        else:
            pure = PurePosixPath("/", path)
            with opened(root, str(pure.parent), os.O_PATH | os.O_DIRECTORY) as parent:
                packer.entry(parent, pure.name, pure.name, 0)


class _Packer:
    def __init__(self, tar: tarfile.TarFile, uid_base: int) -> None:
        self.tar = tar
        self.uid_base = uid_base
        self.linked: dict[tuple[int, int], str] = {}

    def directory(self, directory: int, prefix: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise Invalid(f"{prefix} is nested more than {MAX_DEPTH} deep")
        for name in sorted(os.listdir(directory)):
            try:
                self.entry(directory, name, f"{prefix}{name}", depth)
            except FileNotFoundError:
                continue  # removed while we look
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.ELOOP):  # a mount; replaced by a link while we look
                    raise refused(error, f"{prefix}{name}") from error

    def entry(self, parent: int, name: str, shown: str, depth: int) -> None:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            with closing(openat2(parent, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as directory:
                self.tar.addfile(self._header(shown, os.fstat(directory), tarfile.DIRTYPE))
                self.directory(directory, f"{shown}/", depth + 1)
        elif stat.S_ISLNK(found.st_mode):
            header = self._header(shown, found, tarfile.SYMTYPE)
            header.linkname = os.readlink(name, dir_fd=parent)
            self.tar.addfile(header)
        elif stat.S_ISREG(found.st_mode):
            try:
                file = open_kind(parent, name, os.O_RDONLY | os.O_NOFOLLOW, (stat.S_IFREG,))
            except Invalid:  # something else by now
                return
            try:
                self._file(file, shown)
            finally:
                os.close(file)

    def _file(self, file: int, shown: str) -> None:
        found = os.fstat(file)
        before = self.linked.setdefault((found.st_dev, found.st_ino), shown) if found.st_nlink > 1 else shown
        if before != shown:
            header = self._header(shown, found, tarfile.LNKTYPE)
            header.linkname = before
            self.tar.addfile(header)
            return
        header = self._header(shown, found, tarfile.REGTYPE)
        header.size = found.st_size
        self.tar.addfile(header, _Exactly(file, found.st_size))  # type: ignore[arg-type]

    def _header(self, shown: str, found: os.stat_result, kind: bytes) -> tarfile.TarInfo:
        header = tarfile.TarInfo(shown)
        header.type = kind
        header.mode = stat.S_IMODE(found.st_mode)
        header.mtime = found.st_mtime
        header.uid, header.gid = max(0, found.st_uid - self.uid_base), max(0, found.st_gid - self.uid_base)
        return header


class _Exactly:
    """`size` bytes of a file, whatever happens to it: zeros where it has become shorter."""

    def __init__(self, file: int, size: int) -> None:
        self.file = file
        self.left = size

    def read(self, wanted: int) -> bytes:
        wanted = min(wanted, self.left)
        part = os.read(self.file, wanted)
        part += bytes(wanted - len(part)) if not part else b""
        self.left -= len(part)
        if len(part) < wanted:
            part += self.read(wanted - len(part))
        return part


# --------------------------------------------------------------------------- unpacking


class HeaderMeter:
    """A stream of which the headers before one member are bounded."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.left: int | None = None  # bytes that may be read now; None: any number
        self.chain = 0
        self.shared = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                raise tarfile.ReadError(f"headers of more than {MAX_HEADERS} bytes before one member")
        return data


class _Header(tarfile.TarInfo):
    """A header whose extensions are bounded: the library reads all of them into memory, each by a deeper call, and
    keeps what holds for all members."""

    _EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME)

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        meter: HeaderMeter = archive.fileobj.fileobj  # type: ignore[attr-defined]
        if self.size < 0 or (self.type in (*self._EXTENDED, tarfile.GNUTYPE_LONGLINK) and self.size > MAX_HEADER):
            raise tarfile.ReadError(f"a header of a size of {self.size} bytes")
        meter.shared += self.size if self.type == tarfile.XGLTYPE else 0
        if meter.shared > MAX_SHARED:
            raise tarfile.ReadError(f"more than {MAX_SHARED} bytes of headers for all members")
        if meter.chain > MAX_CHAIN:
            raise tarfile.ReadError(f"more than {MAX_CHAIN} headers before one member")
        if meter.chain == 0:
            meter.left = MAX_HEADERS
        meter.chain += 1
        try:
            return super()._proc_member(archive)  # type: ignore[misc,no-any-return]
        finally:
            meter.chain -= 1
            if meter.chain == 0:
                meter.left = None


def unpack(stream: IO[bytes], directory: int, *, limit: int, layer: bool = False) -> int:
    """Unpack a tar stream below the open `directory`; returns the bytes of its files.

    Owners are those of the caller; a `layer` of an image keeps its owners, attributes and FIFOs, and its
    whiteouts remove what they name in the layers below (OCI image specification). Raises Invalid if the archive
    is broken, leaves its directory, or holds more than `limit` bytes; what was unpacked until then stays.
    """
    total = 0
    times: Times = []
    own: set[str] = set()  # what the layer itself has: its whiteouts mean the layers below
    try:
        with tarfile.open(fileobj=HeaderMeter(stream), mode="r|", tarinfo=_Header) as archive:  # type: ignore[call-overload]
            for count, member in enumerate(archive):
                archive.members = []  # a long stream is not kept in memory
                if count >= MAX_ENTRIES:
                    raise Invalid(f"the archive has more than {MAX_ENTRIES} entries")
                total += member.size if member.isreg() else 0
                if total > limit:
                    raise Invalid(f"the archive holds more than {limit} bytes")
                path = _relative(member.name)
                if path is None:
                    continue
                if not (layer and path.name.startswith(WHITEOUT)):
                    if layer:
                        _clear(member, path, directory)
                    _unpack_one(archive, member, path, directory, times)
                    if layer:
                        _own(member, path, directory)
                        own.update(str(part) for part in (path, *path.parents))
                else:
                    _whiteout(path, directory, own)
    except (tarfile.TarError, UnicodeError, ValueError, OverflowError) as error:
        raise Invalid(f"not a tar archive that can be unpacked: {error}") from error
    for name, when in reversed(times):  # at last: unpacking into a directory changes its time
        with contextlib.suppress(PagurusError), opened(directory, name, os.O_RDONLY | os.O_DIRECTORY) as made:
            os.utime(made, (when, when))
    return total


def _unpack_one(
    archive: tarfile.TarFile, member: tarfile.TarInfo, path: PurePosixPath, directory: int, times: Times
) -> None:
    when = min(max(float(member.mtime), 0.0), MAX_TIME)
    if member.isdir():
        make_parents(directory, path, 0o755)
        with opened(directory, str(path), os.O_RDONLY | os.O_DIRECTORY) as made:
            os.fchmod(made, member.mode & 0o7777)
        times.append((str(path), when))
        return
    if not (member.isreg() or member.issym() or member.islnk() or member.isfifo()):
        return
    make_parents(directory, path.parent)
    with opened(directory, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as parent:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=parent)
            if member.isfifo():
                os.mkfifo(path.name, member.mode & 0o777, dir_fd=parent)
            elif member.issym():
                os.symlink(member.linkname, path.name, dir_fd=parent)
            elif member.islnk():
                _link(directory, member.linkname, parent, path.name)
            else:
                _write(archive, member, parent, path.name, when)
        except OSError as error:
            raise refused(error, member.name) from error


def _clear(member: tarfile.TarInfo, path: PurePosixPath, directory: int) -> None:
    """Remove what a lower layer has in the way: anything, but a directory where there will be one again."""
    try:
        with opened(directory, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as parent:
            there = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode
            if not (member.isdir() and stat.S_ISDIR(there)):
                _remove(parent, path.name)
    except (NotFound, FileNotFoundError):
        return


def _remove(parent: int, name: str) -> None:
    """Remove an entry, whatever it is. Symbolic links are not followed."""
    with contextlib.suppress(FileNotFoundError):
        walk.remove(parent, name)


def _whiteout(path: PurePosixPath, directory: int, own: set[str]) -> None:
    """``.wh.NAME`` removes what lower layers have at NAME, ``.wh..wh..opq`` all that they have in the directory."""
    try:
        with opened(directory, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as parent:
            if path.name == OPAQUE:
                for name in os.listdir(parent):
                    if str(path.parent / name) not in own:
                        _remove(parent, name)
            elif not path.name.startswith(f"{WHITEOUT}{WHITEOUT}"):
                _remove(parent, path.name.removeprefix(WHITEOUT))
    except NotFound:
        return  # nothing to hide


def _own(member: tarfile.TarInfo, path: PurePosixPath, directory: int) -> None:
    """Owner, then mode (a change of owner drops set-id bits), then extended attributes."""
    if member.isblk() or member.ischr() or member.islnk():
        return
    with opened(directory, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as parent:
        try:
            os.chown(path.name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            if member.issym():
                return
            os.chmod(path.name, member.mode & 0o7777, dir_fd=parent)
            for key, value in member.pax_headers.items():
                if key.startswith(XATTR) and key.removeprefix(XATTR).startswith(("user.", "security.capability")):
                    raw = value.encode("utf-8", "surrogateescape")
                    os.setxattr(f"/proc/self/fd/{parent}/{path.name}", key.removeprefix(XATTR), raw)
        except OSError as error:
            raise refused(error, member.name) from error


def _relative(name: str) -> PurePosixPath | None:
    path = PurePosixPath("/", name)
    if ".." in path.parts or "\0" in name:
        raise Invalid(f"the archive leaves its directory: {name!r}")
    if len(path.parts) > MAX_DEPTH:
        raise Invalid(f"{name[:80]!r} is nested more than {MAX_DEPTH} deep")
    return path if path.name else None


def _link(directory: int, target: str, parent: int, name: str) -> None:
    path = _relative(target)
    if path is None:
        raise Invalid("a hard link to the directory itself")
    with opened(directory, str(path.parent), os.O_RDONLY | os.O_DIRECTORY) as holder:
        os.link(path.name, name, src_dir_fd=holder, dst_dir_fd=parent, follow_symlinks=False)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str, when: float) -> None:
    content = archive.extractfile(member)
    assert content is not None  # it is a regular file
    with closing(
        os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    ) as file:
        while part := content.read(_COPY):
            view = memoryview(part)
            while view:
                view = view[os.write(file, view) :]
        os.fchmod(file, member.mode & 0o7777)
        os.utime(file, (when, when))
