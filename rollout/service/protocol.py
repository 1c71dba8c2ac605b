"""Every struct that crosses between a trainer and a rollout, headed "A -> B". msgpack over a Unix socket or TCP.

Batches and weights travel by reference: a batch names prompts and members, whose samples are fetched as the store has
them; a version names its manifest. Each call may be sent again: one that was carried out already is answered as before.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rollout.engine.client import Sampling
from rollout.messages import Trajectory
from rollout.store.samples import Fence

SOCKET = "rollout.sock"  # in the directory of roles
TOKEN = "rollout.token"  # next to it, where TCP is served
ADDRESS = "rollout.at"  # next to it, where roles on other machines connect: its URL


def method(request: type[Any]) -> str:
    """The handler's method, and the path, of a request. Example: ``method(OpenTrainer) == "open_trainer"``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", request.__name__).lower()


class PublishedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Published weights. `digest` names the version's manifest, which names the hash of each of its parts."""

    version: int
    directory: str  # of versions (rollout.weights.store)
    digest: str


# --------------------------------------------------------------------------- trainer -> rollout


class OpenTrainer(msgspec.Struct, kw_only=True):
    """A trainer begins, after `step` saved steps. All trainers before it are fenced off. Answer: `Fence`."""

    step: int


class Publish(msgspec.Struct, kw_only=True):
    """Have the engines serve this version. The answer says that it was written down, not that it is served."""

    fence: Fence
    ref: PublishedVersion


class Take(msgspec.Struct, kw_only=True):
    """The batch of a step; waits until there is one. Answer: `BatchReference`."""

    fence: Fence
    step: int


class Complete(msgspec.Struct, kw_only=True):
    """Groups that wait for a batch, but `without`. Answer: `BatchReference`."""

    fence: Fence
    without: list[str] = []


class Ack(msgspec.Struct, kw_only=True):
    """The step is saved: its prompts are consumed for good."""

    fence: Fence
    step: int
    ess: float | None = None  # effective sample size of its batch, as a share


class Evaluate(msgspec.Struct, kw_only=True):
    """Play these episodes, which no store knows. `last`: no further batch will be requested. Answer:
    `EvaluationResult`."""

    fence: Fence
    seeds: list[int]
    last: bool = False
    sampling: Sampling | None = None  # instead of that of training; tokens that end an answer stay the run's
    samples: int = 1  # episodes of each seed


class FinishRun(msgspec.Struct, kw_only=True):
    """The run is over: remove all its sandboxes. Answer: `RolloutCounters`."""

    fence: Fence


class Count(msgspec.Struct, kw_only=True):
    """What was counted so far. Answer: `RolloutCounters`."""


# --------------------------------------------------------------------------- rollout -> keeper of an engine elsewhere


class Serving(msgspec.Struct, kw_only=True):
    """Where the engine serves; waits until it does. Answer: `ServedAddress`."""


class Fetch(msgspec.Struct, kw_only=True):
    """Have a version on that machine before it is served; requests continue. Answer: `Done`."""

    version: int


class ServeVersion(msgspec.Struct, kw_only=True):
    """Serve this version. Answer: `rollout.engine.client.PublishResult`."""

    directory: str  # of versions
    version: int


class RestartEngine(msgspec.Struct, kw_only=True):
    """The engine hangs: end it, and start another. Answer: `Done`."""


# --------------------------------------------------------------------------- keeper -> rollout


class ServedAddress(msgspec.Struct, kw_only=True):
    url: str


# --------------------------------------------------------------------------- rollout -> trainer


class GroupReference(msgspec.Struct, kw_only=True):
    """A group, by reference. Sent back, it asks for its samples; answer: `Payloads`."""

    prompt: str
    seed: int
    members: list[int]


class BatchReference(msgspec.Struct, kw_only=True):
    """A batch, by reference. `spent`: trajectory-seconds by phase while the call waited."""

    step: int
    version: int
    oldest: int
    groups: list[GroupReference]
    spent: dict[str, float] = {}
    paused_s: float = 0.0  # of the engines, for the version before this batch
    sync: dict[str, float] = {}  # bytes that an engine fetched for that version, and seconds by phase


class Payloads(msgspec.Struct):
    """Samples as the store has them: msgpack, compressed with zstandard."""

    samples: list[bytes]


class EvaluationResult(msgspec.Struct):
    trajectories: list[Trajectory]


class Done(msgspec.Struct):
    """It was carried out, and is on disk."""


class RolloutCounters(msgspec.Struct, kw_only=True):
    """What a rollout's process counted since it was `born`. Numbers only grow, but the last four."""

    born: float
    killed: int = 0
    recovered_equal: int = 0
    trajectories_lost: int = 0
    trajectories_retried: int = 0
    verdicts: dict[str, int] = {}  # of turns
    first_turn: float | None = None  # when the first turn had ended
    version: int = -1  # served; -1: none yet
    in_flight: int = 0  # checkpoints
    queued: int = 0
    waits: list[str] = []  # who waits for what
