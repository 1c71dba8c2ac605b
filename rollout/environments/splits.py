"""Which episodes are trained on and which are held out: a value of the data, made once and written down.

Pure but for `write` and `read`. Guarantee: no seed, training part or restart changes a split. An item of the data (a
row, a task) is held out by what it is, not by where it stands: equal items are on the same side, in every part of a
mixture. Environments without items train on seeds below `HELD_OUT` and are evaluated on seeds from there on, whatever
the run's seed.

::

    part's rows or tasks ─▶ keys (digests of content) ─▶ a share of the distinct keys, lowest hash first ─▶ held
                                                  any part that has a held key holds its item out as well
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from sandbox import durable
from sandbox.errors import Conflict, Invalid, NotFound

HELD_OUT = 1_000_000_000  # seeds from here on are for evaluation alone; demonstrations use negative ones
SHARE = 0.1  # of the items of a part
FILE = "splits.json"


class Items(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a part. Example: ``Items(part="repair", kind="rows", keys=["5f3a...", "77b0..."])``"""

    part: str
    kind: Literal["rows", "tasks", "seeds"]
    keys: Sequence[str] = ()  # of each item; none where episodes are seeds
    evaluated: int = 0  # of these the last so many were named for evaluation alone


class Split(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Of one part. Example: 12 tasks, ``Split(part="a", kind="tasks", count=12, digest="...", held=[3])``"""

    part: str
    kind: Literal["rows", "tasks", "seeds"]
    count: int = 0  # items
    digest: str = ""  # of all items
    held: list[int] = []  # numbers of items that are evaluated on
    left_out: list[int] = []  # neither: equal to one that another file names for evaluation
    named: bool = False  # the held ones come from a file of their own
    on_training: bool = False  # nothing is held out, as the plan says: evaluations play what is trained on

    @functools.cached_property
    def training(self) -> np.ndarray:
        """Numbers of the items that are trained on."""
        return np.setdiff1d(np.arange(self.count), np.array([*self.held, *self.left_out], dtype=np.int64))

    def trained(self, seed: int) -> tuple[int, int]:
        """Item and reset seed of a training episode. All items are played, in another order each time through."""
        if self.kind == "seeds":
            return 0, seed % HELD_OUT
        allowed = self.training
        through, place = divmod(seed % HELD_OUT, len(allowed))
        item = int(allowed[_order(len(allowed), through)[place]])
        return item, self.count * through + item

    def evaluated(self, number: int) -> tuple[int, int]:
        """Item and reset seed of evaluation episode `number`, counted from 0; the last is followed by the first."""
        if self.kind == "seeds":
            return 0, number if self.on_training else HELD_OUT + number
        held = self.training if self.on_training else self.held
        through, place = divmod(number, len(held))
        item = int(held[place])
        return item, self.count * through + item

    def of(self, seed: int) -> tuple[int, int]:
        return self.evaluated(seed - HELD_OUT) if seed >= HELD_OUT else self.trained(seed)

    @property
    def says(self) -> str:
        """For people. Example: ``repair: evaluates on 3 of 30 rows that are not trained on``."""
        if self.on_training:
            what = "seeds" if self.kind == "seeds" else f"{self.count} {self.kind}"
            return f"{self.part}: evaluates on the {what} that it trains on"
        if self.kind == "seeds":
            return f"{self.part}: evaluates on seeds from {HELD_OUT} on, which are not trained on"
        source = "of its own file" if self.named else f"of {self.count}"
        return f"{self.part}: evaluates on {len(self.held)} {source} {self.kind} that are not trained on"


Share = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


def make(parts: Sequence[Items], share: float = SHARE) -> list[Split]:
    """Splits of all parts of a run, in their order. `share` 0: nothing is held out."""
    held: set[str] = set()
    for item in parts:
        if share and item.kind != "seeds":
            held |= _chosen(item, share)
    return [_split(item, held, share) for item in parts]


def _chosen(items: Items, share: float) -> set[str]:
    if items.evaluated:
        return set(items.keys[len(items.keys) - items.evaluated :])
    distinct = sorted(set(items.keys), key=_rank)
    return set(distinct[: max(1, round(share * len(distinct)))])


def _split(items: Items, held: set[str], share: float) -> Split:
    plain = Split(part=items.part, kind=items.kind, count=len(items.keys), digest=digest(items.keys))
    if items.kind == "seeds" or not share:
        return msgspec.structs.replace(plain, on_training=not share)
    first = len(items.keys) - items.evaluated
    here = [number for number, key in enumerate(items.keys) if key in held]
    evaluated = [number for number in here if number >= first] if items.evaluated else here
    left_out = sorted(set(here) - set(evaluated))
    if len(here) == len(items.keys):
        raise Invalid(
            f"{items.part} has nothing left to train on: all of its {len(items.keys)} {items.kind} are held out, "
            "or equal to one that is",
            hint="add data, or set held_share = 0 to evaluate on what is trained on",
        )
    return msgspec.structs.replace(plain, held=evaluated, left_out=left_out, named=bool(items.evaluated))


def key(item: object) -> str:
    """Equal items have equal keys, however a file writes them."""
    return hashlib.blake2b(msgspec.json.encode(item, order="deterministic"), digest_size=16).hexdigest()


def digest(keys: Sequence[str]) -> str:
    result = hashlib.blake2b(digest_size=16)
    for item in keys:
        result.update(f"{item}\n".encode())
    return result.hexdigest()


def write(run: Path, splits: Sequence[Split]) -> None:
    durable.publish(run / FILE, msgspec.json.encode(list(splits)))


def read(run: Path) -> list[Split]:
    try:
        return msgspec.json.decode((run / FILE).read_bytes(), type=list[Split])
    except FileNotFoundError:
        raise NotFound(
            f"{run} does not say what it holds out", hint="begin a new run: an older version made it"
        ) from None
    except msgspec.MsgspecError as error:
        raise Invalid(f"{run / FILE} is damaged: {error}", hint="copy the run directory back") from None


def need_same(split: Split, items: Items) -> None:
    """Refuses data that have changed since the split was made: it would say nothing about them."""
    if (split.part, split.kind, split.digest) != (items.part, items.kind, digest(items.keys)):
        raise Conflict(
            f"the {items.kind} of {items.part} have changed since the run began",
            hint="put them back, or begin a new run: --fresh",
        )


def _rank(existing: str) -> bytes:
    return hashlib.blake2b(f"held out? {existing}".encode(), digest_size=8).digest()


@functools.lru_cache(maxsize=8)
def _order(count: int, through: int) -> np.ndarray:
    """Milliseconds for a million items, once for each time through."""
    return np.random.default_rng([count, through]).permutation(count)
