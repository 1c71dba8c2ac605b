"""The files that Unix sockets of a sandbox are bound to.

Guarantee: a file comes from the socket itself, never looked for by the name that the socket was bound by: names are
relative, pass through links and are used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator

from sandbox.descriptors import closing
from sandbox.libc import descriptor_of

_SIOCUNIXFILE = 0x89E0
_CONNECTED = b"03"
_START = rb"^[0-9a-f]{16}: [0-9A-F]{8} [0-9A-F]{8} [0-9A-F]{8} [0-9A-F]{4} "
# A name ends where the next line begins: the kernel writes it as it is, line feeds too.
_LINE = re.compile(_START + rb"([0-9A-F]{2}) +(\d+) ([^\n].*?)(?=\n\Z|\n" + _START[1:] + rb")", re.M | re.S)


def named(pid: int) -> dict[int, str]:
    """The sockets in the network namespace of `pid` that have a name in the file tree: inode number -> name. Blocks.

    Of connected ones with the same name one is enough: those that a listener accepts all have its name.
    """
    result: dict[int, str] = {}
    observed: set[bytes] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/net/unix", "rb") as table:
        for state, inode, name in _LINE.findall(table.read()):
            if not name.startswith(b"@") and not (state == _CONNECTED and name in observed):
                observed.add(name)
                result[int(inode)] = os.fsdecode(name)
    return result


@contextlib.contextmanager
def file_of(pidfd: int, fd: int) -> Iterator[int]:
    """The file that the socket `fd` of a process is bound to, as a path descriptor. Raises OSError where it is none."""
    with closing(descriptor_of(pidfd, fd)) as socket:
        file = fcntl.ioctl(socket, _SIOCUNIXFILE)
    with closing(file):
        yield file
