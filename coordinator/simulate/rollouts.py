"""A run's rollouts on a virtual clock: the policy of the live rollout decides, engines are their rates.

Guarantee: every view goes through `RolloutPolicy.decide`, as in a live run; a workload and its seed give one course.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from coordinator.simulate.clock import VirtualClock
from coordinator.simulate.engines import SimulatedEngine, SimulatedRequest, StepCosts
from rollout.decide import tail
from rollout.decide.bound import Bound, TrainerStepRecord
from rollout.decide.engines.affinity import Profiles
from rollout.decide.engines.measuring import AnswerTimer
from rollout.decide.engines.routing import RoutedRequest, RouteView, RoutingRules, ServerView, route
from rollout.decide.policy import RolloutPolicy
from rollout.decide.view import (
    Abort,
    Action,
    BufferedGroup,
    Defer,
    FinishGroup,
    GroupView,
    HandOut,
    LeasePrompts,
    NoMoreBatches,
    RolloutView,
    SchedulingRules,
    StartTrajectory,
    TrajectoryView,
)


@dataclass(frozen=True)
class SimulatedTurn:
    prompt: float  # tokens to be read, beyond those that the engine has of the turn before
    tokens: float  # to be sampled
    environment: float = 0.0  # seconds until the next turn can begin


Workload = Callable[[int, int], list[SimulatedTurn]]  # of a prompt and its member: the same each time
Barrier = Literal["none", "turn", "group"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One simulated run."""

    rules: SchedulingRules
    engines: list[StepCosts]
    hardware: list[str] = field(default_factory=list)  # of each engine
    workload: Workload
    kind: Callable[[int], str] = lambda prompt: ""  # of environment, by the prompt
    prompts: int
    trainer: float = 0.0  # seconds of a step
    drift: Callable[[int], float] = lambda step: 0.0  # what a version of lag costs: a sample weighs exp(-drift * lag)
    bound: Bound | None = None  # chooses how far rollouts run ahead; `rules.staleness` is how far they may
    place: Mapping[str, str] = field(default_factory=dict)  # kinds that go to one hardware each, whatever they cost
    routing: RoutingRules = field(default_factory=RoutingRules)
    recompute: bool = False  # after a new version a trajectory's next turn reads all of it again
    until: float = math.inf  # seconds; the run ends then, whatever is left
    barrier: Barrier = "none"
    """`turn`: all trajectories of a batch take their turns in step, as engines with one call for a whole batch do.
    `group`: all members of a group are one request to one engine, which keeps their slots until the last has ended."""


@dataclass
class Came:
    """What a run came to."""

    seconds: float = 0.0
    batches: list[list[int]] = field(default_factory=list)
    rollout_seconds: list[float] = field(default_factory=list)  # from asking for a batch to having it
    long_rounds: int = 0
    tokens: float = 0.0  # of trajectories that were trained
    sampled: float = 0.0  # by the engines, also for trajectories that were ended
    read: float = 0.0  # tokens that engines read: prompts, and what they had of no turn before
    accepted: list[float] = field(default_factory=list)  # tokens of each trained trajectory
    busy_share: float = 0.0  # of the engines' time
    effective: float = 0.0  # trajectories that were trained, each by its weight
    bounds: list[int] = field(default_factory=list)  # under which each batch was handed out
    ends: list[float] = field(default_factory=list)  # when each trajectory ended
    alive: list[tuple[float, int]] = field(default_factory=list)  # when more, or fewer, trajectories were on their way
    turns: list[tuple[float, str, str]] = field(default_factory=list)  # of a kind of environment, on which hardware


@dataclass(eq=False)
class SimulatedTrajectory:
    """One trajectory."""

    prompt: int
    index: int
    turns: list[SimulatedTurn]
    version: int = 0  # when it began
    at: int = 0
    ended: bool = False
    engine: SimulatedEngine | None = None
    tokens: int = 0  # read and sampled so far
    held: dict[SimulatedEngine, int] = field(default_factory=dict)  # of these, by engines
    request: SimulatedRequest | None = None
    measured: AnswerTimer | None = None
    stopped: bool = False


