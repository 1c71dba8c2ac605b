"""The processes of a run on one machine: started, started again, looked at.

Guarantee: one supervisor per run directory, by a lock of the kernel. A process that was killed is started again and
continues; when one ends by itself (0: done, 1: it said why it cannot continue), the run is over and the others are
ended. The death of the supervisor ends nothing: the next one adopts what runs.

::

    pagurus train ─▶ supervisor ─┬▶ rollout ─▶ engines
                                 │     ▲ Unix socket
                                 └▶ trainer
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollout.engine import adopted
from rollout.engine.adopted import RoleRecord
from rollout.store import stages
from rollout.store.lock import own
from sandbox.errors import NotFound
from sandbox.termination import termination_signals

ROLES = ("supervisor", "rollout", "trainer", "engine")
DONE, SAID, OWNED = 0, 1, 75  # exit statuses: it is over; it said why it cannot continue; another process has this role
MAX_DEATHS = 20  # in a row, of a process that was never ready and lived less than `LIVED_WELL`
MAX_FRUITLESS = 100  # deaths in a row, of a process that was ready and never did its work
LIVED_WELL = 60.0  # seconds
PAUSE = 0.1  # seconds before a process that was never ready is started again; doubled with each such death in a row
MAX_PAUSE = 5.0
END_TIMEOUT = 25.0  # seconds that a process has to end when the run is over; a trainer ends its evaluation first
FOLLOW_INTERVAL = 0.2  # seconds
STANDBYS = ("trainer", "rollout")  # with --wait they load their code, which takes long, and wait for a line on stdin
POLL_INTERVAL = 1.0  # seconds between two looks whether it is time to prepare one
FINALIZED = 2.0  # seconds after a role was adopted: a supervisor that was killed may be killed again
PLAN = "plan.json"  # rollout.plan.NAME, without what that imports
SHOWN = ("trainer",)  # what they say is the run's; that of others goes to a log of their own


class RoleState(msgspec.Struct, kw_only=True):
    """One process of a run, as `pagurus roles` shows it."""

    name: str
    alive: bool | None  # None: it is on another machine
    pid: int
    generation: int
    age_s: float
    url: str = ""
    log: str = ""
    host: str = ""


def roles_of(run: Path) -> Path:
    return run / "roles"


def part_of(run: Path, part: str) -> Path:
    """Where the processes of a part of a job are written down that has a machine of its own."""
    return run / "parts" / part


def written(run: Path) -> dict[str, RoleRecord]:
    """What is written down of the processes of a run, by name; each engine of a pool has a directory and a name of its
    own, each rank of a trainer a name; parts on other machines have supervisors of their own."""
    places = [(name, roles_of(run), name) for name in ROLES]
    places += [(path.stem, roles_of(run), path.stem) for path in sorted(roles_of(run).glob("rank-*.json"))]
    places += [(directory.name, directory, "engine") for directory in sorted((run / "engines").glob("*"))]
    for part in sorted((run / "parts").glob("*")):
        places += [(f"{part.name}.{name}", roles_of(part), name) for name in ("supervisor", "keeper")]
        places += [(name, roles_of(part), name) for name in ROLES if name == part.name]
    result: dict[str, RoleRecord] = {}
    for name, directory, role in places:
        read = adopted.read(directory, role)
        if read is not None and (name not in result or read.at > result[name].at):  # a trainer was here and there
            result[name] = read
    return result


def states(run: Path) -> list[RoleState]:
    """The processes of a run that were ever started."""
    result = []
    for name, role in written(run).items():
        descriptor = adopted.hold(role)
        if descriptor is not None:
            os.close(descriptor)
        result.append(
            RoleState(
                name=name,
                alive=descriptor is not None if adopted.here(role) else None,
                pid=role.pid,
                generation=role.generation,
                age_s=time.time() - role.at,
                url=role.url,
                log=role.log,
                host=role.host,
            )
        )
    if not result:
        raise NotFound(f"no process was ever started for {run}", hint="name a run directory, such as runs/latest")
    return result


def restart(run: Path, name: str) -> bool:
    """kill -9 of one role: who watches it starts it again. False when it does not live."""
    role = written(run).get(name)
    descriptor = adopted.hold(role) if role is not None else None
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    return True


def programs(run: Path) -> dict[str, list[str]]:
    """What is started for a run, in this order."""
    return {role: [sys.executable, "-m", role, str(run)] for role in ("rollout", "trainer")}


def supervise(
    run: Path, programs: Mapping[str, Sequence[str]], *, standbys: Collection[str] = (), at: Path | None = None
) -> int:
    """Keep these alive as the run's roles until one says that it is over; the trainer's status, or the one that it
    ended by. Blocks. `standbys`: roles of which a process is held ready that takes over when the one that works dies.
    `at`: where they are written down, if not in the run directory itself.

    Ctrl-C and SIGTERM are theirs: they end, say how to continue, and so does this.
    """
    at = at or run
    at.mkdir(parents=True, exist_ok=True)
    with own(at, "supervisor.lock"), _passed_on() as passed:
        _write_down(at, "supervisor", os.getpid())
        stages.note(roles_of(run), "supervisor", stages.READY)
        return _Supervisor(run, at, programs, standbys, passed).watch()


@dataclass(eq=False)
class SignalRelay:
    """Who gets the signals that the supervisor gets, and whether there was one."""

    to: set[int] = field(default_factory=set)
    requested: bool = False


@dataclass(eq=False)
class _Role:
    """A role as the supervisor sees it."""

    name: str
    argv: Sequence[str]
    descriptor: int = -1  # pidfd of the process that lives
    process: subprocess.Popen[bytes] | None = None  # None: one that a supervisor before us started
    standby: subprocess.Popen[bytes] | None = None  # the next one
    was_standby: bool = False  # the one that lives
    pid: int = 0
    deaths: int = 0  # in a row, before it was ready
    fruitless: int = 0  # deaths in a row, before it had worked
    since: float = 0.0
    again_at: float = 0.0
    status: int | None = None  # with which it ended for good


class _Supervisor:
    """Consumes deaths. Produces living roles, until one of them says that the run is over."""

    def __init__(
        self, run: Path, at: Path, programs: Mapping[str, Sequence[str]], standbys: Collection[str], passed: SignalRelay
    ):
        self.run, self.at, self.standbys, self.passed = run, at, standbys, passed
        self.roles = [_Role(name, argv) for name, argv in programs.items()]

    def watch(self) -> int:
        try:
            while not any(role.status is not None for role in self.roles):
                for role in self.roles:
                    if role.descriptor < 0 and time.monotonic() >= role.again_at:
                        self._begin(role)
                self._wait()
        finally:
            self._end()
        return max(role.status for role in self.roles if role.status is not None)

    def _begin(self, role: _Role) -> None:
        """Adopt what lives, else start it."""
        left = adopted.read(roles_of(self.at), role.name)
        descriptor = adopted.hold(left) if left is not None else None
        role.since = time.monotonic()
        if left is not None and descriptor is not None:
            role.process, role.pid, role.descriptor, role.was_standby = None, left.pid, descriptor, False
            self._adopted(role, left)
        else:
            log = self._log(role)
            taken = self._taken(role)
            role.was_standby, role.process = taken is not None, taken or self._popen(role.argv, log)
            role.pid, role.descriptor = role.process.pid, os.pidfd_open(role.process.pid)
            stages.note(roles_of(self.run), role.name, stages.BEGUN, role.pid)
            _write_down(self.at, role.name, role.pid, log=log)
        self.passed.to.add(role.pid)
        if self.passed.requested:  # before it was in there
            signal.pidfd_send_signal(role.descriptor, signal.SIGTERM)

    def _adopted(self, role: _Role, left: RoleRecord) -> None:
        """It lives. A trainer that read another plan than the run has now is ended: the next one reads that."""
        if role.name not in SHOWN:
            return
        if self._planned() > left.at:
            signal.pidfd_send_signal(role.descriptor, signal.SIGKILL)
            return
        lines = f"pagurus rollouts why {self.run}"
        print(f"the {role.name} (pid {role.pid}) lives and prints where it was started; see `{lines}`", file=sys.stderr)

    def _planned(self) -> float:
        """When the run's plan was written last."""
        with contextlib.suppress(FileNotFoundError):
            return (self.run / PLAN).stat().st_mtime
        return 0.0

    def _log(self, role: _Role) -> str:
        return "" if role.name in SHOWN else str(self.at / f"{role.name}.log")

    def _popen(self, argv: Sequence[str], log: str, **options: Any) -> subprocess.Popen[bytes]:
        with open(log, "ab") if log else contextlib.nullcontext() as out:
            return subprocess.Popen(argv, stdout=out, stderr=out, **options)

    def _prepare(self) -> bool:
        """Start the spares that are missing; whether one still has to come. A role that was a spare itself leaves the
        processors to the next one; any other, and one that was adopted, comes first."""
        missing = [role for role in self.roles if role.name in self.standbys and role.standby is None]
        for role in missing:
            finalized = role.process is not None or time.monotonic() - role.since > FINALIZED
            if role.descriptor >= 0 and (role.was_standby or (finalized and stages.READY in self._reached(role))):
                argv = [*role.argv, "--wait"]  # not of the terminal's group: Ctrl-C is passed on, by `_passed_on`
                role.standby = self._popen(argv, self._log(role), stdin=subprocess.PIPE, process_group=0)
        return any(role.standby is None for role in missing)

    def _taken(self, role: _Role) -> subprocess.Popen[bytes] | None:
        """The standby, started; None when there is none that lives."""
        standby, role.standby = role.standby, None
        if standby is None:
            return None
        assert standby.stdin is not None
        try:
            standby.stdin.write(b"begin\n")
            standby.stdin.close()
        except BrokenPipeError:
            standby.wait()
            return None
        return standby

    def _reached(self, role: _Role) -> set[str]:
        return {item.stage for item in stages.read(roles_of(self.run), role=role.name, pid=role.pid)}

    def _wait(self) -> None:
        """Until a process ended, or one is to be started again."""
        polls = self._prepare()
        poll = select.poll()
        for role in self.roles:
            if role.descriptor >= 0:
                poll.register(role.descriptor, select.POLLIN)
        due = [role.again_at for role in self.roles if role.descriptor < 0]
        due += [time.monotonic() + POLL_INTERVAL] if polls else []
        ended = {
            descriptor for descriptor, _ in poll.poll(1000 * max(0.0, min(due) - time.monotonic()) if due else None)
        }
        for role in self.roles:
            if role.descriptor in ended:
                self._ended(role)

    def _ended(self, role: _Role) -> None:
        code = self._reap(role)
        if self.passed.requested:  # also of one whose status only its parent could know
            code = code if code in (DONE, SAID) else SAID
        if code in (DONE, SAID):
            role.status = code
            self._quote(role, code)
            return
        self._judge(role)
        if role.deaths > MAX_DEATHS or role.fruitless > MAX_FRUITLESS:
            role.status = SAID
            times = max(role.deaths, role.fruitless)
            print(f"the {role.name} died {times} times in a row, last with {code}", file=sys.stderr)
            self._quote(role, SAID)
            return
        if code != OWNED:
            print(f"the {role.name} ended with {code}: it is started again, and continues", file=sys.stderr)
        pause = min(MAX_PAUSE, PAUSE * 2.0 ** (role.deaths - 1)) if role.deaths else 0.0
        role.again_at = time.monotonic() + pause

    def _judge(self, role: _Role) -> None:
        """One death more. Who was ready is started again at once; who never works is not started for ever."""
        stages.note(roles_of(self.run), role.name, stages.NOTICED, role.pid)
        reached = self._reached(role)
        lived_well = time.monotonic() - role.since > LIVED_WELL
        role.deaths = 0 if stages.READY in reached else 1 if lived_well else role.deaths + 1
        role.fruitless = 1 if stages.WORKED in reached else role.fruitless + 1

    def _reap(self, role: _Role) -> int | None:
        """The status of a process that has ended; None where it was not our child and did not leave a summary."""
        self.passed.to.discard(role.pid)
        os.close(role.descriptor)
        role.descriptor = -1
        if role.process is not None:
            return role.process.wait()
        return DONE if role.name == "trainer" and (self.run / "summary.json").exists() else None

    def _quote(self, role: _Role, code: int) -> None:
        """The last words of a role whose log is not shown."""
        log = self.at / f"{role.name}.log"
        if code == SAID and not self.passed.requested and role.name not in SHOWN and log.exists():
            lines = log.read_text(errors="replace").splitlines()
            print(f"the {role.name} stopped: {lines[-1] if lines else 'without a word'}", file=sys.stderr)

    def _end(self) -> None:
        """Ends what still runs: by a signal first, killed after a while."""
        for role in self.roles:
            if role.standby is not None:
                role.standby.kill()
                role.standby.wait()
        for number, timeout in ((signal.SIGTERM, END_TIMEOUT), (signal.SIGKILL, None)):
            living = [role for role in self.roles if role.descriptor >= 0]
            for role in living:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(role.descriptor, number)
            for role in living:
                if select.select([role.descriptor], [], [], timeout)[0]:
                    self._reap(role)


