"""`RolloutPlan`: the input of the rollout's process, as `plan.json` of the run directory has it under ``rollout``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollout.config import RolloutConfig
from rollout.decide.engines.devices import DevicePlacement
from rollout.decide.engines.options import check_options
from rollout.decide.engines.routing import RoutingRules
from rollout.environments import splits
from rollout.environments.mixture import Mixture, MixturePart
from rollout.rewards.messages import Scoring
from rollout.rewards.weighted import RewardPlan, planned
from sandbox.errors import Invalid, NotFound
from sandbox.messages.cluster import JobShape

NAME = "plan.json"
Dtype = Literal["auto", "float32", "bfloat16"]


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine servers a run uses. Example: ``PoolPlan(engines=2)``"""

    engines: Annotated[int, msgspec.Meta(ge=1, le=64)] = (
        1  # servers that the run starts: on its machine, or as parts of a job
    )
    urls: list[str] = []  # servers run by others, which can read the run's weights
    hardware: list[str] = []  # of each url, such as "H20"
    slots: Annotated[int, msgspec.Meta(ge=1)] = 64  # concurrent requests of each server
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1  # of each server that the run starts
    transfer: bool = False  # vLLM on GPUs writes changes of weights in place
    dtype: Dtype = "auto"  # auto: vLLM on a GPU in bfloat16, all others in float32
    parallel: Annotated[int, msgspec.Meta(ge=1)] = 1  # GPUs of each vLLM server
    gpus: list[list[int]] = []  # of each server, as nvidia-smi counts; else free ones
    options: dict[str, Any] = {}  # of vLLM's command line: {gpu_memory_utilization = 0.8}
    overload: Annotated[float, msgspec.Meta(ge=1)] = (
        RoutingRules().overload
    )  # times the least load, at which a server loses trajectories
    headroom: Annotated[int, msgspec.Meta(ge=0)] = RoutingRules().headroom  # and this many requests more

    @property
    def rules(self) -> RoutingRules:
        return RoutingRules(overload=self.overload, headroom=self.headroom)

    def __post_init__(self) -> None:
        check_options(self.options)
        if self.hardware and len(self.hardware) != len(self.urls):
            raise ValueError(f"`hardware` is of each of `urls`: {len(self.hardware)} for {len(self.urls)}")


class SuitePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table ``[[suites]]``: another environment that a run is evaluated on during training.

    Example: ``SuitePlan(name="repair", task="examples/fix_the_service", episodes=16)``
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]+$")]  # in metrics
    task: str  # directory or file of an environment; scored by its own reward
    episodes: Annotated[int, msgspec.Meta(ge=1)] = 64  # its seeds from 0 on
    samples: Annotated[int, msgspec.Meta(ge=1)] = 1  # of each seed


class SharePlan(JobShape, frozen=True, kw_only=True):
    """The table ``[share]`` of a run that takes turns with others. Example: ``SharePlan(rollout=60, train=40)``"""

    at: str = ""  # socket or URL of the coordinator; else that of PAGURUS_HOST


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Example: ``RolloutPlan(task="examples/fix_the_service", config=RolloutConfig(groups=8))``"""

    task: str  # directory or file whose environment is played
    config: RolloutConfig
    mixture: list[MixturePart] = []  # several environments instead of `task`
    curriculum: str | None = None  # a Python file whose `weights` chooses among them
    engine: str = "embedded"  # or vllm
    pool: PoolPlan = PoolPlan()
    template: dict[str, Any] = {}  # options of the chat template
    host_timeout: float = 300.0  # seconds for which a run that has begun waits for its host
    devices: DevicePlacement = DevicePlacement()  # which GPUs its servers and the trainer's ranks have
    lora: int = 0  # rank of the adapters that are published instead of weights; 0: weights
    router_replay: bool = False  # answers name the experts of each token, for the trainer
    image: str | None = None  # instead of the environment's
    pace: float = 0.0  # seconds per answer, at least: see rollout.episode.pace
    steps: int = 0  # of the trainer
    nice: int = 5  # of rollout, engine and trainer: sandboxes and their checkpoints come first
    sizing: str = ""  # why so many sandboxes at once, such a pace, so nice
    handover: bool = False  # the trainer works on the engines' machines: see rollout.decide.engines.handover
    share: SharePlan | None = None  # whom it takes turns with on the same machines: see rollout.service.phases
    scorers: Annotated[int, msgspec.Meta(ge=1)] = 2  # concurrent reward functions
    rewards: list[RewardPlan] = []  # by which episodes are scored; empty: by that of their environment
    faults: int = 0  # sandboxes killed on purpose in the second half of the steps, about

    def scoring(self, own: Scoring | None) -> Scoring | None:
        """By what an episode is scored whose environment has this reward."""
        return planned(self.rewards, own)

    def environments(self, run: Path) -> Mixture:
        """What is played: the mixture, or the one task; split as the run directory says."""
        return Mixture(self.mixture or [MixturePart(task=self.task)], image=self.image, existing=splits.read(run))


class _Plan(msgspec.Struct):
    rollout: RolloutPlan


def read_plan(run: Path) -> RolloutPlan:
    """The rollout's part of the plan of a run directory."""
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=_Plan).rollout
    except FileNotFoundError:
        raise NotFound(f"{run} is not a run directory", hint="name a directory below runs/") from None
    except msgspec.MsgspecError as error:
        raise Invalid(f"{run / NAME} is no plan: {error}", hint="begin a new run") from error
