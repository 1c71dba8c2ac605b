"""The processes of a run on one machine: started, started again, looked at.

Owns: `supervise`, which keeps the run's own process alive, and what `pagurus roles` and `pagurus attach` read. Does not
own: what the processes do; the engine, which the run starts, adopts and restarts (rollout.engine.supervisor).
Guarantee: one supervisor per run folder, by a lock of the kernel. A run that was killed is started again and goes on;
one that ended with a word of its own (0: done, 1: it said why it cannot go on) is not. The death of the supervisor ends
nothing: the next one adopts what runs.

::

    pagurus train ─▶ supervisor ─▶ run (rollout and trainer) ─▶ engine
                        │ killed: `pagurus train --resume` supervises the same run
                        └─ run killed: started again, adopts engine and sandboxes
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollout.engine import adopted
from rollout.engine.adopted import Named
from rollout.store.lock import own
from sandbox.errors import NotFound

ROLES = ("supervisor", "run", "engine")
SAID = (0, 1)  # exit statuses with which a run says itself that it is over
DEATHS_MOST = 20  # in a row, each within `LIVED_WELL`
LIVED_WELL = 60.0  # seconds
PAUSE = 1.0  # seconds before a run that died is started again
FOLLOW_EVERY = 0.2  # seconds


class RoleState(msgspec.Struct, kw_only=True):
    """One process of a run, as `pagurus roles` shows it."""

    name: str
    alive: bool
    pid: int
    generation: int
    age_s: float
    url: str = ""
    log: str = ""


def roles_of(run: Path) -> Path:
    return run / "roles"


def states(run: Path) -> list[RoleState]:
    """The processes of a run that were ever started."""
    found = []
    for name in ROLES:
        role = adopted.read(roles_of(run), name)
        if role is None:
            continue
        descriptor = adopted.hold(role)
        if descriptor is not None:
            os.close(descriptor)
        found.append(
            RoleState(
                name=name,
                alive=descriptor is not None,
                pid=role.pid,
                generation=role.generation,
                age_s=time.time() - role.at,
                url=role.url,
                log=role.log,
            )
        )
    if not found:
        raise NotFound(f"no process was ever started for {run}", remedy="name a run folder, such as runs/latest")
    return found


def restart(run: Path, name: str) -> bool:
    """kill -9 of one role: who watches it starts it again. False when it does not live."""
    role = adopted.read(roles_of(run), name)
    descriptor = adopted.hold(role) if role is not None else None
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    return True


def supervise(run: Path, argv: Sequence[str]) -> int:
    """Keep `argv` alive as the run's process; the status with which it ended. Blocks.

    Ctrl-C and SIGTERM are the run's: it ends, says how to go on, and so does this.
    """
    with own(run, "supervisor.lock"), _passed_on() as passed:
        _write_down(run, "supervisor", os.getpid())
        status = _wait_for_left(run)
        deaths = 0
        while status is None:
            began = time.monotonic()
            process = subprocess.Popen(argv)
            _write_down(run, "run", process.pid, log=str(run / "run.log"))
            passed.append(process.pid)
            code = process.wait()
            passed.clear()
            deaths = 1 if time.monotonic() - began > LIVED_WELL else deaths + 1
            if code in SAID or deaths > DEATHS_MOST:
                return code
            print(f"the run ended with {code}: it is started again, and goes on", file=sys.stderr)
            time.sleep(PAUSE)
        return status


def detach(run: Path, argv: Sequence[str]) -> int:
    """The same in a session of its own, which this terminal does not end; the supervisor's pid."""
    program = [sys.executable, "-m", "coordinator.local", str(run), *argv]
    log = str(run / "run.log")
    return os.posix_spawn(
        program[0],
        program,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def follow(run: Path) -> Iterator[bytes]:
    """What a detached run says, from its beginning until none of its processes lives."""
    path = run / "run.log"
    if not path.exists():
        raise NotFound(f"{run} was not started with --detach", remedy="its terminal shows what it says")
    with path.open("rb") as log:
        while True:
            alive = any(state.alive for state in states(run) if state.name != "engine")
            while chunk := log.read(1 << 16):
                yield chunk
            if not alive:
                return
            time.sleep(FOLLOW_EVERY)


def _wait_for_left(run: Path) -> int | None:
    """The run's process that a supervisor before this one left: until it ends. None: one must be started."""
    role = adopted.read(roles_of(run), "run")
    descriptor = adopted.hold(role) if role is not None else None
    if descriptor is None:
        return None
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)
    return 0 if (run / "summary.json").exists() else None


def _write_down(run: Path, name: str, pid: int, *, log: str = "") -> None:
    last = adopted.read(roles_of(run), name)
    generation = 1 if last is None else last.generation + 1
    at = adopted.started(pid) or 0
    role = Named(name=name, pid=pid, started=at, at=time.time(), generation=generation, log=log)
    adopted.write(roles_of(run), role)


@contextlib.contextmanager
def _passed_on() -> Iterator[list[int]]:
    """SIGINT and SIGTERM go to the processes in the list, once each; a terminal sends SIGINT to them by itself."""
    children: list[int] = []

    def pass_on(number: int, _: object) -> None:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM,)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None if sys.stdin.isatty() else pass_on(0, None))
    try:
        yield children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    raise SystemExit(supervise(Path(sys.argv[1]), sys.argv[2:]))