def detach(run: Path) -> int:
    """The same in a session of its own, which this terminal does not end; the supervisor's pid."""
    program = [sys.executable, "-m", "coordinator.local", str(run)]
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
    if not run.is_dir():
        raise NotFound(f"there is no run directory {run}", hint="name one, such as runs/latest")
    if not path.exists():
        raise NotFound(f"{run} was not started with --detach", hint="its terminal shows what it says")
    with path.open("rb") as log:
        while True:
            alive = any(state.alive for state in states(run) if state.name != "engine")
            while chunk := log.read(1 << 16):
                yield chunk
            if not alive:
                return
            time.sleep(FOLLOW_INTERVAL)


def _write_down(run: Path, name: str, pid: int, *, log: str = "") -> None:
    last = adopted.read(roles_of(run), name)
    generation = 1 if last is None else last.generation + 1
    at = adopted.started(pid) or 0
    role = RoleRecord(name=name, pid=pid, started=at, at=time.time(), generation=generation, log=log)
    adopted.write(roles_of(run), role)


@contextlib.contextmanager
def _passed_on() -> Iterator[SignalRelay]:
    """What asks us to end asks the roles, by SIGTERM: they may have been started with SIGINT ignored. A terminal sends
    SIGINT to them by itself, but not to adopted ones."""
    passed = SignalRelay()

    def pass_on(number: int, _: object) -> None:
        passed.requested = True
        for pid in list(passed.to):
            with contextlib.suppress(ProcessLookupError):
                if number != signal.SIGINT or not sys.stdin.isatty() or os.getpgid(pid) != os.getpgid(0):
                    os.kill(pid, signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in termination_signals()}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    raise SystemExit(supervise(Path(sys.argv[1]), programs(Path(sys.argv[1])), standbys=STANDBYS))
