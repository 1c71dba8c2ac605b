"""Explanations for people: one line per event of the ring buffer. No verdict depends on them."""

from __future__ import annotations

from ebpf import layout

_WHY = {
    layout.WHY_DATA: "content of",
    layout.WHY_RAN: "ran",
    layout.WHY_SIGNAL: "signal to",
    layout.WHY_URING: "io_uring request",
}

# x86-64 numbers of the calls that the kernel half explains.
_CALLS = {
    1: "write", 2: "open", 16: "ioctl", 18: "pwrite64", 20: "writev", 29: "shmget", 30: "shmat", 31: "shmctl",
    40: "sendfile", 49: "bind", 64: "semget", 65: "semop", 66: "semctl", 68: "msgget", 69: "msgsnd",
    70: "msgrcv", 71: "msgctl",
    76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink",
    88: "symlink", 90: "chmod", 91: "fchmod", 92: "chown", 93: "fchown", 94: "lchown", 101: "ptrace",
    109: "setpgid", 132: "utime", 133: "mknod", 155: "pivot_root", 165: "mount", 166: "umount2", 170: "sethostname",
    188: "setxattr", 189: "lsetxattr", 190: "fsetxattr", 197: "removexattr", 198: "lremovexattr",
    199: "fremovexattr", 235: "utimes", 240: "mq_open", 241: "mq_unlink", 242: "mq_timedsend",
    243: "mq_timedreceive", 257: "openat", 258: "mkdirat", 259: "mknodat", 260: "fchownat", 261: "futimesat",
    263: "unlinkat", 264: "renameat", 265: "linkat", 266: "symlinkat", 268: "fchmodat", 275: "splice",
    280: "utimensat", 285: "fallocate", 296: "pwritev", 302: "prlimit64", 304: "open_by_handle_at",
    311: "process_vm_writev", 316: "renameat2", 326: "copy_file_range", 328: "pwritev2", 429: "move_mount",
    437: "openat2", 438: "pidfd_getfd", 442: "mount_setattr", 452: "fchmodat2",
}  # fmt: skip


_PART = layout.PART_LENGTH
_TREE = "upper"  # the directory of a sandbox's subvolume that holds its files


def line(event) -> str:  # type: ignore[no-untyped-def]
    """Example: ``openat /etc/motd by sh[412]``."""
    what = _WHY.get(event.what) or _CALLS.get(event.what, f"system call {event.what}")
    name = path(_parts(event), bool(event.complete), event.name.decode(errors="replace"))
    who = f"{event.comm.decode(errors='replace')}[{event.pid}]"
    return f"{what} {name} by {who}" if name else f"{what} by {who}"


def _parts(event) -> list[str]:  # type: ignore[no-untyped-def]
    """Names from the outermost directory on. A name that was cut off ends in an ellipsis."""
    raw = bytes(event)[type(event).parts.offset :]
    result = []
    for number in range(min(event.depth, layout.DEPTH)):
        part = raw[number * _PART : (number + 1) * _PART].split(b"\0")[0]
        result.append(part.decode(errors="replace") + ("\N{HORIZONTAL ELLIPSIS}" if len(part) == _PART - 1 else ""))
    return result[::-1]


def path(parts: list[str], complete: bool, name: str) -> str:
    """The path in the sandbox, as far as it is known.

    `parts` lead to a directory entry, of the sandbox's root or of the subvolume that holds its upper layer; `name`
    is what the program wrote, relative to that entry.

    >>> path(["sandboxes", "s-1.0", "upper", "etc"], True, "motd")
    '/etc/motd'
    """
    if name.startswith("/"):
        return name
    if _TREE in parts[1:] and complete:
        parts = parts[parts.index(_TREE, 1) + 1 :]
    base = "/".join(parts)
    if parts and not complete:
        base = f"\N{HORIZONTAL ELLIPSIS}/{base}"
    elif complete:
        base = f"/{base}"
    if not name:
        return base
    return f"{base.rstrip('/')}/{name}" if base else name