@dataclass(eq=False)
class SimulatedGroup:
    """A group."""

    number: int
    deferred: bool
    members: dict[int, SimulatedTrajectory | None]
    home: SimulatedEngine | None = None  # under barrier `group`


class RolloutSimulation:
    """``came = RolloutSimulation(plan).run()``"""

    def __init__(self, plan: Plan):
        self.plan, self.clock = plan, VirtualClock()
        self.policy = RolloutPolicy(plan.rules)
        hardware = plan.hardware or [""] * len(plan.engines)
        self.engines = [SimulatedEngine(self.clock, *item) for item in zip(plan.engines, hardware, strict=True)]
        self._prompts: Counter[SimulatedEngine] = Counter()  # tokens of the requests that each has
        self.profiles = Profiles()
        self.trained_at = 0.0
        self.came = Came()
        self.groups: dict[int, SimulatedGroup] = {}
        self.complete: dict[int, SimulatedGroup] = {}
        self.waiting: list[int] = []  # prompts that were put off
        self.left: dict[
            int, dict[int, SimulatedTrajectory | None]
        ] = {}  # where their trajectories stood, if they continue
        self.issued, self.version = 0, 0
        self.requested_at: float | None = 0.0
        self.training = self.ended = False
        self._at_barrier: list[SimulatedTrajectory] = []
        self._unplaced: list[SimulatedGroup] = []  # groups that wait for an engine, under barrier `group`
        self._on_way = 0  # trajectories that take a turn, under barrier `turn`

    def run(self) -> Came:
        """Until every prompt is trained, or `plan.until`."""
        if self.plan.until < math.inf:
            self.clock.after(self.plan.until, lambda: setattr(self, "ended", True))
        self._decide()
        self.clock.run(lambda: self.ended)
        if not self.ended:
            raise RuntimeError("the simulated run is stuck: no event is left, but prompts are")
        self.came.seconds = self.clock.now
        self.came.sampled = sum(engine.tokens for engine in self.engines)
        complete = sum(engine.busy for engine in self.engines)
        self.came.busy_share = complete / (len(self.engines) * self.clock.now) if self.clock.now else 0.0
        return self.came

    # ----------------------------------------------------------------- what the policy sees, and what it says

    def _view(self) -> RolloutView:
        def state(member: SimulatedTrajectory | None) -> Literal["waiting", "running", "ended"]:
            return "waiting" if member is None else "ended" if member.ended else "running"

        return RolloutView(
            version=self.version,
            requested=self.requested_at is not None,
            training=self.training,
            running=[
                GroupView(
                    str(group.number),
                    group.number,
                    [
                        TrajectoryView(n, state(item), item.version if item else None)
                        for n, item in group.members.items()
                    ],
                    deferred=group.deferred,
                )
                for group in self.groups.values()
            ],
            buffered=[
                BufferedGroup(str(number), number, [item.version for item in group.members.values() if item])
                for number, group in self.complete.items()
            ],
            queued=0,
            more=self.issued < self.plan.prompts,
            deferred=len(self.waiting),
            bound=None if self.plan.bound is None else self.plan.bound.now,
        )

    def _decide(self) -> None:
        while not self.ended:
            actions = self.policy.decide(self._view(), self.clock.now)
            if not any([self._act(action) for action in actions]):
                break
        self._pass_barrier()

    def _act(self, action: Action) -> bool:
        """Whether it changed anything."""
        match action:
            case LeasePrompts(count, deferred):
                self._lease(count, deferred=deferred)
            case StartTrajectory(prompt, index):
                self._start(self.groups[int(prompt)], index)
            case Abort(prompt, index):
                self._stop(self.groups[int(prompt)].members.pop(index))
            case FinishGroup(prompt):
                self.complete[int(prompt)] = self.groups.pop(int(prompt))
            case Defer(prompt):
                group = self.groups.pop(int(prompt))
                for member in group.members.values():
                    self._stop(member)
                self.waiting.append(group.number)
                if self.plan.rules.tail_resumes:
                    self.left[group.number] = group.members
            case HandOut(prompts):
                self._train([self.complete.pop(int(prompt)) for prompt in prompts])
            case NoMoreBatches():
                self.ended = True
            case _:
                return False
        return True

    def _lease(self, count: int, *, deferred: bool) -> None:
        self.came.long_rounds += deferred
        for _ in range(count):
            if deferred:
                number = self.waiting.pop(0)
            elif self.issued < self.plan.prompts:
                number, self.issued = self.issued, self.issued + 1
            else:
                return
            members = tail.members(self.plan.rules, deferred=deferred)
            existing = self.left.get(number, {})
            retained = {n: item for n, item in existing.items() if item is not None and item.ended}
            self.groups[number] = SimulatedGroup(number, deferred, dict.fromkeys(range(members)) | retained)

    def _train(self, groups: list[SimulatedGroup]) -> None:
        assert self.requested_at is not None
        self.came.batches.append([group.number for group in groups])
        waited = self.clock.now - self.requested_at
        self.came.rollout_seconds.append(waited)
        taken = [item for group in groups for item in list(group.members.values())[: self.plan.rules.size] if item]
        self.came.accepted += [sum(turn.tokens for turn in member.turns) for member in taken]
        self.came.tokens = sum(self.came.accepted)
        self._weigh([self.version - member.version for member in taken], waited)
        self.requested_at, self.training = None, True
        self.clock.after(self.plan.trainer, self._trained)

    def _weigh(self, lags: list[int], waited: float) -> None:
        """What the batch is worth, and what the bound learns of it."""
        weights = [math.exp(-self.plan.drift(self.version) * lag) for lag in lags]
        self.came.effective += sum(weights)
        seconds, self.trained_at = self.clock.now - self.trained_at, self.clock.now
        if self.plan.bound is not None:
            self.came.bounds.append(self.plan.bound.now)
            lag, ess = sum(lags) / len(lags), sum(weights) / len(weights)
            self.plan.bound.see(TrainerStepRecord(lag=lag, ess=ess, seconds=max(seconds, 1e-9), waited=waited))

    def _trained(self) -> None:
        self.version, self.training, self.requested_at = self.version + 1, False, self.clock.now
        if self.plan.recompute:
            for group in self.groups.values():
                for member in filter(None, group.members.values()):
                    member.held.clear()
        self._decide()

    # ----------------------------------------------------------------- trajectories

    def _start(self, group: SimulatedGroup, index: int) -> None:
        member = SimulatedTrajectory(group.number, index, self.plan.workload(group.number, index), self.version)
        before = self.left.get(group.number, {}).get(index)
        if before is not None:
            member = replace(before, engine=None, held={}, request=None, measured=None, stopped=False)
            member.at = min(member.at, len(member.turns) - 1)  # its last action is executed again
        group.members[index] = member
        self.came.alive.append((self.clock.now, 1))
        if self.plan.barrier == "group":
            if group.home is None:
                if group not in self._unplaced:
                    self._unplaced.append(group)
                if all(group.members.values()):
                    self._place_groups()
                return
            member.engine = group.home
        self._turn(member)

    def _place_groups(self) -> None:
        """Whole groups, in their order, to the engine that has most room for one."""
        size = self.plan.rules.size
        while self._unplaced:
            held = {engine: 0 for engine in self.engines}
            for group in [*self.groups.values(), *self.complete.values()]:
                if group.home is not None and not all(item and item.ended for item in group.members.values()):
                    held[group.home] += size
            home = min(self.engines, key=lambda engine: held[engine] - engine.rates.slots)
            if held[home] and held[home] + size > home.rates.slots:
                return
            group = self._unplaced.pop(0)
            group.home = home
            for member in group.members.values():
                if member is not None and not member.ended:
                    member.engine = home
                    self._turn(member)

    def _turn(self, member: SimulatedTrajectory) -> None:
        """Asks for its next answer."""
        turn = member.turns[member.at]
        if self.plan.barrier == "turn" and member not in self._at_barrier:
            self._at_barrier.append(member)
            return
        engine = member.engine if self.plan.barrier == "group" and member.engine else self._routed(member)
        read = member.tokens + int(turn.prompt) - member.held.get(engine, 0)
        member.engine = engine
        self.came.read += read
        self._on_way += 1
        kind, now = self.plan.kind(member.prompt), self.clock.now
        self.came.turns.append((now, kind, engine.hardware))
        measured = member.measured = AnswerTimer(engine, kind, new=int(turn.prompt), read=read, now=now)
        self._prompts[engine] += member.tokens + int(turn.prompt)
        member.request = engine.request(
            prompt=read,
            tokens=turn.tokens,
            done=lambda: self._answered(member),
            read=lambda: measured.piece(0, self.clock.now),
        )

    def _pass_barrier(self) -> None:
        """All take their next turn when none is on the way."""
        if self._at_barrier and not self._on_way:
            together = list(self._at_barrier)
            for member in together:
                self._turn(member)
            self._at_barrier = [member for member in self._at_barrier if member not in together]

    def _answered(self, member: SimulatedTrajectory) -> None:
        turn = member.turns[member.at]
        assert member.measured is not None and member.engine is not None
        self._prompts[member.engine] -= member.tokens + int(turn.prompt)
        member.measured.piece(int(turn.tokens), self.clock.now)
        self.profiles.learn(member.measured.answered)
        member.at, member.request = member.at + 1, None
        member.tokens += int(turn.prompt + turn.tokens)
        member.held[member.engine] = member.tokens
        self.clock.after(turn.environment, lambda: self._acted(member))

    def _acted(self, member: SimulatedTrajectory) -> None:
        if member.stopped:
            return
        self._on_way -= 1
        if member.at < len(member.turns):
            self._turn(member)
            self._pass_barrier()
            return
        member.ended = True
        self.came.ends.append(self.clock.now)
        self.came.alive.append((self.clock.now, -1))
        self._place_groups()
        if self._matters(member):
            self._decide()

    def _matters(self, member: SimulatedTrajectory) -> bool:
        """Whether the end of a trajectory can change what is decided: its group may be whole, or its slot is wanted."""
        members = self.groups[member.prompt].members.values()
        ended = sum(item is not None and item.ended for item in members)
        return ended >= self.plan.rules.size or any(
            item is None for group in self.groups.values() for item in group.members.values()
        )

    def _stop(self, member: SimulatedTrajectory | None) -> None:
        if member is None or member.ended:
            return
        member.stopped = True
        self.came.alive.append((self.clock.now, -1))
        if member in self._at_barrier:
            self._at_barrier.remove(member)
        else:
            self._on_way -= 1
        if member.request is not None and member.engine is not None:
            member.engine.cancel(member.request)
            assert member.measured is not None
            member.measured.leave()
            self._prompts[member.engine] -= member.tokens + int(member.turns[member.at].prompt)

    def _routed(self, member: SimulatedTrajectory) -> SimulatedEngine:
        """By the rules of the live pool; its first engine holds the prefix of a trajectory."""
        kind = self.plan.kind(member.prompt)
        servers = [
            ServerView(
                str(n), "serving", 1 << 30, item.load, self._prompts[item], item.hardware, item.readers, item.reading
            )
            for n, item in enumerate(self.engines)
            if item.hardware == self.plan.place.get(kind, item.hardware)
        ]
        homes = [str(self.engines.index(member.engine))] if member.engine is not None else []
        held = member.held.get(member.engine, 0) if member.engine is not None else 0
        tokens = member.tokens + int(member.turns[member.at].prompt)
        request = RoutedRequest(0, 0, homes, held, tokens, self.profiles.need(kind))
        (sent,) = route(RouteView(servers=servers, waiting=[request], rates=self.profiles.rates()), self.plan.routing)
        return self.engines[int(sent.server)]
