"""The table: each published objective is one row of parts.

Pure.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from sandbox.errors import Invalid
from trainer.objectives.advantage import Advantage, Overlong
from trainer.objectives.aggregate import Aggregate
from trainer.objectives.correction import Correction
from trainer.objectives.losses import (
    DUAL,
    INFINITE,
    KL,
    Clip,
    Ratio,
    SampledTokens,
    Value,
    divergence,
    log_ratio,
    surrogate,
    value_loss,
)
from trainer.objectives.metrics import Metrics
from trainer.settings import ClipSettings, CorrectionSettings, ObjectiveSettings

T = TypeVar("T")
P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """loss = Σ_t share_t · (ℓ_t · Π corrections + β KL_t - entropy · H_t + balance · B_t + value loss_t).

    With corrections the ratio is taken against π_prox and the corrections bridge from there to the engine's policy;
    without, the ratio is taken against μ as the engine reported it.
    """

    source: str
    advantage: Advantage
    ratio: Ratio
    clip: Clip | None
    aggregate: Aggregate
    corrections: tuple[Correction, ...] = ()
    kl: KL | None = None
    value: Value | None = None
    drop_silent: bool = False  # groups whose rewards are all equal do not count at all (DAPO's dynamic sampling)
    entropy: float = 0.0  # coefficient of the bonus
    router_replay: bool = False  # see trainer.models.router_replay
    balance: float = 0.0  # coefficient of what makes experts be used evenly, see trainer.models.balance
    overlong: Overlong = Overlong()  # noqa: RUF009 - frozen

    @property
    def streams(self) -> bool:
        """Can gradients be summed while groups come in, and be divided once the batch is complete?

        Terms of KL, entropy and balance are not proportional to the advantage, so they must not meet a late divisor.
        """
        late_divisor = self.advantage.scale in ("batch", "within_groups")
        return not self.advantage.needs_batch and not (
            late_divisor and (self.kl is not None or self.entropy or self.balance)
        )

    def loss(self, tokens: SampledTokens, metrics: Metrics) -> Tensor:
        """The part of the batch's loss that these tokens make: a scalar. Adds to `metrics`."""
        old = tokens.before if self.corrections else tokens.engine
        item, bit = surrogate(self.ratio, self.clip, tokens, old)
        weight = torch.ones_like(tokens.engine)
        mismatch = tokens.before - tokens.engine
        for correction in self.corrections:
            weight = weight * correction.factor(mismatch, tokens.sequence)
        item = item * weight
        if self.kl is not None and self.kl.place == "loss":
            assert tokens.reference is not None, "a KL term needs log-probabilities of a reference"
            term = self.kl.beta * divergence(self.kl.kind, tokens.new, tokens.reference)
            item = item + (term * log_ratio(self.ratio, tokens, old).exp() if self.kl.weighted else term)
        if self.entropy:
            item = item - self.entropy * tokens.entropy
        if self.balance:
            assert tokens.balance is not None, "a balance of experts needs a model that says it"
            item = item + self.balance * tokens.balance
        if self.value is not None:
            item = item + value_loss(self.value, tokens)
        item = item * tokens.share
        metrics.add(tokens, item.detach(), bit, weight)
        return item.sum()


GROUP = Advantage(baseline="group", scale="group")
TOKEN, SEQUENCE, COMPLETE = Aggregate(kind="token"), Aggregate(kind="sequence"), Aggregate(kind="constant")

OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(
        source="arXiv 2402.03300, equations 3 and 4; β = 0.04, ε = 0.2",
        advantage=GROUP, ratio="token", clip=Clip(), aggregate=SEQUENCE, kl=KL(beta=0.04),
    ),
    "dr_grpo": Objective(
        source="arXiv 2503.20783, section 3.2; the constant L is the longest answer",
        advantage=Advantage(baseline="group"), ratio="token", clip=Clip(), aggregate=COMPLETE,
    ),
    "dapo": Objective(
        source="arXiv 2503.14476, equations 8 to 12; ε = 0.2 and 0.28",
        advantage=GROUP, ratio="token", clip=Clip(high=0.28), aggregate=TOKEN, drop_silent=True,
    ),
    "gspo": Objective(
        source="arXiv 2507.18071, equations 5 to 7; ε = 3e-4 and 4e-4",
        advantage=GROUP, ratio="sequence", clip=Clip(low=3e-4, high=4e-4), aggregate=SEQUENCE,
    ),
    "reinforce++": Objective(
        source="arXiv 2501.03262, section 3; KL in the reward, advantages normalised over the batch's tokens",
        advantage=Advantage(baseline="batch", scale="batch"), ratio="token", clip=Clip(), aggregate=TOKEN,
        kl=KL(beta=0.001, kind="k1", place="reward"),
    ),
    "rloo": Objective(
        source="arXiv 2402.14740, equation 9; the trajectory is one action",
        advantage=Advantage(baseline="leave_one_out"), ratio="none", clip=None, aggregate=COMPLETE,
    ),
    "ppo": Objective(
        source="arXiv 1707.06347, equations 7 and 9, with arXiv 1506.02438 for the advantages",
        advantage=Advantage(baseline="critic", scale="batch"), ratio="token", clip=Clip(), aggregate=TOKEN,
        value=Value(), kl=KL(beta=0.001, kind="k1", place="reward"),
    ),
    "lite_ppo": Objective(
        source="arXiv 2508.08221, section 5: group mean, deviation of the batch's rewards, mean over tokens",
        advantage=Advantage(baseline="group", scale="batch"), ratio="token", clip=Clip(), aggregate=TOKEN,
    ),
    "pooled": Objective(
        source="Lite PPO with the deviation within groups, and DAPO's wider upper clip: what the example trains with",
        advantage=Advantage(baseline="group", scale="within_groups"), ratio="token", clip=Clip(high=0.28),
        aggregate=TOKEN,
    ),
    "distill": Objective(
        source="on-policy distillation: the reverse KL to a teacher, token by token (arXiv 2306.08543, section 2.2)",
        advantage=Advantage(baseline="teacher"), ratio="token", clip=Clip(high=0.28), aggregate=TOKEN,
    ),
    "cispo": Objective(
        source="arXiv 2506.13585, equations 4 and 5; no lower bound, upper bound 5 as in arXiv 2510.13786",
        advantage=GROUP, ratio="token", clip=Clip(kind="weight", low=1.0, high=4.0), aggregate=TOKEN,
    ),
}  # fmt: skip

