"""Users of a sandbox, by name or number, from its own ``/etc/passwd`` and ``/etc/group``.

Guarantee: the result is a user of the sandbox's id range, whatever the files hold; they are found below the sandbox's
root, and what is no regular file of at most a mebibyte counts as empty and is named in the refusal.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from dataclasses import dataclass

from sandbox.errors import Conflict, Invalid, NotFound, PagurusError
from sandbox.tree import files
from sandbox.tree.safe_path import SandboxRoot, opened
from sandbox.tree.walk import walk

IDS = 65_536
MAX_GROUPS = 256  # supplementary groups of a user, as in native/shim.h
MAX_FILE = 1 << 20  # bytes
PASSWD, GROUP, SHADOW, SUDO = "/etc/passwd", "/etc/group", "/etc/shadow", "/etc/sudoers.d"
LOGIN, HOME, SKELETON = "user", "/home/user", "/etc/skel"
FIRST_PERSON = 1000  # the number that distributions give to the first one


@dataclass(frozen=True)
class User:
    """Example: ``User(1000, 100, "/home/crab", groups=(27, 44))``."""

    uid: int
    gid: int
    home: str
    groups: tuple[int, ...] = ()  # supplementary


@dataclass(frozen=True)
class GroupEntry:
    gid: int
    members: frozenset[str]


@dataclass(frozen=True)
class UserTable:
    """The text of one of the two files, or why there is none."""

    text: str = ""
    trouble: str = ""


def find(inside: SandboxRoot, who: int | str) -> User:
    """Who this is: ``"crab"``, ``"crab:staff"``, ``"1000:1000"``, ``1000``. Raises Invalid. Blocks."""
    return resolve(who, _table(inside, PASSWD), _table(inside, GROUP))


def existing_users(inside: SandboxRoot) -> dict[str, User]:
    """All users of the sandbox, in the order of its file. Blocks."""
    return parse(_table(inside, PASSWD).text)


def existing_groups(inside: SandboxRoot) -> dict[str, GroupEntry]:
    """All its groups. Blocks."""
    return parse_groups(_table(inside, GROUP).text)


def add_login(inside: SandboxRoot, uid_base: int) -> None:
    """Add the user LOGIN with a home, and sudo where that is installed, to a sandbox in which nothing runs yet.

    One that is there is left as it is. No program of the sandbox runs for it. Blocks. Raises Conflict.
    """
    try:
        people, groups = existing_users(inside), existing_groups(inside)
        if LOGIN not in people:
            taken = {user.uid for user in people.values()} | {group.gid for group in groups.values()}
            number = next(number for number in itertools.count(FIRST_PERSON) if number not in taken)
            _NewLogin(inside, uid_base, number).add(group=LOGIN not in groups)
    except (Invalid, NotFound) as error:
        hint = "give the image a USER of its own"
        raise Conflict(f"no user could be made in this image: {error.message[:500]}", hint=hint) from error


class _NewLogin:
    def __init__(self, inside: SandboxRoot, uid_base: int, number: int) -> None:
        self._inside, self._base, self._number = inside, uid_base, number

    def add(self, *, group: bool) -> None:
        shell, number = "/bin/bash" if self._has("/bin/bash") else "/bin/sh", self._number
        self._append(PASSWD, f"{LOGIN}:x:{number}:{number}::{HOME}:{shell}\n")
        if group:
            self._append(GROUP, f"{LOGIN}:x:{number}:\n")
        if self._has(SHADOW):
            self._append(SHADOW, f"{LOGIN}:*:19000:0:99999:7:::\n")
        if self._has(SUDO):
            content = io.BytesIO(f"{LOGIN} ALL=(ALL) NOPASSWD: ALL\n".encode())
            files.write(self._inside, self._base, f"{SUDO}/{LOGIN}", content, mode=0o440)
        if self._has(HOME):
            self._take_home()
        else:
            self._make_home()

    def _make_home(self) -> None:
        owner = self._number, self._number
        files.make_directory(self._inside, self._base, os.path.dirname(HOME))
        files.make_directory(self._inside, self._base, HOME, owner=owner)
        with contextlib.suppress(NotFound):  # an image without a skeleton
            for entry in files.entries(self._inside, self._base, SKELETON):
                if entry.kind == "file":
                    content = io.BytesIO(files.read(self._inside, f"{SKELETON}/{entry.name}", limit=MAX_FILE))
                    files.write(self._inside, self._base, f"{HOME}/{entry.name}", content, owner=owner)

    def _take_home(self) -> None:
        """The image has a directory there: what is in it belongs to others."""
        number = self._base + self._number
        with self._inside.opened() as root, opened(root, HOME, os.O_RDONLY | os.O_DIRECTORY) as home:
            os.fchown(home, number, number)
            for step in walk(home):
                os.chown(step.name, number, number, dir_fd=step.parents[0], follow_symlinks=False)

    def _has(self, path: str) -> bool:
        with contextlib.suppress(NotFound, Invalid):
            files.status(self._inside, self._base, path)
            return True
        return False

    def _append(self, path: str, line: str) -> None:
        before = files.read(self._inside, path, limit=MAX_FILE) if self._has(path) else b""
        end = b"" if not before or before.endswith(b"\n") else b"\n"
        files.replace(self._inside, self._base, path, before + end + line.encode())


def _table(inside: SandboxRoot, path: str) -> UserTable:
    try:
        data = files.read(inside, path, limit=MAX_FILE + 1)
    except NotFound:
        return UserTable(trouble="it has no such file")
    except PagurusError as error:  # a FIFO, a link to somewhere else: the sandbox may have put anything there
        return UserTable(trouble=error.message)
    if len(data) > MAX_FILE:
        return UserTable(trouble=f"the file is larger than {MAX_FILE} bytes")
    return UserTable(data.decode("utf-8", "replace"))


def resolve(who: int | str, passwd: UserTable, group: UserTable) -> User:
    """Who `who` is by these files. Names are looked up; root and numbers need not be in them.

    Without a group: that of the user, or 0 where the file does not know its number, and the supplementary groups that
    name the user as a member. With one: it alone. As with Docker, the group is a supplementary one as well: a program
    that gives it up as its own one must not escape what is denied to it.

    >>> resolve("crab:staff", UserTable("crab:x:1000:100:Crab:/home/crab:/bin/sh"), UserTable("staff:x:50:crab"))
    User(uid=1000, gid=50, home='/home/crab', groups=(50,))
    """
    name, target = _words(who)
    existing = parse(passwd.text)
    if (user := existing.get(name)) is None:
        if (uid := 0 if name == "root" else _number(name)) is None:
            raise _unknown("user", name, PASSWD, passwd)
        without = "", User(uid, 0, "/")
        name, user = next(((other, item) for other, item in existing.items() if item.uid == uid), without)
    home = next((item.home for item in existing.values() if item.uid == user.uid), user.home)  # as in Docker
    groups = parse_groups(group.text)
    if target is not None:
        gid = groups[target].gid if target in groups else _number(target)
        if gid is None:
            raise _unknown("group", target, GROUP, group)
        return User(user.uid, gid, home, (gid,))
    more = sorted({item.gid for item in groups.values() if name in item.members} - {user.gid})
    if len(more) >= MAX_GROUPS:
        raise Invalid(f"{name[:64]} is in {len(more)} groups of {GROUP}", hint=f"say which one, as {name[:64]}:GROUP")
    return User(user.uid, user.gid, home, (user.gid, *more))


def parse(text: str) -> dict[str, User]:
    """The users of a passwd file; lines that make no sense are passed over.

    >>> parse("crab:x:1000:100:Crab:/home/crab:/bin/sh")
    {'crab': User(uid=1000, gid=100, home='/home/crab', groups=())}
    """
    result: dict[str, User] = {}
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) < 6 or (uid := _number(fields[2])) is None or (gid := _number(fields[3])) is None:
            continue
        home = fields[5] if fields[5].startswith("/") and "\0" not in fields[5] else "/"
        result.setdefault(fields[0], User(uid, gid, home))
    return result


def parse_groups(text: str) -> dict[str, GroupEntry]:
    """The groups of a group file, likewise.

    >>> parse_groups("staff:x:50:crab")["staff"].gid
    50
    """
    result: dict[str, GroupEntry] = {}
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) >= 4 and (gid := _number(fields[2])) is not None:
            result.setdefault(fields[0], GroupEntry(gid, frozenset(filter(None, fields[3].split(",")))))
    return result


def _words(who: int | str) -> tuple[str, str | None]:
    """As with Docker, either half may be left out: root, and the group of the user."""
    name, _, group = str(who).partition(":")
    if not (name or group) or ":" in group:
        raise Invalid(f"not a user: {str(who)[:64]!r}", hint="say NAME, UID, NAME:GROUP or UID:GID")
    return name or "0", group or None


def _unknown(what: str, name: str, path: str, table: UserTable) -> Invalid:
    why = f": {table.trouble}" if table.trouble else ""
    if name.isascii() and name.lstrip("-").isdigit():
        return Invalid(f"no such {what} in a sandbox: {name[:64]}", hint=f"ids lie between 0 and {IDS - 1}")
    return Invalid(
        f"no {what} {name[:64]!r} in the sandbox's {path}{why}",
        hint=f"use one that is in its {path}, add it there, or give a number",
    )


def _number(text: str) -> int | None:
    """An id of the sandbox's range, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < IDS else None
