"""Starting a command in a sandbox, and why one did not start."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sandbox.container.shim import ShimError, ShimGone
from sandbox.errors import CommandNotFound, Conflict, Invalid, NoSpace, NotFound, PagurusError

if TYPE_CHECKING:
    from sandbox.container.container import Container

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ID_RANGE = 65_536
STDIN = 1  # of the flags of `start`: it gets a pipe to read from
_ROOT = 2


class KilledBeforeStart(Conflict):
    """A command was killed from within the sandbox before it ran."""


async def start(
    container: Container,
    flags: int,
    uid: int,
    cwd: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    gid: int | None = None,
    groups: Sequence[int] = (),
    *,
    root: str = "",
    joins: str = "",
    oom_kills: int | None = None,
) -> tuple[list[str], list[int]]:
    """Start a program; the shim's answer: (pid, stream, its pid in the sandbox), and the descriptors. `flags`: STDIN.

    `root`: of a service, in which `cwd` lies; "": the sandbox's. `joins`: the root of the service whose groups it is to
    join; without a `root` it gets them as its descriptors from 4 on. `oom_kills`: what the sandbox's group has counted
    so far, for who has just looked.
    """
    if not argv or not argv[0]:
        raise Invalid("an empty command", sandbox=container.spec.id, hint="give a program, or a line for the shell")
    if not 0 <= uid < ID_RANGE:
        raise Invalid(
            f"no such user in a sandbox: {uid}",
            sandbox=container.spec.id,
            hint="uids of a sandbox lie between 0 and 65535",
        )
    gids = ",".join(map(str, (uid if gid is None else gid, *groups)))
    variables = [f"{name}={value}" for name, value in env.items()]
    before = container.cgroup.oom_kills() if oom_kills is None else oom_kills
    try:
        with container.groups.opened(joins) as groups:
            answer: tuple[list[str], list[int]] = await container.call(
                "exec",
                flags | (_ROOT if root else 0),
                uid,
                gids,
                cwd,
                *([root] if root else []),
                len(argv),
                *argv,
                *variables,
                fds=groups,
            )
        return answer
    except ShimGone as error:
        raise container.dead("its shim is gone") from error
    except ShimError as error:
        if error.stage == "killed" and container.alive and container.cgroup.oom_kills() == before:
            raise KilledBeforeStart(
                "killed while it was started", hint="try again", sandbox=container.spec.id
            ) from error
        raise refusal(container, error, argv[0], cwd) from error


def no_process_left(container: Container) -> Conflict:
    """Why the kernel makes no process: the sandbox's own limit, or that of all sandboxes."""
    limit, here = container.spec.limits.processes, container.spec.id
    if container.cgroup.host_is_full():
        return Conflict(
            "no process left: all sandboxes of this host together have as many as it can bear",
            hint="end some in any sandbox, or raise kernel.pid_max and kernel.threads-max",
            sandbox=here,
        )
    return Conflict(
        f"no process left: all {limit} are in use", hint="end some, or raise Limits.processes", sandbox=here
    )


def refusal(container: Container, error: ShimError, program: str, cwd: str) -> PagurusError:
    """What a refusal of the shim, or of a supervisor inside, means to the caller."""
    here = container.spec.id
    dead: PagurusError = container.dead("pid 1 is gone")
    match error.stage, error.errno:
        case "exec", errno.ESRCH:
            return dead
        case "exec", errno.ENOENT | errno.ENOTDIR:
            return CommandNotFound(f"{program}: no such program", hint="check the name and PATH", sandbox=here)
        case "exec", errno.EACCES | errno.ENOEXEC | errno.EISDIR | errno.ELOOP:
            return CommandNotFound(
                f"{program}: cannot be executed ({os.strerror(error.errno)})", hint="chmod +x?", sandbox=here
            )
        case "exec", errno.E2BIG:
            return Invalid(f"{program}: arguments too long", hint="pass large input by stdin", sandbox=here)
        case "service", _:
            return NotFound(
                f"a service has lost its root: {os.strerror(error.errno)}", hint="restore the sandbox", sandbox=here
            )
        case "cwd", _:
            return Invalid(f"working directory {cwd}: {os.strerror(error.errno)}", sandbox=here)
        case _, errno.EAGAIN:
            return no_process_left(container)
        case (_, errno.ENOMEM) | ("killed", _):
            if not container.alive:
                return dead
            return NoSpace("not enough memory to start a command", hint="raise Limits.memory", sandbox=here)
        case _, errno.ENOSPC | errno.EDQUOT:
            return NoSpace(f"cannot start {program}: {error}", hint="raise the limits", sandbox=here)
        case "stopped", _:
            return Conflict(
                f"cannot start {program}: something in the sandbox stops new processes again and again (SIGSTOP)",
                hint="restore an older checkpoint, or kill the sandbox",
                sandbox=here,
            )
        case "join namespaces", _:
            return dead
    return Conflict(f"cannot start {program}: {error}", sandbox=here)
