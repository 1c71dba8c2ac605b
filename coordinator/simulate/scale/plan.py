"""What a plan of a large run says: GPUs, model, trainer, engines, trajectories, publication, links. Pure.

Guarantee: bounds stand in the types; what is wrong is refused by the name of its key.

::

    plan.toml ─▶ parse ─▶ ScalePlan ─▶ memory, traffic, timing ─▶ report
"""

from __future__ import annotations

import tomllib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.simulate.scale import references
from coordinator.simulate.scale.references import GPUS, MODELS, GpuKind
from coordinator.simulate.scale.shapes import FP32, ModelShape
from daemon.wording import plain
from rollout.decide.engines.routing import RoutingRules
from rollout.decide.ranges import Count, Fraction, Natural, NotNegative, Positive
from sandbox.errors import Invalid

Bytes = Annotated[int, Meta(ge=1, le=8)]


class ScaleTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a plan. `source`: where its figures come from; it is printed."""

    source: str = ""


class TrainerLayout(ScaleTable, frozen=True, kw_only=True):
    """FSDP2 over `gpus / tensor` ranks; experts lie on `expert` of them each."""

    gpu: str
    gpus: Count
    tensor: Count = 1
    expert: Count = 1
    micro_batch: Count = 32_768  # tokens of a rank at a time
    weight_bytes: Bytes = FP32
    gathered_bytes: Bytes = FP32  # of a weight on its way to other ranks, and of those that a rank has complete
    gradient_bytes: Bytes = FP32
    optimiser_bytes: Bytes = 8
    bf16: bool = True  # activations
    recompute: bool = True
    reached: Fraction | None = None  # share of the FLOP; None: as published for such a model
    epochs: Count = 1  # updates of a batch


class PoolLayout(ScaleTable, frozen=True, kw_only=True):
    """Engines on `tensor` GPUs each."""

    gpu: str
    gpus: Count
    tensor: Count = 1
    slots: Count = 256  # answers of an engine at once
    reserved: Fraction = references.RESERVED[0]  # share of a GPU's memory that an engine takes
    working_gib: NotNegative = 4.0  # of that for activations, graphs and buffers


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-normal; `deviation` of the logarithm, `limit` 0: none."""

    mean: Positive
    deviation: NotNegative = 0.0
    limit: NotNegative = 0.0


class TrajectoryPlan(ScaleTable, frozen=True, kw_only=True):
    """What is played for a step: `groups` prompts of `size` trajectories."""

    groups: Count
    size: Count
    in_flight: Count  # trajectories at once
    staleness: Natural = 1
    over_stale: Literal["wait", "mask"] = "wait"
    tail: NotNegative = 0.0
    prompt: Positive = 2_000.0  # tokens that a trajectory begins with
    turns: Spread = Spread(mean=20.0)
    read: Spread = Spread(mean=500.0)  # tokens of a turn's observation
    written: Spread = Spread(mean=200.0)  # tokens of a turn's answer
    tool_s: Spread = Spread(mean=2.0)  # of a turn
    reward_s: NotNegative = 0.0  # of a trajectory
    length: Count = 32_768  # tokens; a longer trajectory is cut


class RoutingPlan(ScaleTable, frozen=True, kw_only=True):
    """When a trajectory leaves the engine that has its cache: see rollout.decide.engines.routing."""

    overload: Positive = RoutingRules().overload
    headroom: Natural = RoutingRules().headroom

    @property
    def rules(self) -> RoutingRules:
        return RoutingRules(overload=self.overload, headroom=self.headroom)


class PublicationPlan(ScaleTable, frozen=True, kw_only=True):
    changed: Fraction = references.CHANGED[0]  # share of the bf16 values that a step changes
    change_bytes: Positive = references.CHANGE[0]  # of a changed value, with its position, compressed
    image_bytes: Positive = references.IMAGE[0]  # of a value in a complete image, compressed
    encoded: Positive = references.ENCODED[0]  # bytes of weights per second and process
    pulled: Positive = references.PULLED[0]  # bytes of weights per second and engine GPU
    ranks: bool = True  # each rank publishes its rows; else one process all of them, as `pagurus train` does
    complete: bool = False  # whole images instead of changes


