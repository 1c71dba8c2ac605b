"""Several environments in one run: which of them a prompt is of, which row of data it has, and who chooses.

Guarantee: a prompt's number says all: the same number is the same environment, row and seed in every process. A part is
played through its rows in a newly drawn order each time; which of them are held out its split says (splits).

::

    number of a prompt = seed * parts + part          seed from HELD_OUT on: evaluation, items that are held out
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout.environments import directory, splits
from rollout.environments.base import AgentSandbox, Build, Environment
from rollout.environments.rows import read_rows
from rollout.environments.splits import HELD_OUT, Split
from rollout.user_code import load as load_code
from sandbox.errors import Conflict, Invalid, NotFound

RECENT = 16  # groups of a part that its outcome is of


class MixturePart(msgspec.Struct, frozen=True, kw_only=True):
    """One environment of a mixture. Example: ``MixturePart(task="examples/fix_the_service", weight=3)``"""

    task: str  # directory or file
    name: str = ""  # else that of the task
    weight: float = 1.0  # of the prompts, among all weights
    rows: str | None = None  # JSON lines, a JSON list or CSV: `Environment.row` of each episode
    held_out: str | None = None  # rows to evaluate on, in a file of their own; else a share of `rows`


class PartOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a curriculum sees of a part: its newest whole groups."""

    name: str
    weight: float  # as the plan has it
    issued: int  # prompts, ever
    groups: int  # of the figures that follow, at most `RECENT`
    reward: float  # mean
    silent: float  # share of groups whose rewards are all equal: they teach nothing


Curriculum = Callable[[Sequence[PartOutcome]], Mapping[str, float]]


class Mixture:
    """``Mixture([MixturePart(task="a"), MixturePart(task="b")]).of(7)`` is an environment of part 1 for its seed 3."""

    def __init__(
        self,
        parts: Sequence[MixturePart],
        *,
        image: str | None = None,
        share: float = splits.SHARE,
        existing: Sequence[Split] | None = None,
    ):
        """`image`: instead of every environment's. `share`: of the items that is held out. `existing`: the splits that
        a
        run has written down; they must be of these very data."""
        self.tasks = [directory.load(Path(part.task)) for part in parts]
        self.parts = [
            msgspec.structs.replace(part, name=part.name or task.name)
            for part, task in zip(parts, self.tasks, strict=True)
        ]
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise Invalid(f"parts of one name: {', '.join(names)}", hint="give each a `name` of its own")
        if not all(0 <= part.weight < math.inf for part in parts) or not any(part.weight for part in parts):
            raise Invalid("weights must be finite, 0 or more, and one of them more", hint="set `weight`")
        self.rows = [_rows(part) for part in parts]
        self.image = image
        items = [self._items(number) for number in range(len(parts))]
        self.splits = list(existing) if existing is not None else splits.make(items, share)
        if len(self.splits) != len(items):
            raise Conflict("the run began with another number of parts", hint="begin a new run: --fresh")
        for split, item in zip(self.splits, items, strict=True):
            splits.need_same(split, item)

    def _items(self, number: int) -> splits.Items:
        part, rows = self.parts[number], self.rows[number]
        if rows is not None:
            keys = _keys(rows, part.rows or "")
            evaluated = 0 if part.held_out is None else len(read_rows(Path(part.held_out), minimum=1))
            return splits.Items(part=part.name, kind="rows", keys=keys, evaluated=evaluated)
        tasks = self.tasks[number].environment.identities()
        return splits.Items(part=part.name, kind="seeds" if tasks is None else "tasks", keys=tasks or ())

    def images(self) -> set[str]:
        if self.image:
            return {self.image}
        return set().union(*(task.environment.images() for task in self.tasks))

    def builds(self) -> dict[str, Build]:
        """Of these, those that are built where they are missing: see `Environment.builds`."""
        return {} if self.image else {name: at for task in self.tasks for name, at in task.environment.builds().items()}

    def name(self, number: int) -> str:
        """Of the part that a prompt's number is of."""
        return self.parts[number % len(self.parts)].name

    def environment(self) -> Environment:
        """What an episode manager asks for; see `Environment.of`."""
        if len(self.parts) == 1 and self.splits[0].kind == "seeds":
            return self._made(0)
        return MixtureEnvironment(self)

    def of(self, number: int) -> tuple[Environment, int]:
        part, seed = number % len(self.parts), number // len(self.parts)
        made, rows = self._made(part), self.rows[part]
        item, seed = self.splits[part].of(seed)
        if rows is not None:
            made.row = rows[item]
        return made.of(seed)

    def evaluates_on(self) -> list[str]:
        """Of each part, for people."""
        return [split.says for split in self.splits]

    def held_out(self, count: int) -> list[int]:
        """Numbers for an evaluation: as many of each part."""
        return [HELD_OUT * len(self.parts) + i for i in range(count)]

    def _made(self, part: int) -> Environment:
        made = self.tasks[part].environment()
        made.kind = made.kind or self.parts[part].name
        if self.image is not None:
            made.image = self.image
        return made


