"""`Learner`: from samples to the next weights.

Guarantee: the gradient is that of the objective of the whole batch, however it was packed, split over micro-batches and
ranks, or fed group by group; a number that is not finite stops the step before the weights change.

::

    begin ─▶ feed(groups) ─▶ feed(groups) ─▶ ... ─▶ finish: ÷ divisor ─▶ clip ─▶ update ─▶ StepStats
                 │ forward, backward at once where the objective allows it, else in finish
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean

import torch
from torch import Tensor

from trainer import optimisers
from trainer.batches.pack import EMPTY, PackedBatch, pack
from trainer.batches.plan import Family, families, plan
from trainer.batches.sample import Sample, accepted, episodes
from trainer.distributed.ranks import ALONE, Ranks
from trainer.distributed.shard import bound_norm, local
from trainer.errors import TrainerFailed
from trainer.models.scorer import Scorer
from trainer.objectives import (
    BatchCounts,
    Credit,
    Metrics,
    Objective,
    Overlong,
    Rewards,
    SampledTokens,
    complete_divisor,
    credit,
)
from trainer.objectives.advantage import TurnRewards, gae, silent
from trainer.objectives.losses import divergence, on_policy_distillation
from trainer.objectives.metrics import Summary, by_outcome
from trainer.settings import OptimiserSettings

# In half precision a gradient is rounded once per micro-batch, so that another packing gives another step (0.5 to 1 %
# of the first steps' change). With so many micro-batches, or a multiple, 1, 2, 4 and 8 ranks have the same ones.
SAME_ROUNDING = 8
SPREAD = 4  # families for each of several ranks in fp32, so that all have about as much to do


@dataclass(slots=True)
class StepStats:
    """Figures of one step."""

    summary: Summary = field(default_factory=Summary)
    grad_norm: float = 0.0
    trajectories: int = 0
    computed: int = 0  # of these; the others could bear no gradient
    silent: int = 0  # trajectories of groups whose rewards are all equal
    refused: dict[str, int] = field(default_factory=dict)
    put_aside: dict[str, str] = field(default_factory=dict)  # samples that were not trained on, and why
    lengths: dict[str, float] = field(default_factory=dict)  # by outcome
    batch_tokens: int = 0  # of all trajectories
    forward_tokens: int = 0  # that the model read, on this rank: common beginnings once, what bears no gradient never
    padding_tokens: int = 0  # of these, the ones of no trajectory
    seconds: float = 0.0  # of work
    hidden_s: float = 0.0  # of these, before the batch was complete

    def items(self) -> dict[str, float | dict[str, int] | dict[str, float] | dict[str, str]]:
        """As they are logged."""
        names = ("grad_norm", "trajectories", "computed", "silent", "refused", "put_aside", "lengths", "batch_tokens",
                 "forward_tokens")  # fmt: skip
        own = {name: getattr(self, name) for name in (*names, "seconds", "hidden_s")}
        return {**self.summary.items(), **own}


@dataclass(slots=True)
class _Before:
    """What other weights, or these before the step, say about the sampled tokens. One tensor per sample."""

    proximal: list[Tensor] | None = None
    reference: list[Tensor] | None = None
    value: list[Tensor] | None = None


class Learner:
    """``learner.step(samples)``, or ``begin``, ``feed`` as groups complete, ``finish``. One thread at a time."""

    def __init__(
        self,
        scorer: Scorer,
        objective: Objective,
        settings: OptimiserSettings | None = None,
        *,
        reference: Scorer | None = None,
        ranks: Ranks = ALONE,
    ):
        self.scorer, self.objective, self.reference, self.ranks = scorer, objective, reference, ranks
        self.settings = settings or OptimiserSettings()
        self.on_micro_batch: Callable[[], object] = lambda: None  # the watcher sees progress
        self.trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
        critic_rate = 0.0 if objective.value is None else objective.value.rate
        self.optimisers = optimisers.make(scorer, self.settings, critic_rate=critic_rate)
        self.critic_only = False  # steps in which only the critic learns
        if reference is None and objective.advantage.baseline == "teacher":
            raise TrainerFailed("distillation needs a teacher", hint="set objective.teacher = DIRECTORY")
        if objective.kl is not None and reference is None:
            raise TrainerFailed("this objective holds on to a reference model", hint="give one, or another objective")
        self.streams = streams(objective, self.settings)
        self.begin()

    def step(self, samples: Sequence[Sample], *, rate: float | None = None) -> StepStats:
        """One batch, complete."""
        self.begin()
        self.feed(samples, last=True)
        return self.finish(rate=rate)

    def complete(self, samples: Sequence[Sample], *, rate: float | None = None) -> StepStats:
        """The step of this batch, of which groups may have been fed since `begin`. If something was fed that is not in
        it, or not with the same tokens, all is computed again."""
        if not self._fed or any(early not in samples for early in self._fed):
            return self.step(samples, rate=rate)
        self.feed([sample for sample in samples if sample not in self._fed], last=True)
        return self.finish(rate=rate)

    def begin(self) -> None:
        """A new batch; forgets what an abandoned one has left."""
        self._forget_gradients()
        self._fed: list[Sample] = []  # what came in, refused samples as well
        self._samples: list[Sample] = []
        self._counts, self._stats = BatchCounts(), StepStats()
        self._metrics, self._done = Metrics(), Metrics()

    def feed(self, samples: Sequence[Sample], *, last: bool = False) -> None:
        """Whole groups of the batch. Their gradients are computed at once where that is exact.

        `last`: the batch is complete with these, so that no sampling runs while they are computed.
        """
        began = time.perf_counter()
        retained, refused = self._accepted(samples)
        for name, reason in refused:
            self._stats.refused[reason] = self._stats.refused.get(reason, 0) + 1
            self._stats.put_aside[name] = reason
        self._fed += samples
        self._samples += retained
        if self.streams and retained:
            self._learn(retained, credit(self.objective, self._rewards(retained)), self._poll(retained))
        took = time.perf_counter() - began
        self._stats.seconds += took
        self._stats.hidden_s += 0.0 if last else took

    def finish(self, *, rate: float | None = None) -> StepStats:
        """The batch is complete: the update. Raises TrainerFailed, with the weights as they were, on a bad number."""
        began = time.perf_counter()
        stats, samples = self._stats, self._samples
        self._fed = []
        if not samples:  # each is in `put_aside`
            return stats
        optimisers.set_rate(self.optimisers, self.settings.rate if rate is None else rate)
        if self.streams:
            self._update(complete_divisor(self.objective, self._rewards(samples), self._counts))
        else:
            self._complete(samples)
        rewards = self._rewards(samples)
        stats.trajectories = len(rewards.rewards)
        stats.batch_tokens = sum(len(sample.tokens) for sample in samples)
        stats.silent = int(silent(rewards).sum())
        stats.lengths = by_outcome(
            [item.reward for item in samples],
            [len(item.tokens) for item in samples],
            [item.truncated for item in samples],
        )
        stats.summary = self._summary()
        stats.seconds += time.perf_counter() - began
        return stats

    def probe(self, samples: Sequence[Sample]) -> str | None:
        """Why no gradient can be made of these samples, or None. Every one bears gradient here; nothing is changed."""
        self.begin()
        retained, _ = self._accepted(samples)
        if retained:
            counts = [sample.sampled for sample in retained]
            ones = torch.ones(sum(counts), dtype=torch.float64)
            sign = torch.cat(
                [ones[:n] if item.reward > 0 else -ones[:n] for item, n in zip(retained, counts, strict=True)]
            )
            needed = torch.ones(len(retained), dtype=torch.bool)
            self._learn(
                retained, Credit(sign, ones, BatchCounts(len(retained), len(ones)), needed), self._poll(retained)
            )
        name = self._first_not_finite(gradients=True)
        bad = self.ranks.any(name is not None)
        name = name or ("another rank's part" if bad else None)  # all ranks say the same, or their halves differ
        self.begin()
        return None if name is None else f"its gradient of {name} is not finite"

    # ------------------------------------------------------------------ parts of a step

    def _accepted(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[tuple[str, str]]]:
        scorer = self.scorer
        return accepted(samples, scorer.vocabulary, scorer.positions, experts=scorer.replay is not None)

    def _complete(self, samples: list[Sample]) -> None:
        """A complete batch, whose advantages need all of it, in as many updates as the settings say."""
        before = self._poll(samples)
        rewards = self._with_before(samples, before)
        earned = credit(self.objective, rewards)
        for part in _parts(samples, self.settings.updates):
            chosen = _select(earned, samples, part)
            self._forget_gradients()
            self._learn([samples[i] for i in part], chosen, _pick(before, part))
            self._update(complete_divisor(self.objective, rewards, chosen.counts))

    def _learn(self, samples: list[Sample], earned: Credit, before: _Before) -> None:
        """Adds the gradients of these samples, not divided yet."""
        self._counts += earned.counts
        sampled = [sample.sampled for sample in samples]
        advantages, shares = earned.advantage.split(sampled), earned.share.split(sampled)
        returns = self._returns(samples, before)
        target = earned.needed.tolist()
        needed = [i for i, episode in enumerate(episodes(samples)) if target[episode] and sampled[i]]
        self._stats.computed += len(needed)
        for mine in self._micro_batches([samples[i] for i in needed]):
            rows = [needed[i] for one in mine for i in one.members]

            def gather(values: Sequence[Tensor] | None, rows: list[int] = rows) -> Tensor | None:
                if values is None:
                    return None
                chosen = [values[i] for i in rows] or [torch.zeros(0)]
                return torch.cat(chosen).float().to(self.ranks.device)

            advantage, share = gather(advantages), gather(shares)
            assert advantage is not None and share is not None
            packed = self._pack([samples[i] for i in rows], mine)
            scores = self.scorer(packed)
            if scores.new.requires_grad:
                scores.new.register_hook(self._metrics.note_slope)
            tokens = SampledTokens(
                scores.new, packed.engine, packed.sequence, advantage, share, scores.entropy,
                gather(before.proximal), gather(before.reference), scores.value, gather(before.value), gather(returns),
                scores.balance,
            )  # fmt: skip
            loss = self.objective.loss(tokens, self._metrics)
            (loss * self.ranks.averaged).backward()  # sharding takes the mean over ranks
            read = -(-len(packed.tokens) // self.ranks.context)
            self._stats.forward_tokens += read
            self._stats.padding_tokens += 0 if rows else read

    def _update(self, divisor: float) -> None:
        """Divides the gradient, bounds its norm, takes the step. Nothing infinite passes."""
        if self.critic_only:
            self._forget_gradients(but=optimisers.CRITIC)
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        if not gradients:  # nothing of the batch could bear any
            return
        self._metrics.sums[0] /= divisor * self.settings.updates  # the loss; nothing else has shares
        self._done, self._metrics = self._done + self._metrics, Metrics()
        torch._foreach_mul_([local(gradient) for gradient in gradients], 1.0 / divisor)
        norm = bound_norm(gradients, self.settings.max_norm, self.ranks)
        self._stats.grad_norm = float(norm)
        if not torch.isfinite(norm):
            name = self._first_not_finite(gradients=True)
            self._forget_gradients()
            raise TrainerFailed(
                f"the gradient of {name or 'what another rank has'} is not finite; the weights are as they were",
                hint="lower the rate, or continue from the last save",
            )
        for optimiser in self.optimisers:
            optimiser.step()
        self._forget_gradients()
        name = self._first_not_finite(gradients=False)
        if self.ranks.any(name is not None):
            raise TrainerFailed(
                f"{name or 'a weight of another rank'} is not finite after the step, which is not kept",
                hint="lower the rate, or continue from the last save",
            )

    def _forget_gradients(self, but: str | None = None) -> None:
        for name, parameter in self.scorer.named_parameters():
            if but is None or not name.startswith(but):
                parameter.grad = None

    def _first_not_finite(self, *, gradients: bool) -> str | None:
        for name, parameter in self.scorer.named_parameters():
            values = parameter.grad if gradients else parameter
            if values is not None and not torch.isfinite(local(values)).all():
                return name
        return None

    def _summary(self) -> Summary:
        largest = torch.zeros(self.ranks.batches, dtype=torch.float64)
        largest[self.ranks.batch] = self._done.largest
        return Metrics(self.ranks.sum(self._done.sums), float(self.ranks.sum(largest).max())).result()

    # ------------------------------------------------------------------ looks without gradients

    def _poll(self, samples: list[Sample]) -> _Before:
        """Everything that the objective wants to know about these samples before the weights change."""
        kl, critic = self.objective.kl, self.objective.value is not None
        result = _Before()
        penalised = kl is not None and kl.place == "reward"
        if self.settings.updates > 1 or penalised or critic:
            result.proximal, result.value = self._score(self.scorer, samples)
        if kl is not None or self.objective.advantage.baseline == "teacher":
            assert self.reference is not None
            result.reference, _ = self._score(self.reference, samples)
        return result

    @torch.no_grad()
    def _score(self, scorer: Scorer, samples: list[Sample]) -> tuple[list[Tensor], list[Tensor] | None]:
        """log π and values of every sample, on every rank."""
        counts = [sample.sampled for sample in samples]
        result = torch.zeros(2, sum(counts), dtype=torch.float64)
        starts = [0, *accumulate(counts)]
        for mine in self._micro_batches(samples):
            rows = [i for one in mine for i in one.members]
            scores = scorer(self._pack([samples[i] for i in rows], mine))
            where = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows] or [torch.zeros(0).long()])
            result[0, where] = scores.new.double().cpu()
            if scores.value is not None:
                result[1, where] = scores.value.double().cpu()
        result = self.ranks.sum(result)  # each token was computed by one rank, the others have 0 there
        values = None if scorer.critic is None else list(result[1].split(counts))
        return list(result[0].split(counts)), values

    def _micro_batches(self, samples: list[Sample]) -> Iterator[list[Family]]:
        """This rank's, possibly empty ones: all ranks take part in every round."""
        settings, ranks = self.settings, self.ranks
        same = SAME_ROUNDING if self.scorer.bf16 else 1
        tokens = [sample.tokens for sample in samples]
        lengths = [len(item) for item in tokens]
        if self.scorer.shares:
            count = ranks.batches
            minimum = math.lcm(count, same) if same > 1 or count == 1 else SPREAD * count
            made = families(tokens, [sample.group for sample in samples], budget=settings.budget, minimum=minimum)
        else:
            made = [Family((index,)) for index in range(len(samples))]
        sizes = [one.size(lengths) for one in made]
        for shared in plan(sizes, budget=settings.budget, ranks=ranks.batches, width=self.scorer.width, multiple=same):
            self.on_micro_batch()
            yield [made[number] for number in shared[ranks.batch]]

    def _pack(self, samples: list[Sample], made: list[Family]) -> PackedBatch:
        if not samples:
            return pack([EMPTY], device=self.ranks.device)
        return pack(samples, [(len(one.members), one.prefix) for one in made], device=self.ranks.device)

    def _with_before(self, samples: Sequence[Sample], before: _Before) -> Rewards:
        """Rewards with KL in them, the critic's values and the teacher's log-probabilities."""
        rewards = self._rewards(samples)
        kl, penalty = self.objective.kl, None
        if kl is not None and kl.place == "reward":
            assert before.proximal is not None and before.reference is not None
            penalty = kl.beta * divergence(kl.kind, torch.cat(before.proximal), torch.cat(before.reference))
        values = None if before.value is None else torch.cat(before.value)
        taught = None
        if self.objective.advantage.baseline == "teacher":
            assert before.reference is not None
            engine = torch.tensor([v for s in samples for v, bit in zip(s.logprobs, s.mask, strict=True) if bit])
            taught = on_policy_distillation(torch.cat(before.reference), engine.double())
        return replace(rewards, penalty=penalty, values=values, taught=taught)

    def _rewards(self, samples: Sequence[Sample]) -> Rewards:
        return rewards_of(samples, self.objective.overlong, turns=self.objective.advantage.credit == "turns")

    def _returns(self, samples: list[Sample], before: _Before) -> list[Tensor] | None:
        """What the critic should have said: advantages, not normalised, plus what it did say."""
        if before.value is None or self.objective.value is None:
            return None
        rewards = self._with_before(samples, before)
        assert rewards.values is not None
        result = gae(self.objective.advantage, rewards) + rewards.values
        return list(result.split([sample.sampled for sample in samples]))


