"""`Environment` and `Observation`: what a researcher writes.

Guarantee: text is tokenised exactly once, by `encode_observation`, when it enters a trajectory (I8).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollout.rewards.messages import Scoring, as_number
from sandbox.messages import ExecResult, Limits, Network


@dataclass(frozen=True)
class Observation:
    """What the agent gets to see. `reward` is of this turn; they add up, and `Environment.reward` adds the end's."""

    text: str
    reward: float = 0.0
    done: bool = False
    back_to: int | None = None  # before the agent reads this, its sandbox goes back to the state before that turn
    info: dict[str, Any] = field(default_factory=dict)
    results: tuple[
        str, ...
    ] = ()  # of each call of the answer, where several were carried out; else `text` is the first's

    def __post_init__(self) -> None:
        """Numbers of other libraries become Python's, which the run can write down. What is none is refused here, where
        the environment's code is in the traceback."""
        for text in (self.text, *self.results):
            if not isinstance(text, str):
                raise TypeError(f"an Observation has {text!r:.60} where a text must be")
        reward = as_number(self.reward, "Observation.reward")
        if not math.isfinite(reward):
            raise ValueError(f"Observation.reward is {reward}")
        object.__setattr__(self, "reward", reward)
        object.__setattr__(self, "done", bool(self.done))


@dataclass(frozen=True)
class Build:
    """How an image comes to be that a host does not have."""

    directory: Path  # of its Dockerfile
    seconds: float = 600.0  # that may take


class ComposeFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Compose files of which a sandbox is made (see :meth:`sandbox.Client.compose`). The agent works in `main`."""

    files: list[str]  # merged in this order
    directory: str  # where their paths begin
    digest: str  # of all that is in there
    main: str = "main"
    defaults: dict[str, Any] = {}  # what the service `main` is where the files do not say
    variables: dict[str, str] = {}


class AgentSandbox(Protocol):
    """What `reset` and `step` get: a sandbox of the SDK behind the gate of its turns, or a stand-in for one."""

    @property
    def files(self) -> Any: ...

    @property
    def exec(self) -> Callable[..., Awaitable[ExecResult]]: ...


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


# Who makes the environment sets these again.
_SETTINGS = (
    "kind",
    "image",
    "compose",
    "max_turns",
    "limits",
    "network",
    "system",
    "tools",
    "row",
    "shares_reset",
    "reward",
    "seconds",
)


class Environment(ABC):
    """One instance serves one episode. `reset`, `step` and `cut` may be plain functions.

    The sandbox that `reset` and `step` receive has the SDK's `exec` and `files`. Should it die, it is restored and
    the command at hand executed again before the call returns: keep what an episode must not lose in the sandbox,
    or in attributes derived from results.
    """

    kind: str = ""  # what trajectories of it have in common that need the same of engines; "": the name of its class
    image: str = "debian"  # "": it needs no sandbox
    compose: ComposeFiles | None = None  # instead of an image, the services of which its sandbox consists
    max_turns: int = 8
    seconds: float | None = None  # of all its commands together; None: as the run says
    limits: Limits = Limits()
    network: Network = Network.none()
    system: str = ""  # what a chat model is shown first
    tools: Sequence[dict[str, Any]] = ()  # functions that a chat model may call, as OpenAI describes them
    shares_reset: bool = True  # one reset per seed, forked for all who begin there; False: each sandbox is reset itself
    reward: Scoring | None = None  # scores the end, in a fork of the sandbox: see rollout.rewards
    row: dict[str, Any] | None = None  # of the run's data, where its plan names some: set before `reset`

    @property
    def sandboxed(self) -> bool:
        """Its episodes have a sandbox."""
        return bool(self.image) or self.compose is not None

    def of(self, seed: int) -> tuple[Environment, int]:
        """The environment that plays this seed, and the seed that it is reset with. Override it to choose an image, or
        another environment, by the seed: no sandbox is there yet."""
        return self, seed

    @classmethod
    def images(cls) -> set[str]:
        """All that its episodes may start from."""
        return {cls.image} - {""}

    @classmethod
    def builds(cls) -> dict[str, Build]:
        """Of these images, those that are built where they are missing."""
        return {}

    @classmethod
    def distinct(cls) -> int | None:
        """How many episodes differ: seeds from there on are those from 0 on again. None: any number."""
        return None

    @classmethod
    def identities(cls) -> list[str] | None:
        """Of each of the `distinct` episodes, what it is: a digest of its content, so that a copy of it elsewhere is
        held out where it is. None: seeds are all that there is."""
        count = cls.distinct()
        return None if count is None else [f"{cls.__module__}.{cls.__qualname__} {n}" for n in range(count)]

    def oracle(self, seed: int) -> list[str] | None:
        """Actions that earn the full reward of this seed, where they are known."""
        return None

    @abstractmethod
    async def reset(self, sandbox: AgentSandbox, seed: int) -> Observation:
        """Prepare the sandbox for the episode `seed`; the first observation.

        Run once for all episodes of a seed, which then begin in forks of the sandbox, with what `snapshot` returned for
        this object. Where each needs a reset of its own (it draws from outside, or signs in somewhere), set
        ``shares_reset = False``.
        """

    @abstractmethod
    async def step(self, sandbox: AgentSandbox, action: str) -> Observation:
        """Execute the agent's action in the sandbox."""

    async def cut(self, sandbox: AgentSandbox, action: str) -> Observation | None:
        """The action reached the token limit before it was complete, and is not executed. None: the episode ends."""
        return None

    async def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what this object opened outside the sandbox. Called once when it is needed no more, however its
        episode ended; not where the process that plays it is killed."""

    def snapshot(self) -> bytes | None:
        """What this object keeps, so that another process can continue the episode; None: none can.

        The default knows attributes of plain values (numbers, texts, lists and dicts of them). Override both methods
        where there is more.
        """
        state = {name: value for name, value in vars(self).items() if name not in _SETTINGS}
        try:
            raw = msgspec.msgpack.encode(state)
        except (TypeError, OverflowError):
            return None
        return raw if msgspec.msgpack.decode(raw) == state else None

    def load(self, state: bytes) -> None:
        """Become what `snapshot` saw."""
        for name, value in msgspec.msgpack.decode(state).items():
            setattr(self, name, value)

    def encode_observation(self, tokenizer: Tokenizer, observation: Observation, first: bool) -> list[int]:
        """Tokens of an observation; `first` for the prompt that opens the episode."""
        return tokenizer.encode(observation.text)

    def read_action(self, content: str, calls: Sequence[tuple[str, str]]) -> str:
        """The action in a chat model's answer: the only argument of its first call, or what it said.

        `calls` are names with their arguments as JSON.
        """
        if not calls:
            return content
        values = msgspec.json.decode(calls[0][1])
        only = list(values.values()) if isinstance(values, dict) else []
        return only[0] if len(only) == 1 and isinstance(only[0], str) else calls[0][1]

    def decode_action(self, tokenizer: Tokenizer, token_ids: list[int]) -> str:
        """The action's text. `token_ids` has no stop token. The ids themselves, not this text, go to the loss."""
        return tokenizer.decode(token_ids)
