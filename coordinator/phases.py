"""Jobs take turns on machines: who may roll out, who may train, also across deaths of this process.

Owns: seats (who shares, whose phase goes on), the groups that follow from them. Does not own: whose turn it is
(coordinator.decide.turns), who shares with whom (coordinator.decide.multiplex), the processes of a job.
Guarantee: a phase begins once, and that is on disk before its job hears of it; phases of a job follow one another, and
one that goes on is not taken away by a death of this process. A job that is silent for `TTL` is passed over until it
asks again; after `GONE` its room is others', and it comes back as a new one.

::

    rollout of a run ──ask(rollout, n)──▶ ends (train, n-1) ┐
    trainer of a run ──ask(train, n)────▶ ends (rollout, n) ┴▶ due? ─▶ begun, on disk ─▶ answer
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec

from coordinator.decide import multiplex
from coordinator.decide.multiplex import GroupMember, JobGroup, Prices, SharedJob
from coordinator.decide.turns import MachineSlot, TurnsView, due
from coordinator.jobs.keeper import parse_needs
from coordinator.state import CoordinatorState
from sandbox.errors import Invalid, TooMany, Unsupported
from sandbox.messages.cluster import PastPhase, PhaseAnswer, PhaseAsk, PhaseInfo, PhaseKind

TTL = 90.0  # seconds: processes that give way to others on a busy machine may say nothing for one minute
GONE = 3600.0  # seconds: a run that was killed for good leaves nothing behind
LATE = 30.0  # seconds for which a word may be under way
POLL_INTERVAL = 1.0  # seconds between two looks for silent jobs
SEATS = 64  # jobs of one owner that take turns, or wait for room
MAX_PAST = 10_000  # phases that are told at once
KINDS: tuple[PhaseKind, PhaseKind] = ("rollout", "train")
PAST = """SELECT job, phase, party, machines, asked, begun, ended, silent FROM phases WHERE machines IS NOT NULL
    ORDER BY begun DESC LIMIT ?"""
LASTED = "(coalesce(ended, ?) - begun) * json_array_length(coalesce(machines, '[]'))"  # machine-seconds
USED = f"""SELECT job, max(phase), max(ended), sum({LASTED} * (phase % 2 = 0)), sum({LASTED} * (phase % 2))
    FROM phases GROUP BY job"""
NO_ROOM = "the machines have no room for it beside those that share them"


Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class SharedCapacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What there is to share, as `--share` says."""

    rollout: Amount = 0  # machines
    train: Amount = 0
    rollout_gb: Amount = 1024.0  # host memory of each
    train_gb: Amount = 1024.0
    rollout_price: Amount = 0  # of an hour of each
    train_price: Amount = 0

    @property
    def prices(self) -> Prices:
        return Prices(rollout_gb=self.rollout_gb, train_gb=self.train_gb)

    def cost(self, rollout: float, train: float) -> float | None:
        """Of so many machine-hours; None where they have no prices."""
        if not self.rollout_price and not self.train_price:
            return None
        return rollout * self.rollout_price + train * self.train_price


class JobSlot(msgspec.Struct, kw_only=True):
    """A job, and the phase that it asked for last. Phase ``2 n`` is rollout n, ``2 n + 1`` is training n."""

    job: SharedJob
    number: int  # the order in which jobs came
    phase: int
    shift: int = 0  # rounds of the group when it came, less its own number then
    state: Literal["begun", "waiting", "lost"] = "waiting"  # lost: it was silent, and has not asked since
    asked: float = 0.0
    begun: float = 0.0
    group: int | None = None
    nodes: tuple[int, ...] = ()

    @property
    def kind(self) -> PhaseKind:
        return KINDS[self.phase % 2]

    def round(self, kind: PhaseKind) -> int:
        """Turns of this kind before the next one."""
        number, past = divmod(self.phase, 2)
        begun = self.state == "begun" and self.kind == kind
        return self.shift + number + (begun or (kind == "rollout" and bool(past)))

    def machines(self, kind: PhaseKind) -> tuple[int, ...]:
        """For whose turn it is: the training machines of a group count as one."""
        return self.nodes if kind == "rollout" else (0,)

    @property
    def works_on(self) -> list[int]:
        """All machines of its phase."""
        return list(self.nodes if self.kind == "rollout" else range(self.job.train_nodes))


