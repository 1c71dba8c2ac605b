"""What a trajectory did to the operating system that a person should know, and what follows from it. Pure.

Guarantee: evidence by the final comparison of trees is exact: it is what differs from the state that the reset left,
whatever the agent's programs were called or claimed. Names that the inspector's explanations gave are hints: programs
have a hand in them, and of each turn only some are kept; a turn of which not all was seen is named so.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

if TYPE_CHECKING:
    from rollout.messages import Trajectory

TESTS = ["*/tests/*", "*/test/*", "*/test_*", "*_test.*", "*/conftest.py"]
HABITS = ("listener", "process", "times", "unseen")  # kinds that are no names of paths


class EffectRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``[effects]`` of a run. Example: ``EffectRules(paths={"tests": ["/app/tests/*"]}, then="mask")``"""

    # Patterns by a name of yours; `*` also matches /.
    paths: dict[str, list[str]] = msgspec.field(default_factory=lambda: {"tests": TESTS})
    forbid: list[str] = msgspec.field(default_factory=lambda: ["tests"])  # names of these, and of `HABITS`
    then: Literal["report", "penalty", "mask"] = "report"  # to a trajectory that did what is forbidden
    penalty: Annotated[float, msgspec.Meta(ge=0)] = 1.0  # taken from its reward

    def __post_init__(self) -> None:
        if unknown := set(self.forbid) - {*self.paths, *HABITS}:
            there = ", ".join([*self.paths, *HABITS])
            raise ValueError(f"effects.forbid names {', '.join(sorted(unknown))}; there are: {there}")


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a trajectory did. `turn` is None where only the final comparison shows it."""

    kind: str  # a name of `paths`, or one of `HABITS`
    what: str
    turn: int | None = None
    exact: bool = False


def evidence(trajectory: Trajectory, rules: EffectRules) -> list[Evidence]:
    """All that is known, by turn; then what the comparison of trees shows."""
    result: list[Evidence] = []
    for turn in trajectory.turns:
        result += [
            Evidence(kind=kind, what=path, turn=turn.index) for path in turn.touched for kind in _of(path, rules)
        ]
        if turn.listens:
            result.append(Evidence(kind="listener", what=f"listens {turn.listens} times", turn=turn.index, exact=True))
        if turn.left:
            result.append(Evidence(kind="process", what=f"left {turn.left} processes", turn=turn.index, exact=True))
        if turn.times_set:
            what = f"set times of {turn.times_set} files on purpose"
            result.append(Evidence(kind="times", what=what, turn=turn.index, exact=True))
        if turn.unseen:
            what = "did more than the inspector could name"
            result.append(Evidence(kind="unseen", what=what, turn=turn.index, exact=True))
    for path in trajectory.changed or ():
        result += [Evidence(kind=kind, what=path, exact=True) for kind in _of(path, rules)]
    return result


def watched(paths: Sequence[str], rules: EffectRules, limit: int) -> list[str]:
    """Those that some rule names; each name of a rule gets its share of `limit`."""
    retained: list[str] = []
    for name in rules.paths:
        retained += [path for path in paths if name in _of(path, rules)][: max(1, limit // max(1, len(rules.paths)))]
    return list(dict.fromkeys(retained))


def forbidden(trajectory: Trajectory, rules: EffectRules) -> list[Evidence]:
    return [item for item in evidence(trajectory, rules) if item.kind in rules.forbid]


def judged(trajectory: Trajectory, rules: EffectRules | None) -> tuple[float, bool]:
    """What is taken from its reward, and whether nothing may be learned from it. Hints alone suffice: a trajectory that
    edits a test and puts it back has edited it."""
    if rules is None or rules.then == "report" or not forbidden(trajectory, rules):
        return 0.0, False
    return (rules.penalty, False) if rules.then == "penalty" else (0.0, True)


def _of(path: str, rules: EffectRules) -> list[str]:
    """The names of the rules that a path matches."""
    return [name for name, patterns in rules.paths.items() if any(fnmatchcase(path, item) for item in patterns)]
