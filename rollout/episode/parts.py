"""What episodes are played with, and how one ends early."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollout.decide.blame import EpisodePhase, TrajectoryFailure
from rollout.decide.effects import EffectRules
from rollout.engine.client import Generation, Sampling
from rollout.environments.base import Observation, Tokenizer
from rollout.episode.renderer import Renderer
from rollout.episode.spec import EpisodeLimits
from rollout.episode_clock import PhaseMeter
from rollout.messages import Trajectory, TurnRecord
from rollout.store.journal import Key, TurnEntry


class Generator(Protocol):
    """What generates: an `EngineClient`, an `EngineSupervisor`, a pool of them."""

    def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Awaitable[Generation]: ...


class Notes(Protocol):
    """Where turns are written down before they are executed: a `Journal`, off the event loop."""

    async def append(self, key: Key, entry: TurnEntry) -> None: ...

    async def restored(self, key: Key, turn: int, epoch: str) -> None: ...


OnTurn = Callable[[Trajectory, TurnRecord], None]


class EpisodeEnd(Exception):
    """The episode ends here, for a reason that is known."""

    def __init__(self, failure: TrajectoryFailure):
        super().__init__(str(failure))
        self.failure = failure


@dataclass(kw_only=True)
class EpisodeParts:
    """What episodes are played with."""

    engine: Generator
    tokenizer: Tokenizer
    renderer: Renderer | None = None  # of a chat model: observations and answers are then messages
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    notes: Notes | None = None
    meter: PhaseMeter | None = None
    on_turn: OnTurn | None = None
    visitable: bool = False  # the last state is captured too
    effects: EffectRules | None = None  # which changed files are requested at the end

    def metered(self, phase: EpisodePhase) -> contextlib.AbstractContextManager[None]:
        """Time within is of this phase."""
        return self.meter.phase(phase) if self.meter is not None else contextlib.nullcontext()


async def returned(said: Observation | Awaitable[Observation | None] | None, method: str) -> Observation | None:
    """What a method of an environment, which may be a plain function, returned. Raises TypeError."""
    result = await said if isinstance(said, Awaitable) else said
    if result is not None and not isinstance(result, Observation):
        raise TypeError(f"{method} returned {result!r:.60}, which is no Observation")
    return result


async def observed(said: Observation | Awaitable[Observation | None] | None, method: str) -> Observation:
    """The same, where there must be one."""
    result = await returned(said, method)
    if result is None:
        raise TypeError(f"{method} returned None, which is no Observation")
    return result
