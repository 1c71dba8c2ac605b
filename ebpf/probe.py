"""Which hooks this kernel takes: load the best tier and say what is missing.

Owns: the list of programs a kernel may lack, and what is lost without each. Does not own: maps and verdicts.
Guarantee: nothing is left out silently; a program whose absence could hide an effect is not optional.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable
from pathlib import Path

from ebpf import btf, libbpf

BTF = Path("/sys/kernel/btf/vmlinux")

_WITHOUT_STAMPS = "older than 6.13: times set to the present by path may be a directory's"

# Programs that may be absent: the tracepoint they need, and what that means.
OPTIONAL = {
    "on_inode_new": ("btrfs_inode_new", "no btrfs: files made and removed in one turn count as changes"),
    "on_inode_evict": ("btrfs_inode_evict", "no btrfs: files made and removed in one turn count as changes"),
    "on_stamp": ("ctime_ns_xchg", _WITHOUT_STAMPS),
    "on_same_stamp": ("ctime_xchg_skip", _WITHOUT_STAMPS),
    "on_uring": ("io_uring_submit_req", "no io_uring tracepoint: sandboxes must deny io_uring (they do)"),
}

# The fentry tier has these besides. They make verdicts more exact; nothing is missed without them.
# Their functions got the first argument with idmapped mounts; where they lack it, the second is another thing.
FENTRY = {
    "on_setattr": "security_inode_setattr",
    "on_setxattr": "security_inode_setxattr",
    "on_removexattr": "security_inode_removexattr",
}
_ARGUMENTS = ("struct mnt_idmap *", "struct dentry *")
_WITHOUT_FENTRY = "attributes set by path on a file that is gone again count until the trees are compared"

TIERS = ("tracepoint", "fentry")  # best last


def kernel_has(tracepoint: str) -> bool:
    """True when the kernel itself, not a module, has the tracepoint."""
    return btf.of_tracepoint(tracepoint) is not None


def why_not_fentry(path: Path) -> str:
    """Why the programs of the fentry tier do not run here; "" when they do. Loads and attaches them alone."""
    for function in FENTRY.values():
        given = btf.of_function(function)
        if given is None or given[: len(_ARGUMENTS)] != _ARGUMENTS:
            return f"{function} takes other arguments here" if given else f"there is no {function}"
    candidate, doing = libbpf.Object(path), "load"
    try:
        for program in list(candidate.programs):
            if program not in FENTRY:
                candidate.leave_out(program)
        candidate.load()
        doing = "attach"
        for program in FENTRY:
            candidate.attach(program)
    except OSError as error:
        return f"{doing}: {os.strerror(error.errno) if error.errno else error}"
    finally:
        candidate.close()
    return ""


def load_best(
    path: Path, prepare: Callable[[libbpf.Object], None], tier: str | None = None
) -> tuple[libbpf.Object, dict[str, str], str]:
    """A loaded object, what had to be left out of it, and its tier: the best one, or the one that is asked for."""
    if tier is not None and tier not in TIERS:
        raise OSError(errno.EINVAL, f"there is no tier {tier!r}; there are {', '.join(TIERS)}")
    if platform.machine() != "x86_64":
        raise OSError(f"system call numbers of {platform.machine()} are not known; x86_64 only")
    if not BTF.exists():
        raise OSError(f"{BTF} is missing: the kernel has no type information (CONFIG_DEBUG_INFO_BTF)")
    missing: dict[str, str] = {}
    reason = why_not_fentry(path) if tier != "tracepoint" else "not asked for"
    if reason and tier == "fentry":
        raise OSError(errno.EPERM, f"this kernel does not take the fentry tier: {reason}")
    candidate = libbpf.Object(path)
    try:
        for program, (tracepoint, loss) in OPTIONAL.items():
            if not kernel_has(tracepoint):
                candidate.leave_out(program)
                missing[program] = loss
        if reason:
            for program in FENTRY:
                candidate.leave_out(program)
            if tier is None:
                missing["fentry"] = f"no fentry tier ({reason}): {_WITHOUT_FENTRY}"
        prepare(candidate)
        candidate.load()
    except OSError:
        candidate.close()
        raise
    return candidate, missing, "tracepoint" if reason else "fentry"
