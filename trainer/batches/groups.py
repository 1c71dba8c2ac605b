"""A batch of groups as the learner sees it. Pure.

Owns: which trajectories and tokens bear gradient, their pieces as samples, how old they are. Does not own: which groups
are in a batch (rollout), what branches have earned (branches), losses.
"""

from __future__ import annotations

from collections import Counter

from rollout import Batch, Trajectory
from rollout.messages import Group
from trainer.batches.branches import branched, segment_advantages
from trainer.batches.sample import Sample


def samples(batch: Batch) -> list[Sample]:
    """A batch as the learner sees it. Its groups are whole; tokens older than the bound bear no gradient, and those
    that trajectories of a group share bear it once."""
    return [sample for group in batch.groups for sample in _of_group(_unmasked(group), batch.oldest)]


def _unmasked(group: Group) -> Group:
    """The group of those that may be learned from: the others are in no mean either."""
    there = [trajectory for trajectory in group.trajectories if not trajectory.masked]
    return Group(prompt=group.prompt, seed=group.seed, trajectories=there)


def _of_group(group: Group, oldest: int) -> list[Sample]:
    shares: list[tuple[list[int], list[float]]] = [([], [])] * len(group.trajectories)
    if branched(group):
        shares = segment_advantages(group)
    return [
        Sample(
            tokens=trajectory.tokens[start:end],
            mask=_both(trajectory.bearing(oldest), own)[start:end],
            advantages=advantages[start:end],
            logprobs=trajectory.logprobs[start:end],
            reward=trajectory.reward,
            group=group.prompt,
            temperature=trajectory.temperature,
            complete=trajectory.complete,
            truncated=trajectory.status == "truncated",
            version=trajectory.oldest or 0,
            episode=f"{trajectory.prompt}/{trajectory.index}" if trajectory.breaks else "",
            name=f"{trajectory.prompt}/{trajectory.index}" + (f"+{part}" if part else ""),
        )
        for trajectory, (own, advantages) in zip(group.trajectories, shares, strict=True)
        for part, (start, end) in enumerate(trajectory.parts)
    ]


def _both(mask: list[int], own: list[int]) -> list[int]:
    return [bit & mine for bit, mine in zip(mask, own, strict=True)] if own else mask


def staleness(trajectories: list[Trajectory], version: int) -> Counter[int]:
    """How many trajectories are how many versions old: `version` minus the oldest of their spans."""
    return Counter(
        version - min(existing)
        for trajectory in trajectories
        if (existing := [spoken for spoken in trajectory.versions if spoken >= 0])
    )
