"""How much better than expected: from rewards to one advantage per sampled token.

Pure. Guarantee: a part of the batch that says nothing gets advantage exactly 0: a group whose rewards are all equal,
for the baselines `group` and `leave_one_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SILENT = 1e-6  # rewards of a group that differ by less are equal
FLOOR = 1e-6  # added to a deviation before it divides

Baseline = Literal["none", "group", "leave_one_out", "batch", "critic", "teacher"]
Scale = Literal["none", "group", "within_groups", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """A_i = (R_i - baseline) / (scale + FLOOR), or generalised advantage estimation where a critic is the baseline.

    Baselines:

    - `none`: 0.
    - `group`: mean of the rewards of the trajectory's group (GRPO, arXiv 2402.03300, section 4.1.1).
    - `leave_one_out`: mean of the others of the group (RLOO, arXiv 2402.14740, equation 9).
    - `batch`: mean over all tokens of the batch (REINFORCE++, arXiv 2501.03262, section 3).
    - `critic`: values V_t of a value head, by `gae`.
    - `teacher`: A_t = log π_T - log μ of the sampled token; rewards count for nothing (MiniLLM, arXiv 2306.08543,
      section 2.2, the single-step part: the gradient of the reverse KL on what the student sampled).

    Scales; there are two that are called "batch standard deviation" in texts, so they have names of their own:

    - `group`: sample deviation of the rewards of the trajectory's group (GRPO).
    - `batch`: sample deviation of the raw rewards of the whole batch (Lite PPO, arXiv 2508.08221, section 4.1.2);
      with the baselines `batch` and `critic`, of the advantages of all its tokens (REINFORCE++).
    - `within_groups`: root of the mean of (R_i - group mean)^2 over the groups that say something: what is left of
      the deviation when the difference between groups is taken out. Ours; the pooled deviation of statistics.
    """

    baseline: Baseline = "group"
    scale: Scale = "none"
    credit: Literal["episode", "turns"] = "episode"  # of what: the whole episode's reward, or `by_turns`
    discount: float = 1.0  # γ of `gae`
    trace: float = 0.95  # λ of `gae`

    @property
    def needs_batch(self) -> bool:
        """Must the batch be complete before the first gradient? If not, only a common divisor is missing."""
        return self.baseline in ("batch", "critic", "teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """What becomes of long episodes.

    - `filter`: one that was cut bears no gradient.
    - `penalty` c, `limit` L, `buffer` b: R_i - c clamp((|o_i| - (L - b)) / b, 0, 1); with c = 1 DAPO's soft punishment
      (arXiv 2503.14476, equation 13).
    """

    filter: bool = False
    penalty: float = 0.0
    limit: int = 0
    buffer: int = 0

    def of(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """[N] rewards, penalised."""
        if not self.penalty:
            return rewards
        over = (lengths - (self.limit - self.buffer)).to(rewards.dtype) / self.buffer
        return rewards - self.penalty * over.clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """S turns, those of an episode one after another."""

    rewards: Tensor  # [S]
    episode: Tensor  # [S] long; number of the trajectory
    of_token: Tensor  # [T] long; number of the turn


@dataclass(frozen=True, slots=True)
class Rewards:
    """A batch (or some whole groups of one) as advantages see it. N trajectories, T sampled tokens in all."""

    rewards: Tensor  # [N]
    groups: Tensor  # [N] long; equal numbers are one group
    lengths: Tensor  # [N] long; sampled tokens of each
    penalty: Tensor | None = None  # [T] β · KL per token, taken from the reward (KL in the reward)
    values: Tensor | None = None  # [T] V_t
    earned: Tensor | None = None  # [T] reward less baseline, where groups are trees: see rollout.decide.tree
    truncated: Tensor | None = None  # [N] bool: episodes that were cut
    taught: Tensor | None = None  # [T] log π_T - log μ
    turns: TurnRewards | None = None  # where credit is by turns


def token_advantages(advantage: Advantage, batch: Rewards) -> Tensor:
    """A_t [T] of a complete batch. Example: rewards [1, 0] of one group, `group`: [0.5, -0.5], once per token."""
    if advantage.baseline == "teacher":
        assert batch.taught is not None, "distillation needs the teacher's log-probabilities"
        return batch.taught
    if advantage.credit == "turns":
        result = by_turns(advantage, batch)
        return result if batch.penalty is None else result + _returns(batch) - _complete(batch)
    if advantage.baseline == "critic":
        result = gae(advantage, batch)
    elif batch.earned is not None:
        result = batch.earned if batch.penalty is None else batch.earned + _returns(batch) - _complete(batch)
    elif batch.penalty is not None:
        result = _returns(batch) - _per_token(_baselines(advantage, batch), batch.lengths)
    else:
        result = _per_token(batch.rewards - _baselines(advantage, batch), batch.lengths)
    if advantage.baseline == "batch":
        result = result - result.mean()
    if advantage.baseline in ("batch", "critic") and advantage.scale == "batch":
        return (result - result.mean()) / (_deviation(result) + FLOOR)
    if advantage.scale == "group":
        return result / _per_token(_group_deviations(batch) + FLOOR, batch.lengths)
    return result / divisor(advantage, batch)


def by_turns(advantage: Advantage, batch: Rewards) -> Tensor:
    """A_t = Σ_{j ≥ turn of t} (r_j - mean(r)) / (std(r) + FLOOR), mean and deviation over all turns of the group.

    Source: GRPO with process supervision (arXiv 2402.03300, section 4.1.3). Scale `none` leaves the deviation out.
    What an episode earned at its end is its last turn's.
    """
    assert batch.turns is not None, "credit by turns needs the rewards of turns"
    turns = batch.turns
    groups, normal = batch.groups[turns.episode], torch.zeros_like(turns.rewards)
    for group in groups.unique():
        here = groups == group
        rewards = turns.rewards[here]
        if rewards.max() - rewards.min() < SILENT:
            continue
        scale = _deviation(rewards) + FLOOR if advantage.scale == "group" else 1.0
        normal[here] = (rewards - rewards.mean()) / scale
    totals = torch.zeros_like(batch.rewards).index_add(0, turns.episode, normal)
    ends = totals.cumsum(0)[turns.episode]  # of all turns up to the end of each one's episode
    to_go = ends - normal.cumsum(0) + normal
    return torch.where(silent(batch)[turns.episode], 0.0, to_go)[turns.of_token]  # exactly 0, whatever the rounding


def _complete(batch: Rewards) -> Tensor:
    return _per_token(batch.rewards, batch.lengths)


def divisor(advantage: Advantage, batch: Rewards) -> float:
    """What every advantage of the batch is divided by: known only when the batch is complete, common to all of it.

    1 for scales that need no more than the group. Losses are proportional to the advantage, so a trainer that
    computes gradients while groups come in divides the sum of them by this at the end.
    """
    if advantage.needs_batch or advantage.scale in ("none", "group"):
        return 1.0
    if advantage.scale == "batch":
        return float(_deviation(batch.rewards)) + FLOOR
    centred = batch.rewards - _group_means(batch)
    speaking = centred[~silent(batch)]
    return max(float(speaking.square().mean().sqrt()), FLOOR) if len(speaking) else 1.0


def silent(batch: Rewards) -> Tensor:
    """[N] bool: trajectories of groups whose rewards are all equal; with credit by turns, those of all their turns."""
    if batch.turns is not None:
        groups, result = batch.groups[batch.turns.episode], torch.ones_like(batch.rewards, dtype=torch.bool)
        for group in groups.unique():
            rewards = batch.turns.rewards[groups == group]
            result[batch.groups == group] = rewards.max() - rewards.min() < SILENT
        return result
    spread = _by_group(batch, lambda rewards: (rewards.max() - rewards.min()).expand_as(rewards))
    return spread < SILENT


def gae(advantage: Advantage, batch: Rewards) -> Tensor:
    """A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = R_t + γ V_{t+1} - V_t, over the sampled tokens of each trajectory.

    Source: arXiv 1506.02438, equation 16. R_t is 0 but for the last token, which earns R_i, less the penalty of each
    token. V after the last token is 0: an episode that was cut is scored as it stands. Tokens that the environment
    wrote are no steps.
    """
    assert batch.values is not None, "generalised advantage estimation needs values"
    values, lengths = batch.values, batch.lengths
    spoken = lengths > 0
    number = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    place = torch.arange(len(values), device=values.device) - (lengths.cumsum(0) - lengths)[number]
    last = lengths.cumsum(0)[spoken] - 1
    earned = torch.zeros_like(values) if batch.penalty is None else -batch.penalty
    earned = earned.index_add(0, last, batch.rewards[spoken].to(values.dtype))
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    following[last] = 0.0
    rows = values.new_zeros(len(lengths), int(lengths.max()) if len(lengths) else 0)
    rows[number, place] = earned + advantage.discount * following - values
    step, reach = advantage.discount * advantage.trace, 1
    while step and reach < rows.shape[1]:  # sums of 2, 4, 8, ... steps: as many passes as the longest has bits
        rows = torch.cat([rows[:, :-reach] + step**reach * rows[:, reach:], rows[:, -reach:]], 1)
        reach *= 2
    return rows[number, place]


def _returns(batch: Rewards) -> Tensor:
    """R_i - Σ_{s ≥ t} penalty_s for every token: what REINFORCE++ calls the token's reward to go (section 3)."""
    assert batch.penalty is not None
    result = torch.empty_like(batch.penalty)
    for at, length, reward in _spans(batch):
        rest = batch.penalty[at : at + length].flip(0).cumsum(0).flip(0)
        result[at : at + length] = reward - rest
    return result