class NetworkPlan(ScaleTable, frozen=True, kw_only=True):
    between: Positive = references.BETWEEN[0]  # bytes per second between trainer and engines
    disk: Positive = references.DISK[0]  # bytes per second of a training machine
    latency_s: NotNegative = references.LATENCY[0]  # of a collective among an engine's GPUs


class ScalePlan(ScaleTable, frozen=True, kw_only=True):
    """A whole plan. `gpus`, `models`: kinds of its own, in addition to those of references.py."""

    name: str
    model: str
    trainer: TrainerLayout
    pools: Annotated[list[PoolLayout], Meta(min_length=1)]
    workload: TrajectoryPlan
    publication: PublicationPlan = PublicationPlan()
    network: NetworkPlan = NetworkPlan()
    routing: RoutingPlan = RoutingPlan()
    gpus: dict[str, GpuKind] = {}
    models: dict[str, ModelShape] = {}

    @property
    def shape(self) -> ModelShape:
        return {**MODELS, **self.models}[self.model]

    def gpu(self, name: str) -> GpuKind:
        return {**GPUS, **self.gpus}[name]

    @property
    def ranks(self) -> int:
        """Over which the trainer's weights are spread by FSDP."""
        return self.trainer.gpus // self.trainer.tensor

    @property
    def batch(self) -> int:
        return self.workload.groups * self.workload.size

    @property
    def reached(self) -> tuple[float, str]:
        """Share of the trainer's FLOP, and its source."""
        if self.trainer.reached is not None:
            return self.trainer.reached, self.trainer.source or "the plan"
        return references.MIXTURE if self.shape.experts else references.DENSE


def parse(text: str, name: str = "the plan") -> ScalePlan:
    """Raises Invalid, with the key, for what is no plan.

    >>> parse("model = 3")
    Traceback (most recent call last):
    sandbox.errors.Invalid: the plan: model must be text, not a whole number
    """
    try:
        plan = msgspec.convert(tomllib.loads(text), ScalePlan)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"{name} is no TOML: {error}", hint="see examples/plans") from None
    except msgspec.ValidationError as error:
        raise Invalid(f"{name}: {plain(error)}", hint="see examples/plans") from None
    need_fitting(plan, name)
    return plan


def need_fitting(plan: ScalePlan, name: str) -> None:
    """Refuses names that there are not, and layouts that do not divide."""
    kinds, models = {**GPUS, **plan.gpus}, {**MODELS, **plan.models}
    if plan.model not in models:
        raise Invalid(
            f"{name}: model: no shape of {plan.model!r}", hint=f"one of {', '.join(models)}, or [models.NAME]"
        )
    used = {"trainer": plan.trainer.gpu} | {f"pools[{n}]": pool.gpu for n, pool in enumerate(plan.pools)}
    for key, kind in used.items():
        if kind not in kinds:
            raise Invalid(f"{name}: {key}.gpu: no kind {kind!r}", hint=f"one of {', '.join(kinds)}, or [gpus.NAME]")
    for key, gpus, by in (
        ("trainer.tensor", plan.trainer.gpus, plan.trainer.tensor),
        ("trainer.expert", plan.ranks, plan.trainer.expert),
        *((f"pools[{n}].tensor", pool.gpus, pool.tensor) for n, pool in enumerate(plan.pools)),
    ):
        if gpus % by:
            raise Invalid(f"{name}: {key} is {by}, which does not divide {gpus}", hint="set a divisor of the GPUs")
    if plan.trainer.expert > 1 and plan.trainer.expert > plan.shape.experts:
        raise Invalid(f"{name}: trainer.expert is more than the experts of {plan.model}", hint="set 1 to its experts")
