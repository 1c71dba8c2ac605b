"""The turn loop of one sandbox: command, effects, verdict, checkpoint.

::

    exec ─▶ enter ─▶ command ─▶ effects ─▶ judge ─▶ answer (verdict, checkpoint id)
             ▲ waits                          │ files | processes | both
             │                                ▼
             └────── captured ◀── engine ◀── flight ──▶ durable       (the model thinks during this)

Guarantee (I2): `enter` returns only when the last turn is captured (or durable, where the sandbox
requires it), for every caller. A turn is answered at once; what its checkpoint failed to capture is
left to the next one, and the next answer says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from daemon import metrics, states
from daemon.catalogue import SandboxRow, put_checkpoint, put_sandbox, put_turn
from daemon.checkpoints.inflight import InFlight, Services
from daemon.turns.added import AddedServices
from daemon.turns.captures import Captures
from daemon.turns.place import Place, located, place
from daemon.turns.programs import Programs
from daemon.turns.services import ServiceControl
from daemon.turns.sessions import ShellSessions
from daemon.verdict.assess import Assessor, FileTrees
from daemon.verdict.explain import by_api
from daemon.verdict.ignore import checked
from daemon.verdict.judge import Judgement
from sandbox.container import users
from sandbox.container.outlet import Outlet
from sandbox.container.process import RunningCommand
from sandbox.errors import Conflict, Invalid, NotFound
from sandbox.messages import (
    Effects,
    ExecRequest,
    ExecResult,
    SandboxState,
    TurnInfo,
    Verdict,
)

if TYPE_CHECKING:
    from sandbox.container.container import Container
    from sandbox.tree.safe_path import SandboxRoot

log = logging.getLogger("pagurus.turns")

COMMAND_RETAINED = 200  # characters of a command that the catalogue keeps


class OpenTurn:
    """Several acts that are one turn."""

    def __init__(self) -> None:
        self.started = time.time()
        self.result: ExecResult | None = None  # once it has ended


class SandboxAct:
    """What is done in a sandbox, from the gate to its result."""

    result: ExecResult


class LiveSandbox:
    """One sandbox and what happens in it."""

    def __init__(self, row: SandboxRow, container: Container | None, services: Services) -> None:
        self.row = row
        self.container_or_none = container  # none: all its processes are gone
        self.services = services
        self.exclusive = asyncio.Lock()  # restore, removal
        self.held = False  # it is frozen and leaving this host
        self.active = 0  # commands and writes under way
        self.attached = 0  # terminals, streams and turns of several acts that clients have open
        self.used_at = time.time()  # when the last call began or ended
        self.group: OpenTurn | None = None
        self.commands: dict[str, RunningCommand | None] = {}  # those under way, by their key; None: not started yet
        self.programs = Programs(self)
        self.composed = ServiceControl(self)
        self.added = AddedServices(self)
        self.sessions = ShellSessions(self, self.programs)
        self._ending = asyncio.Lock()
        self._assessor = Assessor()
        self._answered_at: float | None = None
        self.captures = Captures(self)

    # ----------------------------------------------------------------- the gate

    @contextlib.asynccontextmanager
    async def using(self, *, acting: bool = True, used: bool = True) -> AsyncIterator[None]:
        """Living processes are needed, and the state before is captured. Raises if there are none.

        `acting`: something of the host's may change the sandbox during it. `used`: for a client that uses the sandbox.
        """
        self.step(states.Event.USE)
        await self.captures.finalized()
        self.step(states.Event.USE)
        self._need_here()
        self.active += acting
        try:
            yield
        finally:
            self.active -= acting
            if used:
                self.touch()

    def _need_here(self) -> None:
        if self.held:
            raise Conflict("it is leaving this host", hint="ask the cluster", sandbox=self.row.id)

    def touch(self) -> None:
        """It is used: its idle time starts again."""
        self.used_at = time.time()

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """A client has a terminal or a connection open: its time does not end."""
        self.attached += 1
        try:
            yield
        finally:
            self.attached -= 1
            self.touch()

    def step(self, event: states.Event) -> None:
        """Move to the state that follows `event`, or raise why that is not possible."""
        self.row.state = states.after(self.row.state, event, sandbox=self.row.id, turn=self.row.turn)

    # ----------------------------------------------------------------- a turn

    async def exec(self, request: ExecRequest, outlet: Outlet | None = None) -> ExecResult:
        """Run a command; when it ends the turn, judge it and begin its checkpoint. An `outlet` gets its output."""

        with self._keyed(request.key):
            async with self.act(request.command, ends_turn=request.ends_turn) as act:
                act.result = await self._run(request, outlet)
            return act.result

    @contextlib.contextmanager
    def _keyed(self, key: str | None) -> Iterator[None]:
        """Within it a command is known by its key, if it has one. Raises Conflict for one that is in use."""
        if key is None:
            yield
            return
        if key in self.commands:
            raise Conflict("a command of this key is under way", hint="use a new key for a new command")
        self.commands[key] = None
        try:
            yield
        finally:
            del self.commands[key]

    async def _run(self, request: ExecRequest, outlet: Outlet | None) -> ExecResult:
        if outlet is not None:
            outlet.need_reader()
        argv = request.command if isinstance(request.command, list) else ["/bin/sh", "-c", request.command]
        at = place(self.row, request.service)
        user = await self.user(request.user, at)
        return await self.container.exec(
            argv,
            env={"HOME": user.home, **at.env, **request.env},
            cwd=request.cwd or at.workdir,
            root=at.root,
            uid=user.uid,
            gid=user.gid,
            groups=user.groups,
            stdin=request.stdin,
            timeout=request.timeout,
            output_limit=request.output_limit,
            outlet=outlet,
            on_start=None if request.key is None else partial(self.commands.__setitem__, request.key),
        )

    async def signal(self, key: str, number: int, *, group: bool) -> None:
        """Send a signal to the command of this key. Raises NotFound unless it runs."""
        async with self.using():
            command = self.commands.get(key)
            if command is None or not await command.signal(number, group=group):
                raise NotFound("no command of this key runs", hint="it has ended, or not begun", sandbox=self.row.id)

    @contextlib.asynccontextmanager
    async def act(
        self, what: str | list[str], *, ends_turn: bool, finalize: Callable[[ExecResult], None] | None = None
    ) -> AsyncIterator[SandboxAct]:
        """What is done in the sandbox within runs behind the gate, and ends the turn unless it is one of several.

        The caller sets the result, which is judged when the block has ended. `finalize` gets the judged one before it
        is published: its row changes are committed together.
        """
        act = SandboxAct()
        arrived = time.monotonic()
        if self._answered_at is not None:
            self.captures.thought(arrived - self._answered_at)
        async with self.using():
            started, clock = time.time(), time.monotonic()
            yield act
        result = act.result
        result.waited_ms = 1000 * (clock - arrived)
        self.services.exposed.append(result.waited_ms)
        metrics.command(result.duration, result.waited_ms / 1000)
        if self.row.state is SandboxState.RESTORING:  # it ended with the processes that are being replaced
            raise states.refusal(SandboxState.DEAD, states.Event.USE, sandbox=self.row.id, turn=self.row.turn)
        self.need_alive()
        if ends_turn and self.group is None:
            await self._end_turn(what, result, started, finalize)
        elif finalize is not None:
            finalize(result)
            self.services.catalogue.later([put_sandbox(self.row)])
        self._answered_at = time.monotonic()

    @property
    def root(self) -> SandboxRoot:
        """The root of what calls mean that name no service: of the sandbox, or of the main service."""
        return self.container.inside.below(place(self.row, None).root)

    def located(self, service: str | None, path: str) -> tuple[SandboxRoot, str]:
        """The root below which the host finds a path of a service (None: the main one), and the path from there."""
        directory, inner = located(self.row, place(self.row, service), path)
        return self.container.inside.below(directory), inner

    async def user(self, who: int | str | None, at: Place | None = None) -> users.User:
        """A user of the place's own /etc/passwd; None: its default user. Raises Invalid for who is not in it."""
        at = at or place(self.row, None)
        target = (at.user or 0) if who is None else who
        self.need_alive()
        try:
            return await asyncio.to_thread(users.find, self.container.inside.below(at.root), target)
        except Invalid as error:
            if who is not None:
                raise
            raise Invalid(
                f"the default user of this sandbox: {error.message}",
                hint="say another user for the command, for the sandbox, or as USER of its image",
            ) from error

    async def end_turn_by_request(self, what: str) -> ExecResult:
        """End the turn because the agent asks its model: what its commands left is judged, and captured if need be.

        Returns turn, verdict and checkpoint. `what` stands for the command in the list of turns.
        """
        self.step(states.Event.USE)
        ended = ExecResult(exit_code=0, stdout=b"", stderr=b"", duration=0.0)
        await self._end_turn(what, ended, time.time())
        return ended

    @contextlib.asynccontextmanager
    async def grouped(self) -> AsyncIterator[OpenTurn]:
        """All acts within are one turn. It ends with the block, however that ends."""
        if self.group is not None:
            raise Conflict("a turn of several acts is open already", hint="end it first", sandbox=self.row.id)
        self.step(states.Event.USE)
        self.group = group = OpenTurn()
        self.attached += 1
        try:
            yield group
        finally:
            self.group = None
            self.attached -= 1
            self.touch()
            group.result = ExecResult(exit_code=0, stdout=b"", stderr=b"", duration=time.time() - group.started)
            await asyncio.shield(self._end_turn("(several acts)", group.result, group.started))

    async def _end_turn(
        self,
        what: str | list[str],
        result: ExecResult,
        started: float,
        finalize: Callable[[ExecResult], None] | None = None,
    ) -> None:
        overlap = self._ending.locked() or self.captures.inflight is not None
        async with self._ending:
            if overlap:  # only when commands do
                await self.captures.finalized()
                self.need_alive()
            clock = time.monotonic()
            effects, judgement = await self.judged()
            result.verdict_ms = 1000 * (time.monotonic() - clock)
            self.row.turn += 1
            result.turn, result.verdict, result.reason = self.row.turn, judgement.verdict, judgement.reason
            result.effects = effects
            result.checkpoint_error = self.captures.reported_failure()
            tally = self.services.tally
            tally.turns += 1
            tally.verdicts[judgement.verdict.value] += 1
            if judgement.verdict is Verdict.NONE:
                head = self.services.checkpoints[self.row.head]
                tally.full_bytes += head.dump_bytes + head.files_bytes
                result.checkpoint = head.id
                if finalize is not None:
                    finalize(result)
                self._log_end(result)
                self.services.catalogue.later([put_sandbox(self.row), put_turn(self._turn(what, result, started))])
                return
            row = self.services.new_checkpoint(self.row, judgement.verdict)
            row.ipc, result.checkpoint = _ipc(effects), row.id
            if finalize is not None:
                finalize(result)
            self._log_end(result)
            inflight = self.captures.resume(row)
            await self.services.catalogue.write(
                [put_checkpoint(inflight.row), put_sandbox(self.row), put_turn(self._turn(what, result, started))]
            )

    def _log_end(self, result: ExecResult) -> None:
        existing = {"sandbox": self.row.id, "turn": result.turn, "checkpoint": result.checkpoint}
        log.debug("turn ended: %s, %s", result.verdict, result.reason, extra=existing)

    def _turn(self, what: str | list[str], result: ExecResult, started: float) -> TurnInfo:
        command = what if isinstance(what, str) else " ".join(what)
        return TurnInfo(
            sandbox=self.row.id,
            turn=self.row.turn,
            command=command[:COMMAND_RETAINED],
            started_at=started,
            duration=result.duration,
            exit_code=result.exit_code,
            verdict=result.verdict or Verdict.NONE,
            reason=result.reason or "",
            checkpoint=result.checkpoint,
            effects=result.effects,
        )

    async def judged(self) -> tuple[Effects, Judgement]:
        """What was done since the last checkpoint, and the verdict on it."""
        return await self._assessor.assess(
            self.services.inspector, self.container, self._trees, rules=checked(self.row.ignore), busy=self.active > 0
        )

    def _trees(self) -> FileTrees | None:
        """Where the files lie, and what the last checkpoint has of them."""
        head, tree = self.services.checkpoints.get(self.row.head), self.row.tree
        if head is None or tree is None:
            return None
        places, owner = self.services.capturer.places, self.services.checkpoints.get(head.files or "")
        return FileTrees(
            before=None if head.files is None else places.snapshot(head.files) / "upper",
            now=places.tree(tree) / "upper",
            lower=self.container.spec.image,
            taken_at=(owner.started_at or 0.0) if owner is not None else 0.0,
            held=head.held,
        )

    @property
    def container(self) -> Container:
        """Raises SandboxDead where there is none: all its processes are gone."""
        if self.container_or_none is None:
            raise states.refusal(SandboxState.DEAD, states.Event.USE, sandbox=self.row.id, turn=self.row.turn)
        return self.container_or_none

    def need_alive(self) -> None:
        """Raise unless pid 1 lives; notices a death that was not reported yet."""
        self.need_usable()
        if not self.container.alive:
            if self.row.state is SandboxState.RUNNING:
                self.step(states.Event.DIE)
                self.services.catalogue.later([put_sandbox(self.row)])
            raise states.refusal(SandboxState.DEAD, states.Event.USE, sandbox=self.row.id, turn=self.row.turn)

    def need_usable(self) -> None:
        """Raise unless it runs, as far as is known without asking the kernel."""
        states.after(self.row.state, states.Event.USE, sandbox=self.row.id, turn=self.row.turn)

    def alive(self) -> bool:
        """Whether it runs, as far as is known without asking."""
        return self.row.state is SandboxState.RUNNING and self.container_or_none is not None and self.container.alive

    @contextlib.asynccontextmanager
    async def altering(self, call: str, *paths: str) -> AsyncIterator[None]:
        """The host changes files below these, by `call` of its API. It belongs to the next turn's effects."""
        async with self.using():
            self.need_alive()
            self._taint_files(paths[0])
            try:
                yield
            finally:
                self._taint_files(paths[0])  # a checkpoint may have begun since, by a command that overlaps
            for path in paths:
                self.services.inspector.report(self.container.cgroup.id, by_api(call, path))

    def _taint_files(self, path: str) -> None:
        self.services.capturer.taint(self.container, f"host wrote {path}", files=True, processes=False)

    # ----------------------------------------------------------------- checkpoints

    async def checkpoint(self, label: str | None, *, used: bool = True) -> InFlight:
        """Begin a checkpoint of the state as it is now: a new id, and new content only if there is any."""
        async with self.using(acting=False, used=used), self._ending:  # or its own capture would take it for a command
            await self.captures.finalized()
            self.need_alive()
            effects, judgement = await self.judged()
            if judgement.verdict is not Verdict.NONE:
                inflight = self.captures.begin(judgement.verdict, label=label, ipc=_ipc(effects))
                await self.services.catalogue.write([put_checkpoint(inflight.row)])
                return inflight
            return await self.captures.same_content(label)

    async def hold(self, begin: Callable[[], None]) -> InFlight:
        """Begin a checkpoint after which nothing of the sandbox runs, and no call acts on it; `begin` just before."""
        async with self.using(acting=False), self._ending:
            await self.captures.finalized()
            self._need_here()  # another call may have held it since
            self.need_alive()
            effects, judgement = await self.judged()
            verdict, alone = judgement.verdict, set(self.container.tasks()) <= {self.container.init_pid}
            if not alone:  # what runs may continue until it is frozen, whatever it has done so far
                verdict = Verdict.of(files=verdict.files, processes=True)
            begin()
            self.held = True
            if verdict is Verdict.NONE:
                self.container.cgroup.freeze()
                return await self.captures.same_content(None)
            inflight = self.captures.begin(verdict, ipc=_ipc(effects), hold=True)
            await self.services.catalogue.write([put_checkpoint(inflight.row)])
            return inflight


def _ipc(effects: Effects) -> bool:
    """IPC objects may outlive every process: then a sandbox without processes is not fresh."""
    return effects.ipc_changes > 0 or effects.unknown or effects.overflow
