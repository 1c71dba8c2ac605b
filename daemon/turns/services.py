"""The services of a composition: started in order, checked for their health, started again, stopped.

Guarantee: a service is one program of the sandbox's present state (:mod:`daemon.turns.programs`), so a restore brings
back those of the checkpoint; who watches over them is found again after a restore, a fork and by a new daemon. When
the program of a service ends, whatever else runs in its root is killed before it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from daemon.catalogue import ProgramRow, put_sandbox
from daemon.turns.place import place
from sandbox.container import rooted, services
from sandbox.container.process import exit_code
from sandbox.container.supervisor import SupervisorGone, Until
from sandbox.errors import CommandNotFound, Conflict, Invalid, NotFound, PagurusError
from sandbox.messages import Composition, ExecResult, ProcessRequest, ProgramKind, SandboxState, Service, ServiceInfo
from sandbox.messages.services import Condition, Probe, Restart, ServiceHealth, ServiceState, StopRequest, UpRequest
from sandbox.tree import files

if TYPE_CHECKING:
    from daemon.turns.turns import LiveSandbox
    from sandbox.tree.safe_path import SandboxRoot

log = logging.getLogger("pagurus.services")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 60.0  # seconds before a service is started again, doubled each time, as Docker's
STABLE_AFTER = 10.0  # seconds after which one that runs is taken to have started well
SAID = 2000  # bytes of its output, or of a health check's, that an error shows
POLL = 0.5  # seconds between looks at a service that others wait for; what changes it wakes them before
LOG_LIMIT = 4 << 20  # bytes kept of each output of a service


def pause_before_restart(service: Service, row: ProgramRow, code: int, ran: float) -> float | None:
    """Seconds until a service that ended is started again, as Docker waits; None: it is not. Pure.

    `ran`: seconds for which it did.
    """
    if row.stopped or service.restart is Restart.NO:
        return None
    if service.restart is Restart.ON_FAILURE and (
        code == 0 or (service.restart_attempts and row.restarts >= service.restart_attempts)
    ):
        return None
    doubled = 0 if ran >= STABLE_AFTER else min(row.restarts, 10)
    return float(min(LONGEST_PAUSE, FIRST_PAUSE * 2**doubled))


def has_reached(row: ProgramRow, condition: Condition, *, restarts: bool) -> bool | None:
    """Whether a service is as another one needs it; None: it will not be. Pure.

    `restarts`: when it has ended, that is not for good.
    """
    if row.exit_status is not None:
        if exit_code(row.exit_status) == 0 and condition is not Condition.HEALTHY:
            return True
        return False if restarts else None
    if condition is Condition.COMPLETED:
        return False
    if condition is Condition.STARTED or row.health is ServiceHealth.HEALTHY:
        return True
    return None if row.health in (ServiceHealth.UNHEALTHY, ServiceHealth.NONE) else False


def startup_order(composition: Composition, names: Sequence[str]) -> list[str]:
    """These services with all that they depend on, in the order in which they start; of none, all. Pure."""
    pending, included = list(names or composition.services), set()
    while pending:
        name = pending.pop()
        if name not in composition.services:
            raise NotFound(f"no service {name}", hint=f"there are: {', '.join(composition.services)}")
        if name not in included:
            included.add(name)
            pending += [other for other in composition.services[name].depends_on if other in composition.services]
    return [name for name in composition.order() if name in included]


class ServiceControl:
    """Those of one sandbox."""

    def __init__(self, live: LiveSandbox) -> None:
        self._live = live
        self._watched: dict[str, SandboxRoot] = {}  # programs, and the state in which each is watched over
        self._changed = asyncio.Condition()

    @property
    def composition(self) -> Composition:
        """Raises Invalid where there is none."""
        if self._live.row.composition is None:
            raise Invalid("it has no services", hint="create it with a composition", sandbox=self._live.row.id)
        return self._live.row.composition

    # ----------------------------------------------------------------- looking

    def row(self, name: str) -> ProgramRow | None:
        """The latest program of a service; None: it was never started."""
        rows = [row for row in self._live.row.programs.values() if row.kind is ProgramKind.SERVICE]
        return max((row for row in rows if row.service == name), key=lambda row: row.started_at, default=None)

    def all(self) -> list[ServiceInfo]:
        return [self.info(name) for name in self.composition.services]

    def info(self, name: str) -> ServiceInfo:
        """A service as it is known to be. Raises NotFound."""
        composition, row = self.composition, self.row(name)
        if (said := composition.services.get(name)) is None:
            raise NotFound(f"no service {name}", hint=f"there are: {', '.join(composition.services)}")
        address = services.address(composition, name)
        if row is None:
            return ServiceInfo(
                name=name, image=said.image, state=ServiceState.CREATED, address=address, ports=list(said.ports)
            )
        code = None if row.exit_status is None else exit_code(row.exit_status)
        state = ServiceState.RUNNING if code is None else ServiceState.EXITED
        if code is not None and row.id in self._watched and said.restart is not Restart.NO and not row.stopped:
            state = ServiceState.RESTARTING
        return ServiceInfo(
            name=name,
            image=said.image,
            state=state,
            address=address,
            health=row.health,
            command=row.command,
            program=row.id,
            pid=row.pid,
            started_at=row.started_at,
            ended_at=row.ended_at,
            exit_code=code,
            oom_killed=row.oom_killed,
            restarts=row.restarts,
            ports=list(said.ports),
            error=row.error,
        )

    # ----------------------------------------------------------------- acting

    async def up(self, request: UpRequest) -> list[ServiceInfo]:
        """Start what does not run. That is a turn, also when it fails."""
        composition = self.composition
        names = startup_order(composition, request.services)
        failure: PagurusError | None = None

        async with self._live.act(f"up {' '.join(names)}", ends_turn=True) as act:
            began = time.monotonic()
            try:
                async with asyncio.timeout(request.timeout):
                    await self._bring_up(composition, names, wait=request.wait)
            except* PagurusError as errors:
                failure = _first(errors)
            except* TimeoutError:
                waiting = [name for name in names if not self._is_up(name, composition.services[name])]
                failure = Conflict(
                    f"not up after {request.timeout:g} s: {', '.join(waiting)}",
                    hint="look at their logs, or wait longer",
                    sandbox=self._live.row.id,
                )
            took = time.monotonic() - began
            act.result = ExecResult(exit_code=int(failure is not None), stdout=b"", stderr=b"", duration=took)
        if failure is not None:
            raise failure
        return [self.info(name) for name in names]

    async def start(self, name: str) -> ServiceInfo:
        """Start one service, unless it runs. No turn of its own."""
        self.info(name)
        async with self._live.using():
            row = self.row(name)
            if row is None or row.exit_status is not None:
                await self._start(name)
        return self.info(name)

    async def changed(self, timeout: float = POLL) -> None:
        """Returns when something of a service has changed, or after this many seconds."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._changed.wait()

    async def stop(self, name: str, request: StopRequest) -> ServiceInfo:
        """Stop a service: its signal, and after a while SIGKILL. It is not started again by its policy."""
        self.info(name)
        async with self._live.using():
            await self._stop(name, request.timeout)
        return self.info(name)

    async def restart(self, name: str, request: StopRequest) -> ServiceInfo:
        """Stop a service and start it, and with it those that depend on it so. That is a turn."""
        composition = self.composition
        self.info(name)
        others = [
            other
            for other in composition.order()
            if name in (needs := composition.services[other].depends_on) and needs[name].restart
        ]

        async with self._live.act(f"restart {name}", ends_turn=True) as act:
            began = time.monotonic()
            for other in reversed(others):
                await self._stop(other, None)
            await self._stop(name, request.timeout)
            for one in (name, *others):
                await self._start(one)
            act.result = ExecResult(exit_code=0, stdout=b"", stderr=b"", duration=time.monotonic() - began)
        return self.info(name)

    # ----------------------------------------------------------------- watching

    def watch(self) -> None:
        """Watch over those that run, or wait to be started again: after a restore, in a fork, and by a new daemon.

        Idempotent.
        """
        composition = self._live.row.composition
        if composition is None or self._live.row.state is not SandboxState.RUNNING:
            return
        for name, said in composition.services.items():
            row = self.row(name)
            if row is not None and (row.exit_status is None or said.restart is not Restart.NO):
                self._watch(row)

    def _watch(self, row: ProgramRow, kills: int | None = None) -> None:
        """`kills`: processes that the OOM killer had ended in the service before this program began."""
        inside = self._live.container.inside
        if self._watched.get(row.id) is inside:
            return
        self._watched[row.id] = inside

        def forget(_: object) -> None:
            if self._watched.get(row.id) is inside:
                del self._watched[row.id]

        kills = self._oom_kills(row.service) if kills is None else kills
        work = self._watch_over(row.id, row.service, inside, kills)
        task = self._live.services.spawn(work, f"service {row.service} of {self._live.row.id}", lasting=True)
        task.add_done_callback(forget)

    def _oom_kills(self, name: str) -> int | None:
        return self._live.container.groups.oom_kills(name)

    async def _watch_over(self, program: str, name: str, inside: SandboxRoot, kills: int | None) -> None:
        """Until the service has ended for good, or its state with it."""
        said = self.composition.services[name]
        probing = asyncio.ensure_future(self._probe_on(program, name, said.healthcheck))
        try:
            status = await self._ended(program)
        finally:
            probing.cancel()
        if (row := self._current(program)) is None or self._live.container.held_root is not inside:
            return
        if status is None:  # what held its output was killed
            if not self._live.container.alive:
                return
            status = signal.SIGKILL
        oom_killed = (self._oom_kills(name) or 0) > (kills or 0)
        await self._note(row, exit_status=status, ended_at=time.time(), oom_killed=oom_killed)
        await self._end_rest(name)
        pause = pause_before_restart(said, row, exit_code(status), time.time() - row.started_at)
        if pause is None:
            if said.remove_at_end:
                await self._live.added.remove_ended(name, program)
            return
        await asyncio.sleep(pause)
        row = self._current(program)
        if row is None or row.stopped or self.row(name) is not row:
            return
        restarts = 0 if pause == FIRST_PAUSE and row.restarts else row.restarts
        with contextlib.suppress(PagurusError):  # the sandbox has ended meanwhile, or the program is gone
            async with self._live.using(used=False):
                await self._start(name, restarts=restarts + 1)

    async def _ended(self, program: str) -> int | None:
        """Its wait status once it has ended; None when it went with its sandbox."""
        try:
            return (await (await self._live.programs.supervisor(program)).wait(Until.EXIT)).exit_status
        except PagurusError:
            return None

    def _current(self, program: str) -> ProgramRow | None:
        if self._live.row.state is not SandboxState.RUNNING:
            return None
        return self._live.row.programs.get(program)

    async def _note(self, row: ProgramRow, **changed: object) -> None:
        """Remember something of a program, and wake those who wait for it."""
        if (now := self._live.row.programs.get(row.id)) is not None:
            self._live.programs.put(msgspec.structs.replace(now, **changed))
            self._live.services.catalogue.later([put_sandbox(self._live.row)])
        async with self._changed:
            self._changed.notify_all()

    # ----------------------------------------------------------------- health

    async def _probe_on(self, program: str, name: str, probe: Probe | None) -> None:
        """Ask a service for its health at its interval, once it is well only while the sandbox is in use."""
        if probe is None or not probe.test:
            return
        failures, began, last = 0, time.monotonic(), 0.0
        while (row := self._current(program)) is not None and row.exit_status is None:
            starting = row.health is ServiceHealth.STARTING
            early = starting and time.monotonic() - began < probe.start_period
            if last:
                await asyncio.sleep(probe.start_interval if early else probe.interval)
            if not starting and self._live.used_at <= last:
                continue
            last = time.time()
            answer = await self._check_health(name, probe)
            if answer is None:
                continue
            healthy, said = answer
            if healthy:
                failures = 0
            elif not early:
                failures += 1
            now = ServiceHealth.HEALTHY if healthy else row.health
            if failures >= probe.retries:
                now = ServiceHealth.UNHEALTHY
            if now is not row.health or said != row.error:
                await self._note(row, health=now, error="" if healthy else said)

    async def _check_health(self, name: str, probe: Probe) -> tuple[bool, str] | None:
        """Whether a health check succeeds, and what it says; None: it could not be checked."""
        live = self._live
        try:
            async with live.using(used=False):
                at = place(live.row, name)
                user = await live.user(None, at)
                done = await live.container.exec(
                    probe.test,
                    env={"HOME": user.home, **at.env},
                    cwd=at.workdir,
                    uid=user.uid,
                    gid=user.gid,
                    groups=user.groups,
                    root=at.root,
                    timeout=probe.timeout or None,
                    output_limit=SAID,
                )
        except CommandNotFound as error:
            return False, error.message
        except PagurusError:
            return None
        said = (done.stdout + done.stderr).decode("utf-8", "replace").strip()[-SAID:]
        return done.exit_code == 0, said or f"exit code {done.exit_code}" + " (timed out)" * done.timed_out

    # ----------------------------------------------------------------- parts

    async def _bring_up(self, composition: Composition, names: Sequence[str], *, wait: bool) -> None:
        needed = {
            other
            for name in names
            for other, dependency in composition.services[name].depends_on.items()
            if dependency.condition is Condition.HEALTHY
        }
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(self._bring_one(composition, name, names))
        for name in names:
            said = composition.services[name]
            if wait or name in needed:
                await self._until(name, Condition.HEALTHY if _has_check(said) else Condition.STARTED)

    async def _bring_one(self, composition: Composition, name: str, names: Collection[str]) -> None:
        for other, dependency in composition.services[name].depends_on.items():
            if other not in names:
                continue
            try:
                await self._until(other, dependency.condition)
            except PagurusError:
                if dependency.required:
                    raise
        row = self.row(name)
        if row is None or row.exit_status is not None:
            await self._start(name)

    def _is_up(self, name: str, said: Service) -> bool:
        row = self.row(name)
        return row is not None and (not _has_check(said) or row.health is ServiceHealth.HEALTHY)

    async def _until(self, name: str, condition: Condition) -> None:
        """Wait for the state of a service that others need. Raises Conflict when it cannot be reached any more."""
        while True:
            row = self.row(name)
            if row is not None and row.pid:
                reached = has_reached(row, condition, restarts=row.id in self._watched)
                if reached:
                    return
                if reached is None:
                    how = f"is unhealthy: {row.error}"
                    if row.exit_status is not None:
                        how = f"ended with {exit_code(row.exit_status)}: {await self._last_words(row)}"
                    raise Conflict(f"service {name} {how}", hint="look at its log", sandbox=self._live.row.id)
            await self.changed()

    async def _last_words(self, row: ProgramRow) -> str:
        with contextlib.suppress(PagurusError):
            logs = await self._live.programs.logs(row.id, (0, 0))
            return (logs.stderr or logs.stdout).decode("utf-8", "replace").strip()[-SAID:]
        return ""

    async def _start(self, name: str, *, restarts: int = 0) -> None:
        """Start a service. Behind the gate."""
        live, said = self._live, self.composition.services[name]
        argv = [*(said.entrypoint or []), *(said.command or [])]
        await asyncio.to_thread(self._empty, name, said)
        former, kills = self.row(name), self._oom_kills(name)
        health = ServiceHealth.STARTING if _has_check(said) else ServiceHealth.NONE
        request = ProcessRequest(command=argv, service=name)
        try:
            row = await live.programs.launch(
                ProgramKind.SERVICE,
                argv,
                request,
                stdin=said.stdin_open or said.tty,
                terminal=said.tty,
                log_limit=LOG_LIMIT,
                service={"health": health, "restarts": restarts},
            )
        except PagurusError as error:
            error.message = f"service {name} cannot be started: {error.message}"
            raise
        if former is not None:
            await live.programs.remove(former.id)
        self._watch(row, kills)

    def _empty(self, name: str, said: Service) -> None:
        """Its tmpfs directories are empty whenever it starts. Blocks."""
        inside, base = self._live.container.inside.below(services.root(name)), self._live.row.uid_base
        for target in said.tmpfs:
            with contextlib.suppress(NotFound, Invalid):
                for entry in files.entries(inside, base, target):
                    files.remove(inside, base, f"{target}/{entry.name}", recursive=True)

    async def _stop(self, name: str, timeout: float | None) -> None:
        said, row = self.composition.services[name], self.row(name)
        if row is None or row.exit_status is not None:
            if row is not None:
                await self._note(row, stopped=True)
            return
        await self._note(row, stopped=True)
        with contextlib.suppress(SupervisorGone):
            supervisor = await self._live.programs.supervisor(row.id)
            await supervisor.signal(said.stop_signal or signal.SIGTERM, group=False)
            try:
                async with asyncio.timeout(said.stop_grace_period if timeout is None else timeout):
                    await supervisor.wait(Until.EXIT)
            except TimeoutError:
                await supervisor.signal(signal.SIGKILL)
            state = await supervisor.wait(Until.EXIT)
            await self._note(row, exit_status=state.exit_status, ended_at=time.time())
        await self._end_rest(name)

    async def _end_rest(self, name: str) -> None:
        """Kill what runs in the root of a service whose program has ended, as its container's end does in Docker."""
        with contextlib.suppress(PagurusError):
            await asyncio.to_thread(rooted.kill, self._live.container.tasks, name)


def _first(errors: BaseExceptionGroup) -> PagurusError:
    """One of several errors, however deep."""
    error = errors.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return _first(error)
    return error if isinstance(error, PagurusError) else PagurusError(str(error))


def _has_check(said: Service) -> bool:
    return said.healthcheck is not None and bool(said.healthcheck.test)
