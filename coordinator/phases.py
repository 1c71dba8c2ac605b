"""Jobs take turns on machines: who may roll out, who may train, also across deaths of this process.

Guarantee: a phase begins once, and that is on disk before its job hears of it; phases of a job follow one another, and
one under way is not taken away by a death of this process. A job that is silent for `TTL` is passed over until it asks
again; after `GONE` its room is others', and it returns as a new one.

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
from sandbox.messages.cluster import PastPhase, PhaseAnswer, PhaseInfo, PhaseKind, PhaseRequest

TTL = 90.0  # seconds: processes that give way to others on a busy machine may say nothing for one minute
GONE = 3600.0  # seconds: a run that was killed for good leaves nothing behind
LATE = 30.0  # seconds for which a word may be under way
POLL_INTERVAL = 1.0  # seconds between two looks for silent jobs
SLOTS = 64  # jobs of one owner that take turns, or wait for room
MAX_PAST = 10_000  # phases that are reported at once
KINDS: tuple[PhaseKind, PhaseKind] = ("rollout", "train")
PAST = """SELECT job, phase, party, machines, requested, begun, ended, silent FROM phases WHERE machines IS NOT NULL
    ORDER BY begun DESC LIMIT ?"""
LASTED = "(coalesce(ended, ?) - begun) * json_array_length(coalesce(machines, '[]'))"  # machine-seconds
USED = f"""SELECT job, max(phase), max(ended), sum({LASTED} * (phase % 2 = 0)), sum({LASTED} * (phase % 2))
    FROM phases GROUP BY job"""
NO_CAPACITY = "the machines have no room for it next to those that share them"


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
    """A job, and the phase that it requested last. Phase ``2 n`` is rollout n, ``2 n + 1`` is training n."""

    job: SharedJob
    number: int  # the order in which jobs came
    phase: int
    shift: int = 0  # rounds of the group when it came, less its own number then
    state: Literal["begun", "waiting", "lost"] = "waiting"  # lost: it was silent, and has requested nothing since
    requested: float = 0.0
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
        rows = [msgspec.msgpack.decode(row, type=JobSlot) for row in state.slots.values()]
        self.slots = {slot.job.name: slot for slot in sorted(rows, key=lambda slot: slot.number)}
        self._last_seen = dict.fromkeys(self.slots, clock())  # nothing could be received while there was no coordinator
        self._left: dict[str, tuple[int, float]] = {}  # the last phase of each that left; until when it is valid
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._decided: list[tuple[TurnsView, list[str]]] = []
        self._saving, self._changed = asyncio.Lock(), asyncio.Condition()

    async def run(self) -> None:
        """Passes over who is silent, for as long as the coordinator lives."""
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            await self.poll()

    async def poll(self) -> None:
        """Whose turn it is by now."""
        now = self._clock()
        self._left = {job: (phase, until) for job, (phase, until) in self._left.items() if now < until}
        for slot in list(self.slots.values()):
            silent = now - self._last_seen[slot.job.name]
            if slot.state == "lost" and silent > GONE:
                self._remove(slot)
            elif slot.state != "lost" and silent > self.ttl:
                self._end(slot, silent=silent)
                slot.state = "lost"
                self._keep(slot)
        self._begin()
        await self._report()

    # ----------------------------------------------------------------- requests of runs

    async def request(self, request: PhaseRequest) -> PhaseAnswer:
        if not self.shared.rollout or not self.shared.train:
            raise Unsupported("no machines are shared here", hint="pagurus cluster up --share rollout=1,train=1")
        phase = 2 * request.number + KINDS.index(request.kind)
        left, until = self._left.get(request.job, (-1, 0.0))
        if phase <= left and self._clock() < until:
            return PhaseAnswer(state="past")  # sent before it left, received after
        slot = self._slot(request, phase)
        if phase > slot.phase or (phase == slot.phase and slot.state == "lost"):
            self._next(slot, phase)
        self._begin()
        await self._report()
        await self._until(lambda: slot.phase != phase or slot.state == "begun", request.wait)
        await self._save()  # what another call has begun for us may not be on disk yet
        if slot.phase != phase or self.slots.get(request.job) is not slot:
            return PhaseAnswer(state="past")
        self._last_seen[request.job] = self._clock()
        if slot.state == "begun":
            return PhaseAnswer(state="begun")
        return PhaseAnswer(state="waiting", reason=self._why(slot))

    async def leave(self, job: str) -> None:
        """Its machines are others'. Idempotent."""
        slot = self.slots.get(job)
        if slot is None:
            return
        self._left[job] = slot.phase, self._clock() + LATE
        self._remove(slot)
        self._begin()
        await self._report()

    def _remove(self, slot: JobSlot) -> None:
        job = slot.job.name
        self._end(slot)
        del self.slots[job], self._last_seen[job]
        self._pending.append(("DELETE FROM seats WHERE job = ?", (job,)))
        if slot.group is not None:
            self._regroup(multiplex.leave(self._group(self._members(slot.group, slot)), job))
        self._place()

    async def all(self) -> list[PhaseInfo]:
        """Who takes turns; then who has left and is still known."""
        now = time.time()
        used = {job: reported for job, *reported in await self._state.read(USED, (now, now))}
        result = [self._info(slot) for slot in self.slots.values()]
        for job in used.keys() - self.slots.keys():
            phase, ended = used[job][:2]
            left = PhaseInfo(job=job, kind=KINDS[phase % 2], number=phase // 2, state="left", since=ended or 0.0)
            result.append(left)
        for info in result:
            rollout, train = (seconds / 3600 for seconds in used.get(info.job, (0, 0, 0.0, 0.0))[2:])
            info.rollout_hours, info.train_hours, info.cost = rollout, train, self.shared.cost(rollout, train)
        return result

    def _info(self, slot: JobSlot) -> PhaseInfo:
        return PhaseInfo(
            job=slot.job.name,
            kind=slot.kind,
            number=slot.phase // 2,
            state="silent" if slot.state == "lost" else slot.state,
            reason="" if slot.state == "begun" else self._why(slot),
            group=slot.group,
            since=slot.begun if slot.state == "begun" else slot.requested,
        )

    async def past(self) -> list[PastPhase]:
        """The newest phases that have begun, and those that wait for their turn."""
        waiting = [
            PastPhase(
                job=slot.job.name,
                kind=slot.kind,
                number=slot.phase // 2,
                group=slot.group,
                machines=slot.works_on,
                requested=slot.requested,
            )
            for slot in self.slots.values()
            if slot.state == "waiting" and slot.group is not None
        ]
        return waiting + [
            PastPhase(
                job=job,
                kind=KINDS[phase % 2],
                number=phase // 2,
                group=party,
                machines=msgspec.json.decode(machines),
                requested=requested,
                begun=begun,
                ended=ended,
                silent=silent,
            )
            for job, phase, party, machines, requested, begun, ended, silent in await self._state.read(
                PAST, (MAX_PAST,)
            )
        ]

    # ----------------------------------------------------------------- turns

    def _begin(self) -> None:
        for group in sorted({slot.group for slot in self.slots.values() if slot.group is not None}):
            for kind in KINDS:
                view = self._view(self._members(group), kind)
                begins = due(view.turns, view.busy)
                for job in begins:
                    slot = self.slots[job]
                    slot.state, slot.begun = "begun", time.time()
                    # Another row for it would be a phase that runs twice, unless its job was lost in between.
                    self._pending.append(
                        (
                            "INSERT INTO phases (job, phase, requested, begun, party, machines)"
                            " VALUES (?, ?, ?, ?, ?, ?)",
                            (
                                job,
                                slot.phase,
                                slot.requested,
                                slot.begun,
                                group,
                                str(slot.works_on),
                            ),
                        )
                    )
                    self._keep(slot)
                if begins:
                    self._decided.append((view, begins))

    @staticmethod
    def _view(members: Iterable[JobSlot], kind: PhaseKind) -> TurnsView:
        """Without jobs that are silent."""
        turns, busy = list[MachineSlot](), list[int]()
        for slot in members:
            if slot.state == "lost":
                continue
            requests = slot.state == "waiting" and slot.kind == kind
            turns.append(MachineSlot(slot.job.name, slot.round(kind), slot.number, slot.machines(kind), requests))
            if slot.state == "begun" and slot.kind == kind:
                busy += slot.machines(kind)
        return TurnsView(turns=turns, busy=sorted(busy))

    def _next(self, slot: JobSlot, phase: int) -> None:
        """It asks for this phase. One that was passed over continues in the round in which the others are, maybe by
        another turn for the same phase."""
        if phase > slot.phase:
            self._end(slot)
        else:
            self._pending.append(("DELETE FROM phases WHERE job = ? AND phase = ?", (slot.job.name, phase)))
        lost = slot.state == "lost"
        slot.phase, slot.state, slot.requested = phase, "waiting", time.time()
        if lost:
            slot.shift = max(slot.shift, self._round(slot) - phase // 2)
        self._keep(slot)

    def _end(self, slot: JobSlot, *, silent: float = 0.0) -> None:
        """One that was passed over ended then: others have its machines since."""
        if slot.state == "begun":
            change = "UPDATE phases SET ended = ?, silent = ? WHERE job = ? AND phase = ?"
            self._pending.append((change, (time.time(), silent, slot.job.name, slot.phase)))

    def _round(self, but: JobSlot) -> int:
        """Whose end the others of its group have not reached yet: who comes now is the last in it."""
        others = [item for item in self._members(but.group) if item is not but and item.state != "lost"]
        return max((item.round("rollout") - 1 for item in others), default=0)

    # ----------------------------------------------------------------- groups

    def _slot(self, request: PhaseRequest, phase: int) -> JobSlot:
        slot = self.slots.get(request.job)
        if slot is None:
            owner = _owner(request.job)
            if sum(_owner(name) == owner for name in self.slots) >= SLOTS:
                raise TooMany(f"{SLOTS} jobs of this owner take turns, or wait for room", hint="wait until one ends")
            job = msgspec.convert({"name": request.job, **msgspec.structs.asdict(request.shape)}, SharedJob)
            number = max((item.number for item in self.slots.values()), default=-1) + 1
            slot = self.slots[request.job] = JobSlot(job=job, number=number, phase=phase, requested=time.time())
            self._pending.append(("DELETE FROM phases WHERE job = ?", (request.job,)))  # of when it was here before
            self._keep(slot)
            self._place()
        self._last_seen[request.job] = self._clock()
        return slot

    def _place(self) -> None:
        """Gives who waits for machines a group, in the order in which they came."""
        for slot in self.slots.values():
            if slot.group is not None or not multiplex.fits_alone(slot.job, self.shared.prices):
                continue
            groups = {item.group: self._group(self._members(item.group)) for item in self.slots.values()}
            groups.pop(None, None)
            numbers = [number for number in groups if number is not None]
            result = multiplex.place([groups[number] for number in numbers], slot.job, self.shared.prices)
            number = max(numbers, default=-1) + 1 if result.index is None else numbers[result.index]
            after = [*(group for key, group in groups.items() if key != number), result.group]
            if (
                sum(group.rollout_nodes for group in after) > self.shared.rollout
                or sum(group.train_nodes for group in after) > self.shared.train
            ):
                continue
            slot.group = number
            slot.shift = self._round(slot) - slot.phase // 2
            self._regroup(result.group)

    def _regroup(self, group: JobGroup | None) -> None:
        for member in () if group is None else group.members:
            slot = self.slots[member.job.name]
            slot.nodes = member.nodes
            self._keep(slot)

    def _members(self, group: int | None, *more: JobSlot) -> list[JobSlot]:
        result = [slot for slot in self.slots.values() if slot.group == group and group is not None]
        return sorted([*result, *more], key=lambda slot: slot.number)

    @staticmethod
    def _group(members: Iterable[JobSlot]) -> JobGroup:
        slots = list(members)
        return JobGroup(
            members=tuple(GroupMember(slot.job, slot.nodes) for slot in slots),
            rollout_nodes=1 + max((node for slot in slots for node in slot.nodes), default=-1),
            train_nodes=max((slot.job.train_nodes for slot in slots), default=0),
        )

    def _why(self, slot: JobSlot) -> str:
        if slot.group is None:
            return NO_CAPACITY
        for item in self._members(slot.group):
            if item.state == "begun" and item.kind == slot.kind:
                ours = _owner(item.job.name) == _owner(slot.job.name)
                return f"{item.job.name if ours else 'a job of another owner'} works there"
        return "others come first"

    # ----------------------------------------------------------------- books

    def _keep(self, slot: JobSlot) -> None:
        row = msgspec.msgpack.encode(slot)
        self._pending.append(("INSERT OR REPLACE INTO seats VALUES (?, ?)", (slot.job.name, row)))

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

    async def _report(self) -> None:
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
