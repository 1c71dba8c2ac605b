"""The owner's own programs in a sandbox: agents that live in it and are no part of its checkpoints.

A program is the owner's because a caller of the API started it so; nothing that runs in a sandbox can ask for it. Kept
apart are the program with all its threads and its attendant, whose log is its own; not the processes that it starts.

Guarantee: what is kept apart is the attendant that the shim started and its own child, distinguished from later
processes of the same number by the time at which they started; also by the next daemon, which finds both in the
program's row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daemon.catalogue import ProgramRow
from sandbox.container.supervisor import StartedSupervisor
from sandbox.errors import Conflict
from sandbox.procfs import host_pid, inner_pid, task_of

if TYPE_CHECKING:
    from ebpf.inspector import Inspector
    from sandbox.container.container import Container

Identity = tuple[int, int]  # number in the sandbox, start in clock ticks since boot


def first(container: Container, inspector: Inspector, started: StartedSupervisor) -> list[Identity]:
    """Keep a program apart that was started a moment ago; returns what finds it again. Blocks.

    What the attendant says of its program comes from inside the sandbox: it counts if that is a child of the attendant.
    """
    supervisor = task_of(started.host_pid)
    pid = host_pid(started.program, container.tasks())
    program = None if pid is None else task_of(pid)
    if supervisor is None or (program is not None and program.parent != supervisor.pid):
        raise Conflict("it was killed while it started", hint="try again", sandbox=container.spec.id)
    result = [task for task in (supervisor, program) if task is not None]  # without a program: it has ended already
    for task in result:
        _keep(container, inspector, task.pid, task.started)
    return [(number, task.started) for task in result if (number := inner_pid(task.pid)) is not None]


def again(container: Container, inspector: Inspector, programs: list[ProgramRow]) -> None:
    """Keep apart those of these that still live: the daemon before this one did. Blocks.

    One whose start that daemon did not live to see the end of has none in its row: it counts like any other program.
    """
    tasks = container.tasks()
    for row in programs:
        for number, started in row.excluded:
            if (pid := host_pid(number, tasks)) is not None:
                _keep(container, inspector, pid, started)


def _keep(container: Container, inspector: Inspector, pid: int, started: int) -> None:
    if container.excluded.add(pid, started):
        inspector.exclude(container.cgroup.id, pid)


def retained(programs: dict[str, ProgramRow]) -> dict[str, ProgramRow]:
    """Of these programs, those that a checkpoint of them has."""
    return {name: row for name, row in programs.items() if not row.excluded}
