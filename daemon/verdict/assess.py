"""From what the kernel saw to the verdict on a turn: effects ▸ ignore rules ▸ judge ▸ what rules ignore.

::

    look    effects, without the processes that are ignored, judged. Quick: no system call where there are no rules
    assess  look; `files` alone, something that needs no checkpoint (ignored paths, scratch), and no other process could
            write: compare the tree with the last snapshot. Equal but for that: nothing to capture

Guarantee: `none` after a comparison means that every name of the upper layer was compared, and that no task of the
sandbox lived between the two looks that could have written. It marks nothing: what the next turn does is
compared with the same snapshot again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from daemon import metrics
from daemon.verdict import compare
from daemon.verdict.ignore import NOTHING, IgnoreRuleSet, RunningTask, without
from daemon.verdict.judge import Judgement, Options, judge
from sandbox.criu.open_files import OpenFiles, changed
from sandbox.messages import Effects, Verdict

if TYPE_CHECKING:
    from ebpf.effects import SurvivorObserved

    from ebpf.inspector import Inspector
    from sandbox.container.container import Container

SMALL = compare.Bounds(entries=400, content=1 << 20, seconds=0.02)  # where no rule asks for more
RESTS = 16  # turns without a comparison after one that was too large
IGNORED = "only what is ignored changed"
SCRATCH = "only scratch changed"
_PATH = re.compile(r" (/.+) by .+\[\d+\]$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class FileTrees:
    """Where the files of a sandbox lie. `before`: the upper of the last snapshot; None: there was nothing in it."""

    before: Path | None
    now: Path
    lower: Path
    taken_at: float  # seconds since the epoch: when the snapshot was made
    held: OpenFiles | None = None  # what the processes held then; None: not known


def poll(inspector: Inspector, container: Container, rules: IgnoreRuleSet = NOTHING) -> tuple[Effects, Judgement]:
    """The effects since the mark, and the judgement. With rules for processes it asks the kernel for each of them."""
    effects = inspector.read(container.cgroup.id)
    if (rules.names or rules.programs) and (effects.survivors_new or effects.survivors_ran or effects.channels):
        tasks = [_task(observed, rules) for observed in inspector.tasks(container.cgroup.id)]
        again = inspector.read(container.cgroup.id)
        if _same(effects, again):  # no program was executed while we read which ones run
            effects = without(again, tasks, rules)
    return effects, judge(effects)


class Assessor:
    """The verdicts of one sandbox. Remembers that its tree is too large to be compared."""

    def __init__(self, bounds: compare.Bounds | None = None) -> None:
        self._bounds = bounds
        self._rests = 0

    async def assess(
        self,
        inspector: Inspector,
        container: Container,
        places: Callable[[], FileTrees | None],
        *,
        rules: IgnoreRuleSet = NOTHING,
        busy: bool = False,
    ) -> tuple[Effects, Judgement]:
        """The effects, and the verdict that counts. `busy`: commands are under way.

        `places` is called where there is something to compare; None: compare nothing.
        """
        effects, judgement = poll(inspector, container, rules)
        trees = places() if judgement.verdict is Verdict.FILES else None
        if trees is None:
            return effects, judgement
        if trees.held is not None and effects.survivors:
            # Content, name and descriptor belong together.
            if gone := await asyncio.to_thread(changed, container, trees.held):
                return effects, judge(effects, Options(held_changed=gone))
        elif effects.survivors:
            return effects, judgement
        scratch = any(not bind.read_only for bind in container.spec.binds)
        if busy or not (rules.patterns or scratch) or not self._worth(effects, judgement):
            return effects, judgement
        case = compare.Case(
            times_set=bool(effects.times_set or effects.uring_requests),
            set_to_now=effects.times_now > 0,
            taken_at=trees.taken_at,
        )
        began = time.monotonic()
        outcome = await asyncio.to_thread(
            compare.trees,
            trees.before,
            trees.now,
            (container.layer, trees.lower),
            case,
            rules=rules,
            bounds=self._bounds or (None if rules.patterns else SMALL),
            hints=_paths(effects.reasons),
        )
        result = "equal" if outcome.equal else "unknown" if outcome.unknown else "different"
        metrics.comparisons.labels(result).observe(time.monotonic() - began)
        if not outcome.equal:
            self._rests = RESTS if outcome.unknown else 0
            return effects, judgement
        again, after = poll(inspector, container, rules)
        if after.verdict is not Verdict.FILES or not _same(effects, again):
            return again, after
        return effects, Judgement(Verdict.NONE, IGNORED if rules.patterns else SCRATCH)

    def _worth(self, effects: Effects, judgement: Judgement) -> bool:
        if judgement.verdict is not Verdict.FILES or effects.must_files:
            return False
        if effects.excluded or effects.ignored:  # they may write at any time
            return False
        if self._rests:
            self._rests -= 1
            return False
        return True


def _paths(reasons: list[str]) -> list[str]:
    """Paths that explanations name. Programs had a hand in them: good for hints only."""
    result = [_PATH.search(reason) for reason in reasons]
    return list(dict.fromkeys(match[1] for match in result if match is not None))


def _task(observed: SurvivorObserved, rules: IgnoreRuleSet) -> RunningTask:
    program = ""
    if rules.programs:
        with contextlib.suppress(OSError):  # it ended since
            program = os.readlink(f"/proc/{observed.pid}/exe")
    return RunningTask(name=observed.name, new=observed.new, ran=observed.ran, program=program, spoke=observed.spoke)


def _same(one: Effects, other: Effects) -> bool:
    """The same effects, without their explanations."""
    quiet = {"reasons": [], "lost_events": 0}
    return msgspec.structs.replace(one, **quiet) == msgspec.structs.replace(other, **quiet)