CORRECTIONS: dict[str, Correction] = {
    "tis": Correction(kind="token", high=2.0),
    "tis_sequence": Correction(kind="sequence", high=2.0),
    "icepop": Correction(kind="icepop", low=0.5, high=5.0),
    "sequence_mask": Correction(kind="sequence_mask", low=0.99, high=1.01),
    "decoupled": Correction(kind="token", high=5.0),
}


def named(name: str, *, length: int = 1) -> Objective:
    """A row of the table; `length` is the constant of Dr. GRPO. Unknown names are refused with the nearest one."""
    row = _lookup(OBJECTIVES, name, "objective")
    if name == "dr_grpo":
        return dataclasses.replace(row, aggregate=dataclasses.replace(row.aggregate, length=length))
    return row


def bounded(objective: Objective, dual: float = DUAL) -> Objective:
    """The row with a bound on the ratio of tokens with a negative advantage, unless it has one: without, a token that
    the engine reported as nearly impossible can be the whole gradient of a batch."""
    clip = objective.clip
    if not dual or clip is None or clip.kind != "minimum" or clip.dual != INFINITE:
        return objective
    return dataclasses.replace(objective, clip=dataclasses.replace(clip, dual=dual))


def build(settings: ObjectiveSettings, *, length: int = 1) -> Objective:
    """The preset with everything that the settings say otherwise. `length`: the constant of Dr. GRPO, unless set."""
    row = named(settings.preset, length=settings.length or length)
    mean = row.aggregate if settings.mean is None else Aggregate(kind=settings.mean, length=settings.length or length)
    row = dataclasses.replace(
        row,
        advantage=_advantage(row, settings),
        ratio=settings.ratio or row.ratio,
        clip=_clip(row, settings),
        aggregate=mean,
        kl=_kl(row, settings),
        drop_silent=row.drop_silent if settings.drop_silent is None else settings.drop_silent,
        entropy=settings.entropy,
        balance=settings.balance,
        router_replay=settings.router_replay,
        overlong=Overlong(**msgspec.structs.asdict(settings.overlong)),
    )
    critic = row.advantage.baseline == "critic"
    row = dataclasses.replace(
        row,
        value=_changed(row.value or Value(), settings.critic, "coefficient", "range", "rate", "warm_up")
        if critic
        else None,
    )
    dual = settings.clip.dual
    return with_corrections(bounded(row, DUAL if dual is None else dual), settings.corrections)


def _advantage(row: Objective, settings: ObjectiveSettings) -> Advantage:
    made = _changed(row.advantage, settings.advantage, "baseline", "scale", "credit", "discount", "trace")
    if made.credit == "turns" and not (made.baseline == "group" and made.scale in ("none", "group")):
        raise Invalid(
            f"{settings.preset} does not normalise rewards by the group, as credit by turns does",
            hint='objective.preset = "grpo" or "dr_grpo", or set objective.advantage.scale = "none"',
        )
    return made


def _changed(part: P, settings: msgspec.Struct, *names: str) -> P:
    result = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    return dataclasses.replace(part, **result)  # type: ignore[type-var]


def _clip(row: Objective, settings: ObjectiveSettings) -> Clip | None:
    """A preset without a clip gets one where a bound is set, and a ratio is there to be clipped."""
    changes = settings.clip
    if (settings.ratio or row.ratio) == "none":
        if any(value is not None for value in (changes.kind, changes.low, changes.high)):
            raise Invalid(f"{settings.preset} has no ratio to clip", hint='set objective.ratio = "token" as well')
        return None
    if row.clip is None and changes == ClipSettings(dual=changes.dual):
        return None
    return _changed(row.clip or Clip(), changes, "kind", "low", "high")


def _kl(row: Objective, settings: ObjectiveSettings) -> KL | None:
    changes = settings.kl
    if changes.beta == 0.0 or (row.kl is None and changes.beta is None):
        return None
    made = dataclasses.replace(
        _changed(row.kl or KL(beta=0.0), changes, "beta", "kind", "place"), weighted=changes.weighted
    )
    if made.weighted and (made.place == "reward" or (settings.ratio or row.ratio) == "none"):
        raise Invalid(
            "only a term of KL in a loss with a ratio can be weighted by it", hint="unset objective.kl.weighted"
        )
    return made


def with_corrections(objective: Objective, names: Sequence[str | CorrectionSettings]) -> Objective:
    """The row with these corrections. Example: ``with_corrections(named("dapo"), ["tis"])``."""
    chosen = [CorrectionSettings(name=item) if isinstance(item, str) else item for item in names]
    result = tuple(_changed(_lookup(CORRECTIONS, item.name, "correction"), item, "low", "high") for item in chosen)
    if result and objective.ratio == "none":
        raise Invalid("an objective without a ratio takes no corrections", hint="name one with a ratio, as dapo")
    return dataclasses.replace(objective, corrections=result)


def _lookup(table: Mapping[str, T], name: str, what: str) -> T:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.0)
    raise Invalid(f"no {what} {name!r}", hint=f"nearest: {near[0]}; there are: {', '.join(table)}")
