"""Which hooks this kernel takes: load them and say what is missing.

Owns: the list of programs a kernel may lack, and what is lost without each. Does not own: maps and verdicts.
Guarantee: nothing is left out silently; a program whose absence could hide an effect is not optional.
"""

from __future__ import annotations

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


def kernel_has(tracepoint: str) -> bool:
    """True when the kernel itself, not a module, has the tracepoint."""
    return btf.of_tracepoint(tracepoint) is not None


def load(path: Path, prepare: Callable[[libbpf.Object], None]) -> tuple[libbpf.Object, dict[str, str]]:
    """A loaded object, and what had to be left out of it."""
    if platform.machine() != "x86_64":
        raise OSError(f"system call numbers of {platform.machine()} are not known; x86_64 only")
    if not BTF.exists():
        raise OSError(f"{BTF} is missing: the kernel has no type information (CONFIG_DEBUG_INFO_BTF)")
    missing: dict[str, str] = {}
    loaded = libbpf.Object(path)
    try:
        for program, (tracepoint, loss) in OPTIONAL.items():
            if not kernel_has(tracepoint):
                loaded.leave_out(program)
                missing[program] = loss
        prepare(loaded)
        loaded.load()
    except OSError:
        loaded.close()
        raise
    return loaded, missing
