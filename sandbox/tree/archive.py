"""Whole trees as tar streams, into and out of a directory that belongs to another user.

Guarantee: nothing outside the given directory is read or written, whatever the archive or the tree says
(:mod:`sandbox.tree.safe_path`); a stream larger than its limit, nested too deeply or with headers too large is
refused; devices and sockets are left out. Files are replaced, never written through links. Holes stay holes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import struct
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

from sandbox.descriptors import closing
from sandbox.errors import Invalid, NotFound, PagurusError, hinted
from sandbox.tree import tar, walk
from sandbox.tree.safe_path import IN_ROOT, ON_HOST, inner_id, make_parents, open_kind, openat2, opened, pinned, refused
from sandbox.tree.space import Reserve

MAX_DEPTH = 128  # directories within one another
MAX_TIMES = 16 << 20  # characters of the names of directories that are given their times at the end
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
XATTR = "SCHILY.xattr."
_CAPABILITY = "security.capability"
_COPY = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


# --------------------------------------------------------------------------- packing


def pack(
    root: int,
    path: str,
    out: IO[bytes],
    *,
    uid_base: int = 0,
    complete: bool = False,
    named: bool = False,
    without: Collection[str] = (),
) -> None:
    """Write `path` below `root` to `out`: a directory as its content, anything else, or if `named`, as itself.

    `without`: paths of that content that are left out, with what is in them.
    `complete`: with FIFOs and extended attributes, for a tree that does not change. A file that grows or shrinks
    during it has the size that it had when its turn came.
    """
    with (
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as packed,
        opened(root, path, os.O_PATH) as result,
    ):
        packer = _Packer(packed, uid_base, complete, without)
        if stat.S_ISDIR(os.fstat(result).st_mode) and not named:
            with opened(root, path, os.O_RDONLY | os.O_DIRECTORY) as directory:
                packer.directory(directory, "", 0)
        else:
            pure = PurePosixPath("/", path)
            with opened(root, str(pure.parent), os.O_PATH | os.O_DIRECTORY) as parent:
                try:
                    packer.entry(parent, pure.name, pure.name, 0)
                except OSError as error:  # it has become something else
                    raise refused(error, pure.name) from error


class _Packer:
    def __init__(self, out: tarfile.TarFile, uid_base: int, complete: bool, without: Collection[str]) -> None:
        self.out = out
        self.uid_base = uid_base
        self.complete = complete
        self.without = without
        self.linked: dict[tuple[int, int], str] = {}

    def directory(self, directory: int, prefix: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise Invalid(f"{prefix} is nested more than {MAX_DEPTH} deep")
        for name in sorted(os.listdir(directory)):
            if f"{prefix}{name}" in self.without:
                continue
            try:
                self.entry(directory, name, f"{prefix}{name}", depth)
            except FileNotFoundError:
                continue  # removed while we look
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.ELOOP):  # a mount; replaced by a link while we look
                    raise refused(error, f"{prefix}{name}") from error

    def entry(self, parent: int, name: str, shown: str, depth: int) -> None:
        result = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(result.st_mode):
            with closing(openat2(parent, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as directory:
                header = self._header(shown, os.fstat(directory), tarfile.DIRTYPE)
                self._attributes(header, directory)
                self.out.addfile(header)
                self.directory(directory, f"{shown}/", depth + 1)
        elif stat.S_ISLNK(result.st_mode):
            header = self._header(shown, result, tarfile.SYMTYPE)
            header.linkname = os.readlink(name, dir_fd=parent)
            self.out.addfile(header)
        elif stat.S_ISFIFO(result.st_mode) and self.complete:
            self.out.addfile(self._header(shown, result, tarfile.FIFOTYPE))
        elif stat.S_ISREG(result.st_mode):
            try:
                file = open_kind(parent, name, os.O_RDONLY | os.O_NOFOLLOW, (stat.S_IFREG,))
            except Invalid:  # something else by now
                return
            try:
                self._file(file, shown)
            finally:
                os.close(file)

    def _file(self, file: int, shown: str) -> None:
        result = os.fstat(file)
        before = self.linked.setdefault((result.st_dev, result.st_ino), shown) if result.st_nlink > 1 else shown
        if before != shown:
            header = self._header(shown, result, tarfile.LNKTYPE)
            header.linkname = before
            self._attributes(header, file)
            self.out.addfile(header)
            return
        header = self._header(shown, result, tarfile.REGTYPE)
        header.size = result.st_size
        self._attributes(header, file)
        data = tar.data_of(file, result.st_size)
        before_data = b"" if data is None else tar.sparse_header(header, data)
        content = _Exactly(file, [(0, result.st_size)] if data is None else data, before_data)
        self.out.addfile(header, content)  # type: ignore[arg-type]

    def _attributes(self, header: tarfile.TarInfo, file: int) -> None:
        if self.complete:
            keys = [key for key in os.listxattr(file) if key.startswith(("user.", _CAPABILITY))]
            values = {XATTR + key: os.getxattr(file, key).decode("utf-8", "surrogateescape") for key in keys}
            header.pax_headers = {**header.pax_headers, **values}

    def _header(self, shown: str, result: os.stat_result, kind: bytes) -> tarfile.TarInfo:
        header = tarfile.TarInfo(shown)
        header.type = kind
        header.mode = stat.S_IMODE(result.st_mode)
        header.mtime = result.st_mtime
        if self.complete:
            header.pax_headers = {"mtime": f"{result.st_mtime_ns // 10**9}.{result.st_mtime_ns % 10**9:09}"}
        header.uid, header.gid = (inner_id(number, self.uid_base) for number in (result.st_uid, result.st_gid))
        return header


class _Exactly:
    """So many bytes of a file, whatever happens to it: zeros where it has become shorter."""

    def __init__(self, file: int, pieces: list[tuple[int, int]], before: bytes) -> None:
        self._file = file
        self._pieces = pieces[::-1]
        self._ready = before

    def read(self, target: int) -> bytes:
        ready = bytearray(self._ready)
        while len(ready) < target and self._pieces:
            offset, size = self._pieces.pop()
            now = min(size, target - len(ready))
            part = os.pread(self._file, now, offset)
            part = part or bytes(now)  # behind its end by now
            ready += part
            if len(part) < size:
                self._pieces.append((offset + len(part), size - len(part)))
        self._ready = bytes(ready[target:])
        return bytes(ready[:target])


# --------------------------------------------------------------------------- unpacking


@dataclass(frozen=True)
class Rules:
    """What an archive may do to the directory that it is unpacked into."""

    resolve: int = IN_ROOT  # how the kernel finds a path below it
    modes: int = 0o7777  # the bits of a mode that are taken over
    fifos: bool = True
    reserve: bool = False  # some of the disk stays free
    owners: bool = False  # those of the archive, with its attributes
    whiteouts: bool = False  # of a layer of an image: they remove what lies below them
    uid_base: int = 0  # added to owners
    owner: tuple[int, int] | None = None  # instead of those of the archive


IN_SANDBOX = Rules()
HOST = Rules(resolve=ON_HOST, modes=0o777, fifos=False, reserve=True)  # of a directory that is nobody's root
ROOT = Rules(owners=True, reserve=True)  # of a root file system
LAYER = Rules(owners=True, whiteouts=True, reserve=True)


@hinted("pack it again with `tar` in the directory itself: names without `..`, links within it")
def unpack(stream: IO[bytes], directory: int, *, limit: int, rules: Rules = IN_SANDBOX) -> int:
    """Unpack a tar stream below the open `directory`; returns the bytes of data of its files.

    Owners are those of the caller unless the rules say otherwise. Raises Invalid if the archive is broken, leaves its
    directory, or holds more than `limit` bytes of data, and NoSpace before it would fill the disk; what was unpacked
    until then stays.
    """
    try:
        with tar.Reader(stream) as reader:
            return _Unpacker(reader, directory, limit, rules).run()
    except NotFound as error:
        raise Invalid(f"the archive leads to what it does not hold: {error.message}") from error
    except (tarfile.TarError, UnicodeError, ValueError, OverflowError) as error:
        raise Invalid(f"not a tar archive that can be unpacked: {error}") from error


class _Unpacker:
    def __init__(self, reader: tar.Reader, directory: int, limit: int, rules: Rules) -> None:
        self._reader = reader
        self._directory = directory
        self._limit = limit
        self._rules = rules
        self._reserve = Reserve(directory) if rules.reserve else None
        self._data = self._named = 0
        self._late: list[tuple[str, int, int]] = []  # directories with their modes and times
        self._own: set[str] = set()  # what the layer itself has: its whiteouts mean the layers below

    def run(self) -> int:
        for member in self._reader:
            try:
                self._take_in(member)
            except OSError as error:
                if error.errno is None:  # of the stream: it is damaged
                    raise
                raise refused(error, member.name) from error
        for name, mode, when in reversed(self._late):  # at last: unpacking into a directory changes its time
            with contextlib.suppress(PagurusError), self._opened(PurePosixPath(name), _DIRECTORY) as made:
                os.fchmod(made, mode)
                os.utime(made, ns=(when, when))
        return self._data

    def _take_in(self, member: tarfile.TarInfo) -> None:
        path = _relative(member.name)
        if path is None:
            return
        if member.isreg():
            self._count(member)
        if self._rules.whiteouts and path.name.startswith(WHITEOUT):
            self._whiteout(path)
            return
        if self._rules.owners:
            self._clear(member, path)
        self._place(member, path)
        if self._rules.owners:
            self._attributes(member, path)
        if self._rules.whiteouts:
            self._own.update(str(part) for part in (path, *path.parents))

    def _count(self, member: tarfile.TarInfo) -> None:
        size = sum(length for _, length in tar.pieces(member))
        self._data += size
        if self._data > self._limit:
            raise Invalid(f"the archive holds more than {self._limit} bytes")

    def _take(self, size: int, name: str) -> None:
        if self._reserve is not None:
            try:
                self._reserve.take(size)
            except OSError as error:
                raise refused(error, name) from error

    def _opened(self, path: PurePosixPath, flags: int) -> contextlib.AbstractContextManager[int]:
        return opened(self._directory, str(path), flags, resolve=self._rules.resolve)

    def _place(self, member: tarfile.TarInfo, path: PurePosixPath) -> None:
        when = tar.time_of(member)
        self._take(0, member.name)
        if member.isdir():
            self._make_directory(path, member.mode & self._rules.modes, when)
            return
        if not (member.isreg() or member.issym() or member.islnk() or (member.isfifo() and self._rules.fifos)):
            return
        make_parents(self._directory, path.parent, resolve=self._rules.resolve)
        with self._opened(path.parent, _DIRECTORY) as parent:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path.name, dir_fd=parent)
                if member.isfifo():
                    os.mkfifo(path.name, member.mode & 0o777, dir_fd=parent)
                    os.utime(path.name, ns=(when, when), dir_fd=parent, follow_symlinks=False)
                elif member.issym():
                    os.symlink(member.linkname, path.name, dir_fd=parent)
                    os.utime(path.name, ns=(when, when), dir_fd=parent, follow_symlinks=False)
                elif member.islnk():
                    self._link(member.linkname, parent, path.name)
                else:
                    self._write(member, parent, path.name, when)
            except OSError as error:
                raise refused(error, member.name) from error

    def _make_directory(self, path: PurePosixPath, mode: int, when: int) -> None:
        make_parents(self._directory, path, 0o755, resolve=self._rules.resolve)
        self._named += len(str(path))
        with self._opened(path, _DIRECTORY) as made:
            if self._named > MAX_TIMES:
                os.fchmod(made, mode)
                return
            os.fchmod(made, mode | stat.S_IRWXU)  # until what is in it is there
        self._late.append((str(path), mode, when))

    def _link(self, target: str, parent: int, name: str) -> None:
        path = _relative(target)
        if path is None:
            raise Invalid("a hard link to the directory itself")
        with self._opened(path.parent, _DIRECTORY) as holder:
            os.link(path.name, name, src_dir_fd=holder, dst_dir_fd=parent, follow_symlinks=False)

    def _write(self, member: tarfile.TarInfo, parent: int, name: str, when: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open(name, flags, 0o600, dir_fd=parent)) as file:
            for offset, part in self._reader.content(member, _COPY):
                self._take(len(part), member.name)
                view = memoryview(part)
                while view:
                    done = os.pwrite(file, view, offset)
                    view, offset = view[done:], offset + done
            os.ftruncate(file, member.size)
            os.fchmod(file, member.mode & self._rules.modes)
            os.utime(file, ns=(when, when))

    # ----------------------------------------------------------------- layers

    def _clear(self, member: tarfile.TarInfo, path: PurePosixPath) -> None:
        """Remove what a lower layer has in the way: anything, but a directory where there will be one again."""
        try:
            with self._opened(path.parent, _DIRECTORY) as parent:
                there = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode
                if not (member.isdir() and stat.S_ISDIR(there)):
                    _remove(parent, path.name)
        except (NotFound, FileNotFoundError):
            return

    def _whiteout(self, path: PurePosixPath) -> None:
        """``.wh.NAME`` removes what lower layers have at NAME, ``.wh..wh..opq`` all that they have in the directory.

        The directory is one of this layer, as with Docker: it is made where there is none, and has a new time.
        """
        try:
            make_parents(self._directory, path.parent, resolve=self._rules.resolve)
            with self._opened(path.parent, _DIRECTORY) as parent:
                os.utime(parent)
                if path.name == OPAQUE:
                    for name in os.listdir(parent):
                        if str(path.parent / name) not in self._own:
                            _remove(parent, name)
                elif not path.name.startswith(f"{WHITEOUT}{WHITEOUT}"):
                    name = path.name.removeprefix(WHITEOUT)
                    if str(path.parent / name) not in self._own:
                        _remove(parent, name)
        except NotFound:
            return  # nothing to hide

    def _attributes(self, member: tarfile.TarInfo, path: PurePosixPath) -> None:
        """Owner, then mode (a change of owner drops set-id bits), then extended attributes."""
        if member.isblk() or member.ischr():
            return
        uid, gid = self._rules.owner or (member.uid, member.gid)
        base = self._rules.uid_base
        with self._opened(path.parent, _DIRECTORY) as parent:
            try:
                made = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
                if not member.islnk() or (made.st_uid, made.st_gid) != (base + uid, base + gid):
                    # which drops the capabilities of a file, and a further name of one need not say them again
                    os.chown(path.name, base + uid, base + gid, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISLNK(made.st_mode):
                    return
                with pinned(parent, path.name, stat.S_IFMT(made.st_mode)) as place:
                    self._set(member, place)
            except OSError as error:
                raise refused(error, member.name) from error

    def _set(self, member: tarfile.TarInfo, place: str) -> None:
        os.chmod(place, member.mode & 0o7777)
        if member.islnk():  # what it says counts for all names of the file
            when = tar.time_of(member)
            os.utime(place, ns=(when, when))
        for key, value in member.pax_headers.items():
            name = key.removeprefix(XATTR)
            if key.startswith(XATTR) and name.startswith(("user.", _CAPABILITY)):
                raw = value.encode("utf-8", "surrogateescape")
                os.setxattr(place, name, mapped(name, raw, self._rules.uid_base))


def mapped(key: str, value: bytes, uid_base: int) -> bytes:
    """An extended attribute as it is set through the mapped mount of a sandbox: capabilities name its root."""
    if key != _CAPABILITY or not uid_base or len(value) != 20:
        return value
    (magic,) = struct.unpack_from("<I", value)
    return struct.pack("<I", magic & 0x00FFFFFF | 0x03000000) + value[4:] + struct.pack("<I", uid_base)


def _remove(parent: int, name: str) -> None:
    """Remove an entry, whatever it is. Symbolic links are not followed."""
    with contextlib.suppress(FileNotFoundError):
        walk.remove(parent, name)


def _relative(name: str) -> PurePosixPath | None:
    path = PurePosixPath("/", posixpath.normpath(name))  # by its text: "a/.." is nothing, whatever a is
    if ".." in path.parts or "\0" in name:
        raise Invalid(f"the archive leaves its directory: {name!r}")
    if len(path.parts) > MAX_DEPTH:
        raise Invalid(f"{name[:80]!r} is nested more than {MAX_DEPTH} deep")
    return path.relative_to("/") if path.name else None
