"""Users of a sandbox, by name or number, from its own ``/etc/passwd``.

Owns: reading that file, which the sandbox may have written. Does not own: becoming somebody (native/). Guarantee: the
result is a user of the sandbox's id range, whatever the file holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from sandbox import files
from sandbox.errors import Invalid, PagurusError

IDS = 65_536
_PASSWD_MOST = 1 << 20


@dataclass(frozen=True)
class User:
    uid: int
    gid: int
    home: str


ROOT = User(0, 0, "/root")


def find(init_pid: int, name: int | str) -> User:
    """The user with this name or number. A number need not be in the file. Raises Invalid. Blocks."""
    if name in (0, "root"):
        return ROOT
    try:
        text = files.read(init_pid, "/etc/passwd", limit=_PASSWD_MOST).decode("utf-8", "replace")
    except PagurusError:
        text = ""
    return among(parse(text), name)


def parse(text: str) -> dict[str, User]:
    """The users of a passwd file; lines that make no sense are passed over.

    >>> parse("crab:x:1000:100:Crab:/home/crab:/bin/sh")
    {'crab': User(uid=1000, gid=100, home='/home/crab')}
    """
    found: dict[str, User] = {}
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) < 6 or not _number(fields[2]) or not _number(fields[3]):
            continue
        home = fields[5] if fields[5].startswith("/") and "\0" not in fields[5] else "/"
        found.setdefault(fields[0], User(int(fields[2]), int(fields[3]), home))
    return found


def among(known: dict[str, User], name: int | str) -> User:
    """One of them. A name of digits alone is a number."""
    if isinstance(name, str) and name in known:
        return known[name]
    if isinstance(name, str) and not _number(name):
        raise Invalid(f"no such user in the sandbox: {name[:64]!r}", remedy="use a name of its /etc/passwd, or a uid")
    uid = int(name)
    if not 0 <= uid < IDS:
        raise Invalid(f"no such user in a sandbox: {uid}")
    return next((user for user in known.values() if user.uid == uid), User(uid, uid, "/"))


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < IDS