def _spans(batch: Rewards) -> list[tuple[int, int, float]]:
    lengths: Sequence[int] = batch.lengths.tolist()
    spans, at = [], 0
    for length, reward in zip(lengths, batch.rewards.tolist(), strict=True):
        spans.append((at, length, reward))
        at += length
    return spans


def _baselines(advantage: Advantage, batch: Rewards) -> Tensor:
    """[N]"""
    if advantage.baseline == "group":
        means = _group_means(batch)
        return torch.where(silent(batch), batch.rewards, means)  # exactly 0, whatever the rounding of a mean
    if advantage.baseline == "leave_one_out":
        return _by_group(batch, _others)
    return torch.zeros_like(batch.rewards)


def _others(rewards: Tensor) -> Tensor:
    """A trajectory that is alone in its group has nothing to be compared with: its own reward, so advantage 0."""
    if len(rewards) == 1 or rewards.max() - rewards.min() < SILENT:
        return rewards
    return (rewards.sum() - rewards) / (len(rewards) - 1)


def _group_means(batch: Rewards) -> Tensor:
    return _by_group(batch, lambda rewards: rewards.mean().expand_as(rewards))


def _group_deviations(batch: Rewards) -> Tensor:
    return _by_group(batch, lambda rewards: _deviation(rewards).expand_as(rewards))


def _by_group(batch: Rewards, of: Callable[[Tensor], Tensor]) -> Tensor:
    """[N]: `of(rewards of the group)` put back to where the group's trajectories are."""
    result = torch.zeros_like(batch.rewards)
    for group in batch.groups.unique():
        here = batch.groups == group
        result[here] = of(batch.rewards[here])
    return result


def _deviation(values: Tensor) -> Tensor:
    """Sample standard deviation (n - 1); 0 of one value."""
    return values.std() if len(values) > 1 else values.new_zeros(())


def _per_token(values: Tensor, lengths: Tensor) -> Tensor:
    return torch.repeat_interleave(values, lengths)
