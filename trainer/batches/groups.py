"""A batch of groups as the learner sees it. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from rollout import Batch, Trajectory
from rollout.experts import within
from rollout.messages import Group
from trainer.batches.branches import branched, segment_advantages
from trainer.batches.sample import Sample


def samples(batch: Batch, *, turns: bool = False) -> list[Sample]:
    """A batch as the learner sees it. Its groups are whole; tokens older than the bound bear no gradient, and those
    that trajectories of a group share bear it once. `turns`: with the rewards of turns, for credit by them."""
    return [
        _with_turns(sample, trajectory, start) if turns and not sample.broken else sample
        for group in batch.groups
        for sample, trajectory, start in _of_group(_unmasked(group), batch.oldest)
    ]


def _with_turns(sample: Sample, trajectory: Trajectory, start: int) -> Sample:
    """Of a piece that begins at token `start`."""
    numbers = iter([number for number, turn in enumerate(trajectory.turns) for _ in range(turn.tokens)])
    of_token = [next(numbers, -1) if bit else -1 for bit in trajectory.mask]
    rewards = [turn.reward for turn in trajectory.turns] or [0.0]
    rewards[-1] += trajectory.reward - sum(rewards)  # what was earned, or taken away, at the end
    return msgspec.structs.replace(sample, turns=of_token[start : start + len(sample.tokens)], turn_rewards=rewards)


def _unmasked(group: Group) -> Group:
    """The group of those that may be learned from: the others are in no mean either."""
    there = [trajectory for trajectory in group.trajectories if not trajectory.masked]
    return Group(prompt=group.prompt, seed=group.seed, trajectories=there)


def _of_group(group: Group, oldest: int) -> list[tuple[Sample, Trajectory, int]]:
    """Samples, whose they are, and where in it they begin."""
    sound = [trajectory for trajectory in group.trajectories if _consistent(trajectory)]
    shares: list[tuple[list[int], list[float]]] = [([], [])] * len(sound)
    if branched(group):
        shares = segment_advantages(Group(prompt=group.prompt, seed=group.seed, trajectories=sound))
    pieces = [
        (_piece(group, trajectory, part, own, oldest), trajectory, start)
        for trajectory, own in zip(sound, shares, strict=True)
        for part, (start, _) in enumerate(trajectory.parts)
    ]
    broken = [(_broken(group, item), item, 0) for item in group.trajectories if not _consistent(item)]
    return pieces + broken


def _piece(group: Group, trajectory: Trajectory, part: int, own: tuple[list[int], list[float]], oldest: int) -> Sample:
    start, end = trajectory.parts[part]
    bits, advantages = own
    return Sample(
        tokens=trajectory.tokens[start:end],
        mask=_both(trajectory.bearing(oldest), bits)[start:end],
        advantages=advantages[start:end],
        logprobs=trajectory.logprobs[start:end],
        experts=[item.moved(-start) for item in within(trajectory.experts, start, end)],
        reward=trajectory.reward,
        group=group.prompt,
        temperature=trajectory.temperature,
        complete=trajectory.complete,
        truncated=trajectory.status == "truncated",
        version=trajectory.oldest or 0,
        episode=f"{trajectory.prompt}/{trajectory.index}" if trajectory.breaks else "",
        name=f"{trajectory.prompt}/{trajectory.index}" + (f"+{part}" if part else ""),
    )


def _consistent(trajectory: Trajectory) -> bool:
    """Its lists have one entry per token, what was sampled has a version, and its samples are pieces of it."""
    size, edges = len(trajectory.tokens), [0, *trajectory.breaks, len(trajectory.tokens)]
    lists = (trajectory.mask, trajectory.logprobs, trajectory.versions)
    fits = all(len(item) == size for item in lists) and edges == sorted(edges)
    return fits and all(version >= 0 for bit, version in zip(trajectory.mask, trajectory.versions, strict=True) if bit)


def _broken(group: Group, trajectory: Trajectory) -> Sample:
    """To be refused by its name."""
    name = f"{trajectory.prompt}/{trajectory.index}"
    return Sample(
        tokens=[], mask=[], logprobs=[], group=group.prompt, name=name, broken="lists that do not fit together"
    )


def _both(mask: list[int], own: list[int]) -> list[int]:
    return [bit & mine for bit, mine in zip(mask, own, strict=True)] if own else mask


def staleness(trajectories: list[Trajectory], version: int) -> Counter[int]:
    """How many trajectories are how many versions old: `version` minus the oldest of their spans."""
    return Counter(
        version - min(existing)
        for trajectory in trajectories
        if (existing := [spoken for spoken in trajectory.versions if spoken >= 0])
    )
