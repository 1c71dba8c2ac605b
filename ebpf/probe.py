"""Which hooks this kernel takes: load them and say what is missing.

Guarantee: nothing is left out silently; a program whose absence could hide an effect is not optional.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

from ebpf import btf, libbpf
from sandbox import libc

BTF = btf.BTF / "vmlinux"

_WITHOUT_STAMPS = "older than 6.13: times set to the present by path may be a directory's"

_WITHOUT_BTRFS = "no tracepoints of btrfs: files made and removed in one turn count as changes"

# File systems whose types and tracepoints are wanted. Distributions have them as modules, not loaded at boot.
_FILE_SYSTEMS = ("btrfs", "overlay")

# Programs that may be absent: the tracepoint they need, the module that may have it, and what that means.
OPTIONAL = {
    "on_inode_new": ("btrfs_inode_new", "btrfs", _WITHOUT_BTRFS),
    "on_inode_evict": ("btrfs_inode_evict", "btrfs", _WITHOUT_BTRFS),
    "on_stamp": ("ctime_ns_xchg", "", _WITHOUT_STAMPS),
    "on_same_stamp": ("ctime_xchg_skip", "", _WITHOUT_STAMPS),
    "on_uring": ("io_uring_submit_req", "", "no io_uring tracepoint: sandboxes must deny io_uring (they do)"),
}


def load(path: Path, prepare: Callable[[libbpf.Object], None]) -> tuple[libbpf.Object, dict[str, str]]:
    """A loaded object, and what had to be left out of it."""
    if platform.machine() != "x86_64":
        raise OSError(f"system call numbers of {platform.machine()} are not known; x86_64 only")
    if not BTF.exists():
        raise OSError(f"{BTF} is missing: the kernel has no type information (CONFIG_DEBUG_INFO_BTF)")
    for name in _FILE_SYSTEMS:
        libc.load_file_system(name)
    missing: dict[str, str] = {}
    loaded = libbpf.Object(path)
    try:
        for program, (tracepoint, module, loss) in OPTIONAL.items():
            if btf.of_tracepoint(tracepoint, module) is None:
                loaded.leave_out(program)
                missing[program] = loss
        prepare(loaded)
        loaded.load()
    except OSError:
        loaded.close()
        raise
    return loaded, missing
