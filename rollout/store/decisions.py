"""The log of decisions: every view, when it was seen, and the actions that were decided on.

Guarantee: `replay` decides again on each view and says where the actions differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout import step_log
from rollout.decide.engines.colocation import Colocation, Took
from rollout.decide.policy import RolloutPolicy
from rollout.decide.view import Action, Decision, RolloutView, SchedulingRules
from rollout.store import lines
from sandbox.errors import Invalid, NotFound

PATTERN = "decisions-*.jsonl.zst"


class DecisionLog:
    """Appends to the file of one generation. The first line holds the rules."""

    def __init__(self, directory: Path, generation: int, rules: SchedulingRules):
        self._lines = lines.Lines(directory / f"decisions-{generation:06d}.jsonl.zst")
        self._lines.append(rules)

    def append(self, now: float, view: RolloutView, actions: list[Action]) -> None:
        self._lines.append(Decision(now=now, view=view, actions=actions))

    def close(self) -> None:
        self._lines.close()


class ReplayReport(msgspec.Struct, kw_only=True):
    """What a replay found. `first_difference` names file and line."""

    decisions: int = 0
    identical: int = 0
    first_difference: str = ""


def replay(directory: Path) -> ReplayReport:
    """Decide again on every logged view."""
    files, steps = sorted(directory.glob(PATTERN)), sorted(directory.glob(step_log.PATTERN))
    if not files and not steps:
        raise NotFound(f"no log of decisions in {directory}", hint="name a run directory")
    result = ReplayReport()
    for path in files:
        for number, (rules, decision) in enumerate(read(path), 2):
            again = RolloutPolicy(rules).decide(decision.view, decision.now)
            _compare(result, f"{path.name}:{number}", again, decision.actions)
    for path in steps:
        budget, events = step_log.read(path)
        colocation = Colocation(budget)
        for number, event in enumerate(events, 2):
            if isinstance(event, Took):
                colocation.took(event.answers, event.prompt_tokens, event.seconds)
            else:
                colocation.frozen = event.view.frozen
                _compare(result, f"{path.name}:{number}", colocation.step(event.view, event.now), event.step)
    return result


def _compare(result: ReplayReport, where: str, again: object, logged: object) -> None:
    result.decisions += 1
    result.identical += again == logged
    if again != logged and not result.first_difference:
        result.first_difference = f"{where}: {again} instead of {logged}"


def read(path: Path) -> Iterator[tuple[SchedulingRules, Decision]]:
    """The complete lines of one file, each with the rules that it was decided by."""
    rules: SchedulingRules | None = None
    for line in lines.read(path):
        try:
            if rules is None:
                rules = msgspec.json.decode(line, type=SchedulingRules)
            else:
                yield rules, msgspec.json.decode(line, type=Decision)
        except msgspec.MsgspecError as error:
            raise Invalid(
                f"{path} is damaged: {error}", hint="restore it from a copy, or begin another run with --fresh"
            ) from error