def streams(objective: Objective, settings: OptimiserSettings) -> bool:
    """Whether gradients of some groups of a batch can be computed before the batch is complete."""
    return objective.streams and settings.updates == 1


def rewards_of(
    samples: Sequence[Sample],
    overlong: Overlong = Overlong(),  # noqa: B008 - frozen
    *,
    turns: bool = False,
) -> Rewards:
    """As objectives see samples: one entry for each episode, however many pieces it is in."""
    numbers: dict[str, int] = {}
    firsts: list[Sample] = []
    lengths: list[int] = []
    cut: list[bool] = []
    for sample, number in zip(samples, episodes(samples), strict=True):
        if number == len(firsts):
            firsts.append(sample)
            lengths.append(0)
            cut.append(False)
        lengths[number] += sample.sampled
        cut[number] |= sample.truncated
    groups = [numbers.setdefault(sample.group, len(numbers)) for sample in firsts]
    rewards, tokens = torch.tensor([sample.reward for sample in firsts], dtype=torch.float64), torch.tensor(lengths)
    return Rewards(
        overlong.of(rewards, tokens),
        torch.tensor(groups),
        tokens,
        earned=_earned(samples, firsts),
        truncated=torch.tensor(cut, dtype=torch.bool),
        turns=_turns(samples, overlong) if turns else None,
    )


