"""What happens to a trajectory that the trainer overtakes. Pure.

Guarantee: no token that bears gradient is older than the bound; under `wait` and `mask` every prompt is trained however
slow it is, under `drop` it is trained or given up after a bounded number of starts.

========  =============================================================================  ===========================
`wait`    a batch is handed out only if no trajectory becomes over-stale by the step      the trainer waits for
          that follows: stragglers finish first, and are in the next batch                stragglers; no bias
`mask`    nothing waits; tokens that are over-stale when they are trained bear no          slow trajectories teach
          gradient, their trajectory keeps its reward in its group                        less; no bias of rewards
`drop`    an over-stale trajectory is ended and restarted; after `starts` of them the    slow prompts are given up,
          prompt is given up                                                              and counted
========  =============================================================================  ===========================
"""

from __future__ import annotations

from rollout.decide.view import Abort, BufferedGroup, GroupView, ReopenGroup, RolloutView


def staleness(trainer: int, oldest: int | None) -> int:
    """Trainer version minus the oldest policy version in a sample; 0 for a sample without sampled tokens."""
    return 0 if oldest is None else trainer - oldest


def over_stale(*, trainer: int, oldest: int | None, bound: int) -> bool:
    return staleness(trainer, oldest) > bound


def stragglers(view: RolloutView, bound: int, chosen: set[str]) -> list[str]:
    """Groups on their way that would be over-stale after the step on the groups `chosen`, oldest number first."""
    late = [
        group.prompt
        for group in sorted(view.running, key=lambda group: group.number)
        if any(
            over_stale(trainer=view.version + 1, oldest=oldest, bound=bound)
            for member in group.members
            for oldest in (member.oldest, member.coming)
        )
    ]
    return [prompt for prompt in late if prompt not in chosen]


def drop(view: RolloutView, bound: int) -> list[Abort | ReopenGroup]:
    """Ends what is over-stale now, running or finished, trajectory by trajectory."""
    actions: list[Abort | ReopenGroup] = []
    for group in view.running:
        actions += [
            Abort(group.prompt, member.index, "over-stale")
            for member in group.members
            if member.state != "waiting" and over_stale(trainer=view.version, oldest=member.oldest, bound=bound)
        ]
    for done in view.buffered:
        old = [
            index
            for index, oldest in enumerate(done.oldest)
            if over_stale(trainer=view.version, oldest=oldest, bound=bound)
        ]
        if old:
            actions.append(ReopenGroup(done.prompt, old, "over-stale"))
    return actions


def age(group: GroupView | BufferedGroup) -> tuple[int, int]:
    """Sort key: oldest policy version first, then number."""
    versions = group.oldest if isinstance(group, BufferedGroup) else [member.oldest for member in group.members]
    existing = [version for version in versions if version is not None]
    return (min(existing, default=1 << 62), group.number)
