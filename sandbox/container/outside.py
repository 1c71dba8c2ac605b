"""What belongs to a sandbox and is none of its processes: programs of the host, its network, and what its shim keeps.

Guarantee: `netns` and `root` are of this sandbox, or nothing, though its shim may die and another process may get its
number.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.container import namespaces, spawn
from sandbox.container.shim import ShimError, ShimGone

if TYPE_CHECKING:
    from sandbox.container.container import Container


class Outside:
    """Of one sandbox. All calls raise SandboxDead when its shim is gone."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._network = self._root = -1

    @property
    def netns(self) -> Path:
        """Where we have the network namespace. Raises SandboxDead when it holds none."""
        return self._held(self._network, "no network namespace")

    @property
    def root(self) -> Path:
        """Where we have the root directory of the shim. Raises SandboxDead when it holds none."""
        return self._held(self._root, "no mount namespace")

    def _held(self, descriptor: int, why: str) -> Path:
        if descriptor < 0:
            raise self._container.dead(why)
        return Path(f"/proc/{os.getpid()}/fd/{descriptor}")

    async def hold(self) -> None:
        """Hold the namespaces in which the shim is now that it has answered something. The descriptors stay the same:
        others may be at them."""
        with contextlib.ExitStack() as opened:
            result = []
            for name, flags in (("ns/net", os.O_RDONLY), ("root", os.O_PATH | os.O_DIRECTORY)):
                result.append(os.open(f"/proc/{self._container.shim_pid}/{name}", flags | os.O_CLOEXEC))
                opened.callback(os.close, result[-1])
            _, given = await self._container.call("hello")  # it lives: the number was its own when these were opened
            for fd in given:
                os.close(fd)
            self._network, self._root = _retained(result[0], self._network), _retained(result[1], self._root)

    def close(self) -> None:
        """Let go of the namespaces. Idempotent."""
        for descriptor in (self._network, self._root):
            if descriptor >= 0:
                os.close(descriptor)
        self._network = self._root = -1

    async def start(
        self,
        argv: Sequence[str],
        *,
        fds: Sequence[int] = (),
        in_cgroup: bool,
        join: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
        waits: bool = False,
    ) -> int:
        """Start a host program (CRIU) as a child of the shim, in the shim's mount namespace; returns its host pid.

        ``fds[i]`` becomes its descriptor ``3 + i``. `in_cgroup`: inside the sandbox's groups and in fresh ipc and uts
        namespaces, as is what it restores; otherwise outside all groups. `join`: namespaces of pid 1 to enter (keys of
        :data:`sandbox.container.namespaces.IDS`). `stderr`: its stdout and stderr, else the shim's log.
        `waits`: the groups are joined later, by `cgroup.join`; a shim of before that is Refused.
        """
        passed, targets = list(fds), list(range(3, 3 + len(fds)))
        if stderr is not None:
            passed, targets = [*passed, stderr, stderr], [*targets, 1, 2]
        flags = namespaces.flags(join)
        variables = [f"{name}={value}" for name, value in {"PATH": spawn.PATH, **(env or {})}.items()]
        listed = ",".join(map(str, targets))
        (pid,), (pidfd,) = await self._container.call(
            "wait" if waits else "host", int(in_cgroup), flags, listed, len(argv), *argv, *variables, fds=passed
        )
        os.close(pidfd)
        return int(pid)

    async def exited(self, pid: int) -> int:
        """Wait status of a program of `start`. Ask for it before the connection is lost."""
        shim = self._container.need_shim()
        status = await shim.exited(pid)
        shim.forget(pid)
        return status

    async def sink(self) -> int:
        """A new descriptor to write to: the shim discards what comes. For output pipes of restored processes."""
        _, (fd,) = await self._container.call("sink")
        return fd

    async def keep(self, name: str, fds: Sequence[int]) -> None:
        """Let the shim hold these descriptors, by a name, for the next daemon; it lets go of those that it held."""
        with contextlib.suppress(ShimError, ShimGone):  # a shim of before this: the next daemon makes them again
            await self._container.call("keep", name, fds=fds)

    async def retained(self, name: str) -> list[int]:
        """New descriptors of what a former daemon let the shim keep by this name, in the order of then."""
        try:
            _, fds = await self._container.call("kept", name)
        except (ShimError, ShimGone):
            return []
        return fds


def _retained(result: int, number: int) -> int:
    """A copy of the descriptor `result`: `number`, or a new one where that is none."""
    return os.dup(result) if number < 0 else os.dup2(result, number, inheritable=False)
