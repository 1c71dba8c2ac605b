"""The rollout's memory of what is on its way: groups, their trajectories, counts. Plain state, no decisions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from rollout.decide import tail
from rollout.decide.blame import blame
from rollout.decide.view import (
    At,
    BufferedGroup,
    EndedTrajectory,
    ForkableState,
    GroupView,
    SchedulingRules,
    TrajectoryView,
)
from rollout.episode.talk import sampled
from rollout.messages import Trajectory
from rollout.store.journal import TurnEntry, TurnJournal
from rollout.store.retained import RetainedLedger, Visit
from rollout.store.samples import PromptLease, SampleStore
from sandbox.errors import EngineFailed, NotFound

MAX_GIVEN_UP = 32  # prompts in a row, without a whole group: then the environment is at fault, not a prompt


@dataclass(eq=False)
class Slot:
    """One trajectory of a group."""

    index: int
    trajectory: Trajectory
    start: int = 0  # number of the next attempt
    starts: int = 0  # that count, see Member
    task: asyncio.Task[None] | None = None
    ended: bool = False
    oldest: int | None = None  # of an ended one
    since: list[TurnEntry] = field(default_factory=list)  # what another process left of it
    why: str = ""  # it is being aborted
    at: At | None = None  # it began as a branch there
    played: EndedTrajectory | None = None  # of an ended one, where there are branches
    overtaken: tuple[int, int] | None = None  # the turn that was being sampled by an older version, and which
    scoring: bool = False  # it has ended, and its sandbox runs no more

    def published(self, before: int) -> None:
        """Another version than `before` is served: tokens of the answer under way may be of either."""
        turn = self.trajectory.thinking
        if turn is not None and (self.overtaken is None or self.overtaken[0] != turn):
            self.overtaken = turn, before

    @property
    def coming(self) -> int | None:
        """Oldest policy version of tokens that the trajectory will have, as far as that is known."""
        result = [version for entry in self.since for version in entry.versions if version >= 0]
        if self.overtaken is not None and self.overtaken[0] == self.trajectory.thinking:
            result.append(self.overtaken[1])
        return min(result, default=None)

    @property
    def view(self) -> TrajectoryView:
        if self.ended:
            return TrajectoryView(self.index, "ended", self.oldest, self.starts, None, self.at, self.played)
        if self.task is None:
            return TrajectoryView(self.index, "waiting", None, self.starts, self.coming)
        state: Literal["scoring", "running"] = "scoring" if self.scoring else "running"
        return TrajectoryView(self.index, state, self.trajectory.oldest, self.starts, self.coming, self.at)


@dataclass(eq=False)
class OpenGroup:
    lease: PromptLease
    members: list[Slot]
    failures: int = 0
    reason: str = ""

    @property
    def view(self) -> GroupView:
        members = [member.view for member in self.members]
        lease = self.lease
        return GroupView(lease.prompt, lease.number, members, self.failures, self.reason, lease.deferred)


@dataclass
class GroupCounts:
    turns: int = 0
    tokens: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    blames: Counter[str] = field(default_factory=Counter)
    injected: int = 0
    killed: int = 0
    recovered_equal: int = 0
    lost: int = 0  # trajectories of prompts that were given up for the platform's failures
    retried: int = 0
    continued: int = 0  # that this process took over from another
    over_stale: int = 0
    given_up_in_row: int = 0  # prompts, since a group was whole

    def given_up(self, reason: str, stop: Callable[[Exception], None]) -> None:
        """A prompt. `stop` is called where none has been played for so many that none will be."""
        self.given_up_in_row += 1
        if self.given_up_in_row >= MAX_GIVEN_UP:
            stop(
                EngineFailed(
                    f"the rollout is stuck: {self.given_up_in_row} prompts in a row were given up, the last: {reason}",
                    hint="correct the environment, then continue with --resume; see `pagurus rollouts account RUN`",
                )
            )

    def ledger(self, trajectory: Trajectory) -> None:
        """One attempt has ended."""
        self.statuses[trajectory.status] += 1
        if trajectory.failure is not None:
            self.causes[trajectory.failure.cause.value] += 1
            self.blames[blame(trajectory.failure).value] += 1
        self.turns += len(trajectory.turns)
        self.tokens += sum(trajectory.mask)
        self.verdicts.update(turn.verdict for turn in trajectory.turns)
        self.injected += trajectory.injected
        self.killed += trajectory.killed
        self.recovered_equal += trajectory.recovered_equal

    def metrics(self) -> dict[str, Any]:
        return {
            "turns": self.turns,
            "tokens": self.tokens,
            "verdicts": dict(self.verdicts),
            "trajectories": dict(self.statuses),
            "causes": dict(self.causes),
            "blames": dict(self.blames),
            "injected": self.injected,
            "killed": self.killed,
            "recovered_equal": self.recovered_equal,
            "trajectories_lost": self.lost,
            "trajectories_retried": self.retried,
            "trajectories_continued": self.continued,
            "over_stale": self.over_stale,
        }


def played(trajectory: Trajectory, visits: list[Visit]) -> EndedTrajectory:
    """A trajectory that was scored, as branches of it are decided on."""
    answers = sampled(trajectory)
    states = []
    for visit in visits:
        if visit.turn < len(answers):
            _, first, end = answers[visit.turn]
            states.append(ForkableState(visit.turn, -fmean(trajectory.logprobs[first:end])))
    lineage = [At(item.member, item.start, item.turn) for item in trajectory.lineage]
    return EndedTrajectory(trajectory.start, len(trajectory.turns), trajectory.reward, lineage, states)


def without_states(existing: EndedTrajectory) -> EndedTrajectory:
    return EndedTrajectory(existing.start, existing.turns, existing.reward, existing.lineage)


def fresh(lease: PromptLease, rules: SchedulingRules) -> OpenGroup:
    """A group of which nothing has run."""
    members = tail.members(rules, deferred=lease.deferred)
    return OpenGroup(lease, [Slot(n, Trajectory()) for n in range(members)], lease.failures)


def restored(
    lease: PromptLease, rules: SchedulingRules, store: SampleStore, ledger: RetainedLedger | None
) -> OpenGroup:
    """A group as the store knows it: its finished members need not run. `ledger`: what they can be branched from."""
    group = fresh(lease, rules)
    for done in store.finished(lease.prompt):
        slot = group.members[done.member]
        slot.ended, slot.oldest, slot.start = True, done.oldest, done.start
        if ledger is not None:
            note_played(slot, store.sample(lease.prompt, done.member), ledger)
    return group


def note_played(slot: Slot, trajectory: Trajectory, ledger: RetainedLedger) -> None:
    """What branches need to know of an ended trajectory. One whose states are not kept has none."""
    try:
        visits = ledger.visits(trajectory.prompt, trajectory.index, trajectory.start)
    except NotFound:
        visits = []
    slot.played = played(trajectory, visits)
    slot.at = slot.played.lineage[-1] if slot.played.lineage else None


def complete(lease: PromptLease, size: int, store: SampleStore) -> BufferedGroup:
    """A group that waits for its batch."""
    done = store.finished(lease.prompt)[:size]
    return BufferedGroup(lease.prompt, lease.number, [item.oldest for item in done], [item.start for item in done])


def left(
    rules: SchedulingRules, store: SampleStore, journal: TurnJournal, ledger: RetainedLedger | None
) -> list[OpenGroup]:
    """The groups that another process left on their way, with the turns at which their trajectories stand.

    A member that cannot be continued (its environment does not save its state) restarts under the next number. What the
    journal says of others is forgotten.
    """
    result = [resumed(lease, rules, store, journal, ledger) for lease in store.in_flight()]
    existing = {group.lease.prompt for group in result} | (store.put_off() if rules.tail_resumes else set())
    for key in journal.open():
        if key.prompt not in existing:
            journal.forget(key)
    return result


def leased(
    lease: PromptLease, rules: SchedulingRules, store: SampleStore, journal: TurnJournal, ledger: RetainedLedger | None
) -> OpenGroup:
    """A new one; or one that continues, where what was put off does."""
    if lease.deferred and rules.tail_resumes:
        return resumed(lease, rules, store, journal, ledger)
    return fresh(lease, rules)


def resumed(
    lease: PromptLease, rules: SchedulingRules, store: SampleStore, journal: TurnJournal, ledger: RetainedLedger | None
) -> OpenGroup:
    """A group as store and journal know it: its members continue where they were."""
    group = restored(lease, rules, store, ledger)
    for key in journal.open():
        if key.prompt != lease.prompt:
            continue
        slot = group.members[key.member]
        entries = [] if slot.ended else journal.entries(key)
        if entries and entries[-1].state is not None:
            slot.since, slot.start = entries, key.start
            slot.at = next((At(item.member, item.start, item.turn) for item in entries[-1].lineage[-1:]), None)
        else:
            journal.forget(key)
            slot.start = max(slot.start, key.start + 1)
    return group
