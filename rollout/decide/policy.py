"""`RolloutPolicy`: everything that the rollout chooses, as one function of a view. Pure.

Guarantee: the same view and time give the same actions, in this process and in a replay. Actions of one stage are given
alone: the next view shows what they led to.

::

    view ─▶ settle groups ─▶ staleness (drop) ─▶ tail ─▶ breaker ─▶ hand out ─▶ admission ─▶ slots ─▶ rest
         └▶ else: who waits
"""

from __future__ import annotations

from rollout.decide import admission, breaker, redundancy, staleness, tail
from rollout.decide.engines import handover
from rollout.decide.view import (
    Action,
    BufferedGroup,
    HandOut,
    LeasePrompts,
    NoMoreBatches,
    RolloutView,
    SchedulingRules,
    Stop,
    WaitReason,
)


class RolloutPolicy:
    """``RolloutPolicy(SchedulingRules(groups=8, size=8)).decide(view, now)``"""

    def __init__(self, rules: SchedulingRules):
        self.rules = rules

    def decide(self, view: RolloutView, now: float) -> list[Action]:
        rules = self.rules
        finalized: list[Action] = [action for group in view.running for action in redundancy.finalize(group, rules)]
        if finalized:
            return finalized
        if rules.over_stale == "drop" and (old := staleness.drop(view, rules.staleness)):
            return list(old)
        if rules.tail and (slow := tail.put_off(view, rules)):
            return list(slow)
        if (part := breaker.hopeless(view.parts, timeout=rules.timeout, now=now)) is not None:
            return [Stop(f"{part.part} has refused everything for {now - part.since:.0f} s: {part.reason}")]
        batch, waits = self._hand_out(view)
        started = [] if view.draining else self._start(view, now)
        if batch or started:
            return [*batch, *started]
        if (rest := handover.rest(view)) is not None:
            return [rest]
        return [*waits, *breaker.waits(view.parts, now)]

    def _hand_out(self, view: RolloutView) -> tuple[list[Action], list[Action]]:
        """The batch that is requested, or who waits for what."""
        rules = self.rules
        if not view.requested or view.training:
            return [], []
        ready = sorted(view.buffered, key=staleness.age)
        chosen: list[BufferedGroup] = ready[: rules.groups]
        last = not view.more and not view.queued and not view.deferred and not view.running
        if last and not ready:
            return [NoMoreBatches()], []
        if len(chosen) < rules.groups and not last:
            return [], [WaitReason("trainer", f"{len(chosen)} of {rules.groups} groups are whole, {_progress(view)}")]
        if rules.over_stale == "wait":
            late = staleness.stragglers(view, rules.staleness, {group.prompt for group in chosen})
            if late:
                return [], [WaitReason("trainer", f"stragglers would be over-stale: {', '.join(late)}")]
        return [HandOut([group.prompt for group in chosen], view.version - rules.staleness)], []

    def _start(self, view: RolloutView, now: float) -> list[Action]:
        """New groups first. While a part refuses, one group more is taken only where otherwise none would try again: a
        part works again when a request was served, so there has to be one."""
        rules = self.rules
        bound = rules.staleness if view.bound is None else view.bound
        if rules.tail:
            leases = tail.next_round(view, rules, bound=bound)
        else:
            leases = admission.admit(view, batch=rules.groups, bound=bound)
        if leases and not view.parts:
            return list(leases)
        active = [member for group in view.running for member in group.members if member.state == "running"]
        trying = sum(member.oldest is None for member in active)
        free = breaker.slots(view.parts, free=rules.concurrency - len(active), trying=trying, now=now)
        started = admission.fill(view, rules, slots=free)
        if leases and free > 0 and not started and not trying:
            return [LeasePrompts(1, leases[0].deferred)]
        return list(started)


def _progress(view: RolloutView) -> str:
    members = [member for group in view.running for member in group.members]
    counts = {state: sum(member.state == state for member in members) for state in ("running", "waiting", "ended")}
    if scoring := len(members) - sum(counts.values()):
        counts["scoring"] = scoring
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"trajectories of {len(view.running)} others: {said}"