class MixtureEnvironment(Environment):
    """Which environment it is, is known once the prompt is."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture

    def of(self, seed: int) -> tuple[Environment, int]:
        return self.mixture.of(seed)

    async def reset(self, sandbox: AgentSandbox, seed: int) -> Any:
        raise NotImplementedError("ask `of` for the environment first")

    async def step(self, sandbox: AgentSandbox, action: str) -> Any:
        raise NotImplementedError("ask `of` for the environment first")


class Draw(Iterator[int]):
    """The prompts of a run, one after another, without end."""

    def __init__(
        self,
        mixture: Mixture,
        first: int,
        issued: Sequence[int],
        *,
        curriculum: Curriculum | None = None,
        outcomes: Callable[[], Sequence[tuple[int, float, float, float]]] = list,
    ):
        """`first` seed of each part; `issued` prompts of each so far; `outcomes` are (number, mean, least, greatest
        reward) of groups, newest first."""
        self.mixture, self.first, self.issued = mixture, first, list(issued)
        self.curriculum, self.outcomes = curriculum, outcomes

    def __next__(self) -> int:
        count = len(self.mixture.parts)
        rng = random.Random(f"{self.first}/{sum(self.issued)}")
        (part,) = rng.choices(range(count), self.weights())
        seed = (self.first + self.issued[part]) % HELD_OUT
        self.issued[part] += 1
        return seed * count + part

    def weights(self) -> list[float]:
        parts = self.mixture.parts
        if self.curriculum is None:
            return [part.weight for part in parts]
        chosen = dict(self.curriculum(self._outcomes()))
        unknown = set(chosen) - {part.name for part in parts}
        result = [float(chosen.get(part.name, 0.0)) for part in parts]
        if unknown or not all(0 <= weight < float("inf") for weight in result) or not any(result):
            raise Invalid(
                f"the curriculum says {chosen}",
                hint=f"return a weight from 0 up for {', '.join(part.name for part in parts)}, one of them above 0",
            )
        return result

    def _outcomes(self) -> list[PartOutcome]:
        observed = self.outcomes()
        result = []
        for index, part in enumerate(self.mixture.parts):
            own = [item for item in observed if item[0] % len(self.mixture.parts) == index][:RECENT]
            result.append(
                PartOutcome(
                    name=part.name,
                    weight=part.weight,
                    issued=self.issued[index],
                    groups=len(own),
                    reward=sum(mean for _, mean, _, _ in own) / max(1, len(own)),
                    silent=sum(low == high for _, _, low, high in own) / max(1, len(own)),
                )
            )
        return result


def _rows(part: MixturePart) -> list[dict[str, Any]] | None:
    """Those that are trained on, then those of a file of their own to evaluate on."""
    if part.rows is None:
        if part.held_out is not None:
            raise Invalid(f"{part.held_out} holds rows, and {part.task} has none", hint="set `rows` too")
        return None
    evaluated = [] if part.held_out is None else read_rows(Path(part.held_out), minimum=1)
    return read_rows(Path(part.rows), minimum=1 if evaluated else 2) + evaluated


def _keys(rows: Sequence[dict[str, Any]], source: str) -> list[str]:
    """Of each row. Refuses values that no process could hand to another."""
    result = []
    for number, row in enumerate(rows, 1):
        try:
            msgspec.msgpack.encode(row)
            result.append(splits.key(row))
        except (TypeError, ValueError, OverflowError) as error:
            raise Invalid(
                f"row {number} of {source} cannot be written down: {error}",
                hint="keep texts, numbers below 2**64, lists and tables of them; drop other columns",
            ) from None
    return result


def with_rows(kind: type[Environment], rows: Sequence[dict[str, Any]]) -> type[Environment]:
    """The environment whose episode `seed` has row number `seed`."""

    def of(self: Environment, seed: int) -> tuple[Environment, int]:
        self.row = rows[seed % len(rows)]
        return kind.of(self, seed)

    content = {"of": of, "distinct": classmethod(lambda _: len(rows)), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), content)


def load_curriculum(path: Path) -> Curriculum:
    """The function `weights` of a Python file."""
    if not path.is_file():
        raise NotFound(f"no curriculum {path}", hint="name a .py file that defines `weights`")
    result = getattr(load_code(f"pagurus_curriculum_{path.stem}", path), "weights", None)
    if not callable(result):
        raise Invalid(f"{path} defines no function `weights`", hint="def weights(outcomes): return {name: weight}")
    chosen: Curriculum = result
    return chosen