class PhaseScheduler:
    """``answer = await phases.ask(ask)``. From one event loop."""

    def __init__(
        self,
        state: CoordinatorState,
        shared: SharedCapacity,
        *,
        ttl: float = TTL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shared, self.ttl = shared, ttl
        self._state, self._clock = state, clock
        rows = [msgspec.msgpack.decode(row, type=JobSlot) for row in state.seats.values()]
        self.seats = {seat.job.name: seat for seat in sorted(rows, key=lambda seat: seat.number)}
        self._heard = dict.fromkeys(self.seats, clock())  # nobody could be heard while there was no coordinator
        self._left: dict[str, tuple[int, float]] = {}  # the last phase of who has left; until when that is asked for
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._decided: list[tuple[TurnsView, list[str]]] = []
        self._saving, self._changed = asyncio.Lock(), asyncio.Condition()

    async def run(self) -> None:
        """Passes over who is silent, for as long as the coordinator lives."""
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            await self.look()

    async def look(self) -> None:
        """Whose turn it is by now."""
        now = self._clock()
        self._left = {job: (phase, until) for job, (phase, until) in self._left.items() if now < until}
        for seat in list(self.seats.values()):
            silent = now - self._heard[seat.job.name]
            if seat.state == "lost" and silent > GONE:
                self._remove(seat)
            elif seat.state != "lost" and silent > self.ttl:
                self._end(seat, silent=silent)
                seat.state = "lost"
                self._keep(seat)
        self._begin()
        await self._tell()

    # ----------------------------------------------------------------- asked by runs

    async def ask(self, ask: PhaseAsk) -> PhaseAnswer:
        if not self.shared.rollout or not self.shared.train:
            raise Unsupported("no machines are shared here", hint="pagurus cluster up --share rollout=1,train=1")
        phase = 2 * ask.number + KINDS.index(ask.kind)
        left, until = self._left.get(ask.job, (-1, 0.0))
        if phase <= left and self._clock() < until:
            return PhaseAnswer(state="past")  # said before it left, heard after
        seat = self._seat(ask, phase)
        if phase > seat.phase or (phase == seat.phase and seat.state == "lost"):
            self._next(seat, phase)
        self._begin()
        await self._tell()
        await self._until(lambda: seat.phase != phase or seat.state == "begun", ask.wait)
        await self._save()  # what another call has begun for us may not be on disk yet
        if seat.phase != phase or self.seats.get(ask.job) is not seat:
            return PhaseAnswer(state="past")
        self._heard[ask.job] = self._clock()
        if seat.state == "begun":
            return PhaseAnswer(state="begun")
        return PhaseAnswer(state="waiting", reason=self._why(seat))

    async def leave(self, job: str) -> None:
        """Its machines are others'. Idempotent."""
        seat = self.seats.get(job)
        if seat is None:
            return
        self._left[job] = seat.phase, self._clock() + LATE
        self._remove(seat)
        self._begin()
        await self._tell()

    def _remove(self, seat: JobSlot) -> None:
        job = seat.job.name
        self._end(seat)
        del self.seats[job], self._heard[job]
        self._pending.append(("DELETE FROM seats WHERE job = ?", (job,)))
        if seat.group is not None:
            self._regroup(multiplex.leave(self._group(self._members(seat.group, seat)), job))
        self._place()

    async def all(self) -> list[PhaseInfo]:
        """Who takes turns; then who has left and is still known."""
        now = time.time()
        used = {job: told for job, *told in await self._state.read(USED, (now, now))}
        found = [self._info(seat) for seat in self.seats.values()]
        for job in used.keys() - self.seats.keys():
            phase, ended = used[job][:2]
            left = PhaseInfo(job=job, kind=KINDS[phase % 2], number=phase // 2, state="left", since=ended or 0.0)
            found.append(left)
        for info in found:
            rollout, train = (seconds / 3600 for seconds in used.get(info.job, (0, 0, 0.0, 0.0))[2:])
            info.rollout_hours, info.train_hours, info.cost = rollout, train, self.shared.cost(rollout, train)
        return found

    def _info(self, seat: JobSlot) -> PhaseInfo:
        return PhaseInfo(
            job=seat.job.name,
            kind=seat.kind,
            number=seat.phase // 2,
            state="silent" if seat.state == "lost" else seat.state,
            reason="" if seat.state == "begun" else self._why(seat),
            group=seat.group,
            since=seat.begun if seat.state == "begun" else seat.asked,
        )

    async def past(self) -> list[PastPhase]:
        """The newest phases that have begun, and those that wait for their turn."""
        waiting = [
            PastPhase(
                job=seat.job.name,
                kind=seat.kind,
                number=seat.phase // 2,
                group=seat.group,
                machines=seat.works_on,
                asked=seat.asked,
            )
            for seat in self.seats.values()
            if seat.state == "waiting" and seat.group is not None
        ]
        return waiting + [
            PastPhase(
                job=job,
                kind=KINDS[phase % 2],
                number=phase // 2,
                group=party,
                machines=msgspec.json.decode(machines),
                asked=asked,
                begun=begun,
                ended=ended,
                silent=silent,
            )
            for job, phase, party, machines, asked, begun, ended, silent in await self._state.read(PAST, (MAX_PAST,))
        ]

    # ----------------------------------------------------------------- turns

    def _begin(self) -> None:
        for group in sorted({seat.group for seat in self.seats.values() if seat.group is not None}):
            for kind in KINDS:
                view = self._view(self._members(group), kind)
                begins = due(view.turns, view.busy)
                for job in begins:
                    seat = self.seats[job]
                    seat.state, seat.begun = "begun", time.time()
                    # Another row for it would be a phase that runs twice, unless its job was lost in between.
                    self._pending.append(
                        (
                            "INSERT INTO phases (job, phase, asked, begun, party, machines) VALUES (?, ?, ?, ?, ?, ?)",
                            (
                                job,
                                seat.phase,
                                seat.asked,
                                seat.begun,
                                group,
                                str(seat.works_on),
                            ),
                        )
                    )
                    self._keep(seat)
                if begins:
                    self._decided.append((view, begins))

    @staticmethod
    def _view(members: Iterable[JobSlot], kind: PhaseKind) -> TurnsView:
        """Without jobs that are silent."""
        turns, busy = list[MachineSlot](), list[int]()
        for seat in members:
            if seat.state == "lost":
                continue
            asks = seat.state == "waiting" and seat.kind == kind
            turns.append(MachineSlot(seat.job.name, seat.round(kind), seat.number, seat.machines(kind), asks))
            if seat.state == "begun" and seat.kind == kind:
                busy += seat.machines(kind)
        return TurnsView(turns=turns, busy=sorted(busy))

    def _next(self, seat: JobSlot, phase: int) -> None:
        """It asks for this phase. One that was passed over goes on in the round in which the others are, maybe by
        another turn for the same phase."""
        if phase > seat.phase:
            self._end(seat)
        else:
            self._pending.append(("DELETE FROM phases WHERE job = ? AND phase = ?", (seat.job.name, phase)))
        lost = seat.state == "lost"
        seat.phase, seat.state, seat.asked = phase, "waiting", time.time()
        if lost:
            seat.shift = max(seat.shift, self._round(seat) - phase // 2)
        self._keep(seat)

    def _end(self, seat: JobSlot, *, silent: float = 0.0) -> None:
        """One that was passed over ended then: others have its machines since."""
        if seat.state == "begun":
            change = "UPDATE phases SET ended = ?, silent = ? WHERE job = ? AND phase = ?"
            self._pending.append((change, (time.time(), silent, seat.job.name, seat.phase)))

    def _round(self, but: JobSlot) -> int:
        """Whose end the others of its group have not reached yet: who comes now is the last in it."""
        others = [each for each in self._members(but.group) if each is not but and each.state != "lost"]
        return max((each.round("rollout") - 1 for each in others), default=0)

    # ----------------------------------------------------------------- groups

    def _seat(self, ask: PhaseAsk, phase: int) -> JobSlot:
        seat = self.seats.get(ask.job)
        if seat is None:
            owner = _owner(ask.job)
            if sum(_owner(name) == owner for name in self.seats) >= SEATS:
                raise TooMany(f"{SEATS} jobs of this owner take turns, or wait for room", hint="wait until one ends")
            job = msgspec.convert({"name": ask.job, **msgspec.structs.asdict(ask.shape)}, SharedJob)
            number = max((each.number for each in self.seats.values()), default=-1) + 1
            seat = self.seats[ask.job] = JobSlot(job=job, number=number, phase=phase, asked=time.time())
            self._pending.append(("DELETE FROM phases WHERE job = ?", (ask.job,)))  # of when it was here before
            self._keep(seat)
            self._place()
        self._heard[ask.job] = self._clock()
        return seat

    def _place(self) -> None:
        """Gives who waits for machines a group, in the order in which they came."""
        for seat in self.seats.values():
            if seat.group is not None or not multiplex.fits_alone(seat.job, self.shared.prices):
                continue
            groups = {each.group: self._group(self._members(each.group)) for each in self.seats.values()}
            groups.pop(None, None)
            numbers = [number for number in groups if number is not None]
            found = multiplex.place([groups[number] for number in numbers], seat.job, self.shared.prices)
            number = max(numbers, default=-1) + 1 if found.index is None else numbers[found.index]
            after = [*(group for key, group in groups.items() if key != number), found.group]
            if (
                sum(group.rollout_nodes for group in after) > self.shared.rollout
                or sum(group.train_nodes for group in after) > self.shared.train
            ):
                continue
            seat.group = number
            seat.shift = self._round(seat) - seat.phase // 2
            self._regroup(found.group)

    def _regroup(self, group: JobGroup | None) -> None:
        for member in () if group is None else group.members:
            seat = self.seats[member.job.name]
            seat.nodes = member.nodes
            self._keep(seat)

    def _members(self, group: int | None, *more: JobSlot) -> list[JobSlot]:
        found = [seat for seat in self.seats.values() if seat.group == group and group is not None]
        return sorted([*found, *more], key=lambda seat: seat.number)

    @staticmethod
    def _group(members: Iterable[JobSlot]) -> JobGroup:
        seats = list(members)
        return JobGroup(
            members=tuple(GroupMember(seat.job, seat.nodes) for seat in seats),
            rollout_nodes=1 + max((node for seat in seats for node in seat.nodes), default=-1),
            train_nodes=max((seat.job.train_nodes for seat in seats), default=0),
        )

    def _why(self, seat: JobSlot) -> str:
        if seat.group is None:
            return NO_ROOM
        for each in self._members(seat.group):
            if each.state == "begun" and each.kind == seat.kind:
                ours = _owner(each.job.name) == _owner(seat.job.name)
                return f"{each.job.name if ours else 'a job of another owner'} works there"
        return "others come first"

    # ----------------------------------------------------------------- books

    def _keep(self, seat: JobSlot) -> None:
        row = msgspec.msgpack.encode(seat)
        self._pending.append(("INSERT OR REPLACE INTO seats VALUES (?, ?)", (seat.job.name, row)))

    async def _save(self) -> None:
        """All that was decided so far is on disk when this returns."""
        async with self._saving:
            changes, self._pending = self._pending, []
            decided, self._decided = self._decided, []
            try:
                if changes:
                    await self._state.all_or_none(changes)
            except BaseException:
                self._pending[:0] = changes
                raise
            for view, begins in decided:
                await self._state.decided("turns", view, begins)

    async def _tell(self) -> None:
        await self._save()
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)


def _owner(job: str) -> str:
    """As the routes put it before the job's own name."""
    return job.partition(":")[0] if ":" in job else ""


def parse_share(text: str | None) -> SharedCapacity:
    """Of ``rollout=1,train=1``, also ``rollout_gb`` and ``train_gb``. Raises Invalid."""
    try:
        return SharedCapacity() if text is None else msgspec.convert(parse_needs(text), SharedCapacity)
    except msgspec.ValidationError as error:
        raise Invalid(f"--share {text}: {error}", hint="write it like rollout=1,train=1") from None
