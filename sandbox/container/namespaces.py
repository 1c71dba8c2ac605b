"""Namespaces of a process: their kinds, and calling a function inside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from sandbox.container.pipes import own_thread
from sandbox.libc import checked, library

IDS = {
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
    "time": 0x00000080,
}  # CLONE_NEW*
Result = TypeVar("Result")


def flags(names: Iterable[str]) -> int:
    """The flags of namespaces for setns and clone."""
    return sum(IDS[name] for name in names)


def inside(fd: int, kinds: int, function: Callable[[], Result]) -> Result:
    """Call `function` in the namespaces of these kinds of `fd`: a pidfd, or one of /proc/PID/ns. Blocks.

    It runs on a thread that ends in that place: no other work can land there. Raises OSError when they cannot be
    entered, and what the function raises.
    """

    def enter() -> Result:
        checked(library.setns(fd, kinds), "setns")
        return function()

    return own_thread(enter)
