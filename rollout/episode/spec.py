"""Which episode, within which limits, sampled by which seeds. Values, no behaviour."""

from __future__ import annotations

import hashlib

import msgspec

from rollout.decide.ranges import Count, Positive
from rollout.store.journal import Key


class PhaseTimeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds per phase, each on a clock of its own. Only `step` is the trajectory's."""

    create: Positive = 300.0  # of a sandbox
    reset: Positive = 120.0  # of an environment
    generate: Positive = 1800.0  # of one answer, queueing and engine restarts included
    step: Positive = 300.0  # of a trajectory's own commands together
    score: Positive = 60.0  # of a reward function


class EpisodeLimits(PhaseTimeouts, frozen=True, kw_only=True):
    """Seconds per phase, and tokens."""

    max_length: Count = 1024  # tokens of a trajectory
    max_observation: int | None = None  # tokens of one observation; longer ones are cut. None: half of `max_length`

    @property
    def observed(self) -> int:
        """Tokens of an observation, at most."""
        return self.max_observation or max(16, self.max_length // 2)


class EpisodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which episode. `start` counts the attempts at it."""

    prompt: str
    seed: int
    index: int = 0
    start: int = 0

    @property
    def key(self) -> Key:
        return Key(self.prompt, self.index, self.start)


def sampling_seed(base: int | None, spec: EpisodeSpec, turn: int) -> int | None:
    """A seed of its own for every answer: siblings of one group must not sample the same."""
    if base is None:
        return None
    name = f"{base}/{spec.prompt}/{spec.index}/{spec.start}/{turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