def _turns(samples: Sequence[Sample], overlong: Overlong) -> TurnRewards:
    """Of all episodes, one after another. One without rewards of turns is one turn."""
    rewards: list[float] = []
    owners: list[int] = []
    of_token: list[int] = []
    lengths: dict[int, int] = {}
    numbers = episodes(samples)
    for sample, number in zip(samples, numbers, strict=True):
        lengths[number] = lengths.get(number, 0) + sample.sampled
    first = 0
    for at, (sample, number) in enumerate(zip(samples, numbers, strict=True)):
        own = sample.turn_rewards or [sample.reward]
        if at == 0 or numbers[at - 1] != number:
            first = len(rewards)
            total = torch.tensor([sample.reward], dtype=torch.float64)
            penalty = float(overlong.of(total, torch.tensor([lengths[number]])) - total)
            rewards += [*own[:-1], own[-1] + penalty]
            owners += [number] * len(own)
        turns = sample.turns or [0] * len(sample.tokens)
        of_token += [first + turn for turn, bit in zip(turns, sample.mask, strict=True) if bit]
    return TurnRewards(torch.tensor(rewards, dtype=torch.float64), torch.tensor(owners), torch.tensor(of_token))


def _earned(samples: Sequence[Sample], firsts: Sequence[Sample]) -> Tensor | None:
    """Advantages of tokens, where some group is a tree. Groups that are none keep the baseline of their mean."""
    if not any(sample.advantages for sample in samples):
        return None
    rewards: dict[str, list[float]] = {}
    for sample in firsts:
        rewards.setdefault(sample.group, []).append(sample.reward)
    result: list[float] = []
    for sample in samples:
        flat = sample.reward - fmean(rewards[sample.group])
        existing = sample.advantages or [flat] * len(sample.tokens)
        result += [value for value, bit in zip(existing, sample.mask, strict=True) if bit]
    return torch.tensor(result, dtype=torch.float64)


def _parts(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Indices of `count` parts of a batch, whole groups each, about equally many."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    parts: list[list[int]] = [[] for _ in range(min(count, len(groups)))]
    for number, indices in enumerate(groups.values()):
        parts[number % len(parts)] += indices
    return parts


def _select(earned: Credit, samples: Sequence[Sample], part: list[int]) -> Credit:
    """What a part of the batch has earned; its mean is over itself."""
    sizes, numbers = [sample.sampled for sample in samples], episodes(samples)
    advantages, shares = earned.advantage.split(sizes), earned.share.split(sizes)
    counted = [i for i in part if sizes[i] and shares[i].sum() > 0]
    return Credit(
        torch.cat([advantages[i] for i in part]),
        torch.cat([shares[i] for i in part]),
        BatchCounts(len({numbers[i] for i in counted}), sum(sizes[i] for i in counted)),
        earned.needed[list(dict.fromkeys(numbers[i] for i in part))],
    )


def _pick(before: _Before, part: list[int]) -> _Before:
    def of(values: list[Tensor] | None) -> list[Tensor] | None:
        return None if values is None else [values[i] for i in part]

    return _Before(of(before.proximal), of(before.reference), of(before.value))
